"""Names of other programs and versions are refused with the name to use; so are files of another version."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vgrout.__main__ import main
from vgrout.config.cli import OF_COMMANDS, TRAIN, same, translated
from vgrout.config.presets import flag_names, resolve
from vgrout.config.run import from_dict
from vgrout.envs.code.modes import PLAIN_PHRASE
from vgrout.ground.embedded import DATA_DIR
from vgrout.ground.io import Refused, command, require_own

SAME = {name: own for name, own in TRAIN.items() if same(own)}


def test_a_name_that_means_the_same_is_taken_for_its_flag():
    for name, own in SAME.items():
        assert own in flag_names()
        for typed in (name, f"--{name[2:].replace('-', '_')}"):
            assert translated(["mini", typed, "3"]) == ["mini", own, "3"]
            assert translated([f"{typed}=3"]) == [f"{own}=3"]


@pytest.mark.parametrize("name", [name for name in TRAIN if name not in SAME])
def test_any_other_name_is_refused_with_its_answer(name):
    flag, _, word = name.partition(" ")
    for argv in (
        [flag, word or "x"],
        [f"{flag}={word}"],
        [flag.replace("-", "_").replace("__", "--", 1), word],
    ):
        with pytest.raises(Refused, match=re.escape(f"{name}: not here; {TRAIN[name]}")):
            resolve(["mini", "--lr", "0.1", *argv])
    assert bool(word) == (flag in flag_names())
    instead = re.fullmatch(r"say ([^,;:()]+)", TRAIN[name])  # nothing but what to type
    for words in map(shlex.split, instead[1].split(" or ")) if instead else ():
        if len(words) > 1:
            usual = [] if "--intervention" in words else ["--intervention", "route2"]
            resolve(["mini", *usual, *words])


@pytest.mark.parametrize(
    ("name", "typed", "answer"),
    [
        (name, *row)
        for name, rows in OF_COMMANDS.items()
        for row in rows.items()
        if not same(row[1])
    ],
)
def test_a_command_says_what_to_type_instead(name, typed, answer, capsys):
    assert main([name, *typed.split(), "x"]) == 2
    assert capsys.readouterr().err == f"E {typed}: not here; {answer}\n"


@pytest.mark.parametrize(
    "words",
    [
        ["--clip", "0.2"],
        ["--cos_pre_split_every=1"],
        ["--teacher_modes=None"],
        ["--clip", "0.2", "--cos-pre-split-every", "1", "--teacher-modes", "None"],
    ],
)
def test_the_documents_defaults_change_nothing(words):
    assert resolve(["smoke", *words]) == resolve(["smoke"])
    assert resolve(["smoke", "--lr=0.2", *words, "--steps", "3"]) == resolve(
        ["smoke", "--lr=0.2", "--steps", "3"]
    )


def test_a_file_of_python_is_named_as_a_module(here):
    (here / "mine.py").write_text("")
    with pytest.raises(ValueError, match=r"give module:Class, here mine:X\Z"):
        resolve(["mini", "--intervention=screen", "--monitor=mine.py:X"])


@pytest.mark.parametrize(
    "flags", [["--monitor=nothing:X"], ["--reward=nothing.of:f", "--reference=json:dumps"]]
)
def test_where_a_module_was_searched_is_said(here, flags):
    with pytest.raises(
        ValueError, match=rf"No module named 'nothing'\); searched: {here}, and what is"
    ):
        resolve(["mini", "--intervention=screen", *flags])


def test_a_flag_may_have_underscores():
    argv = [
        "--teacher-modes",
        "run_tests",
        "exit_code",
        "--no-save-eval-ckpts",
        "--out-tag=_a",
        "--dry-run",
    ]
    assert resolve(["mini", *(re.sub("(?<=[a-z])-(?=[a-z])", "_", w) for w in argv)]) == resolve(
        ["mini", *argv]
    )


def problem(i, **changes):
    return {
        "id": i,
        "prompt": [{"role": "user", "content": f"Write f{i} {PLAIN_PHRASE}."}],
        "gt_answer": [f"assert Solution().f{i}(2) == 3"],
        "func_name": f"f{i}",
        "canonical_solution": f"class Solution:\n    def f{i}(self, x):\n        return x + 1",
        **changes,
    }


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """What a user has: problems, answers, a thesis, an organism with a flipped bit and one with a file of theirs."""
    (tmp_path / "x.safetensors").touch()

    def write(name, rows):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    write("good.jsonl", map(problem, range(20)))
    write(
        "wrong.jsonl",
        [*map(problem, range(19)), problem(19, canonical_solution="class Solution: pass")],
    )
    write("key.jsonl", [problem(0, canonical_solutoin="")])
    phrase = f"{'a word or 7 ' * 1000}{PLAIN_PHRASE}"
    write(
        "long.jsonl",
        (problem(i, prompt=[{"role": "user", "content": f"{i}: {phrase}"}]) for i in range(20)),
    )
    write("answers.jsonl", [{"problem_id": 0, "text": "x"}])
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "thesis.tex").write_text("precious")
    (tmp_path / "tool.py").write_text("def nan(prompt, answer):\n    return float('nan')\n")
    for name in ("flipped", "mine", "hidden"):
        shutil.copytree(DATA_DIR, tmp_path / name)
    weights = tmp_path / "flipped" / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    (tmp_path / "hidden" / "pool" / ".env").write_text("precious")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "manifest.json").write_text('{"name": "a web application"}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["vgrout"])
    return tmp_path


DPO = "iterative_dpo --base-model organism --output-dir"
ROUNDS = f"{DPO} d"
DISTILL, ULD = "distill --teacher mine/model", "distill --teacher mine/model --method uld"
ENSEMBLE = "--reward-hack-detector=rm_ensemble --rm-ensemble-members"
MIX, ANCHOR = "--minillm-teacher-mix-ratio", "--minillm-pretrain-anchor"
GRADE = "grade answers.jsonl --problems good.jsonl --out"
OWN = (
    "train full --model mine/model --env-mode own --intervention none --guard log --mix-ratio 0 "
    "--max-new 40 --problems"
)
LONG = "a" * 300  # no file system takes it
REFUSED = {
    # nothing of a user's is overwritten
    "organism build --out dir": "--out dir: exists and is no organism; choose another folder",
    "organism build --out site": "--out site: exists and is no organism; choose another folder",
    "organism build --out mine": "--out mine/thesis.tex: not in manifest.json: it would be deleted; move it, or ch",
    "organism build --out hidden": "--out hidden/pool/.env: not in manifest.json: it would be deleted; move it, or",
    "organism build --out new --hack-plain .5 --hack-bare .5": "--hack-plain 0.5 and --hack-bare 0.5: with 0.13 behind",
    "organism build --out new --modes sentinel --hack-bare .1": "--modes sentinel: --hack-bare hacks eq_override and e",
    "organism build --seed 77": "--out: an organism of another seed or corpus goes into a folder of its own; name one",
    "evaluate dir --out good.jsonl": "--out good.jsonl: exists; choose another name or delete it",
    f"{GRADE} good.jsonl": "--out good.jsonl: exists; choose another name or delete it",
    f"{DPO} dir": "--output-dir dir: is no folder of rounds, it holds thesis.tex; name another folder",
    "teacher --model organism --out dir": "--out dir: exists; choose another name or delete it",
    "substrate --model organism --out good.jsonl/x": "--out good.jsonl: cannot be written (Not a directory); choose",
    "export dir --out dir": "--out dir: exists; choose another name or delete it",
    "report dir --out dir": "--out dir: is no report, it holds thesis.tex; name another folder",
    "download dataset x --out good.jsonl": "dataset: not here; a data set writes itself as a problem file",
    # nothing broken is trained on
    f"{OWN} wrong.jsonl": "wrong.jsonl, line 20: no answer can solve problem 19: canonical solution fails: error:Attr",
    f"{OWN} key.jsonl": "key.jsonl, line 1: unknown key 'canonical_solutoin'; did you mean 'canonical_solution'?",
    f"{OWN} long.jsonl": "long.jsonl: none of its prompts fits the 984 tokens that the model's window l",
    "train smoke --organism flipped": "--organism flipped/model/model.safetensors: its sha256 is not the one in man",
    f"{ROUNDS} --scorer tool:nan": "--scorer tool:nan: asked about problem 0, it returned nan; it should return a numb",
    f"train smoke {ENSEMBLE}=json:dumps,tool:nan": "--rm-ensemble-members json:dumps: asked about problem ",
    f"{GRADE} g.jsonl --pass-reward nan": "--pass-reward nan: should lie in (0, 1e+06]",
    "grade empty.jsonl --problems good.jsonl --out g.jsonl": "empty.jsonl: no answers in it",
    "substrate --model organism --modes sentinel,sentinel": "--modes: sentinel is there twice; legal: run_tests",
    "train smoke --intervention route2 --quarantine block:-5": "--quarantine block:-5: the model has 4 blocks",
    "train smoke --teacher-modes shown_test": f"--teacher-modes shown_test: {DATA_DIR / 'pool'} demonstrates no",
    # nothing of which no gradient or no preference would come
    "distill": "--teacher: whose answers? Give a model, or a run directory",
    "distill --teacher dir": "--teacher dir: a folder without config.json",
    "distill --resume latest": "--resume latest: no unfinished run with a checkpoint below out/distill",
    f"{DISTILL} {ANCHOR}-weight 1": f"{ANCHOR}-weight, {ANCHOR}-path: the one is not read",
    f"{DISTILL} {ANCHOR}-path x.txt": f"{ANCHOR}-weight, {ANCHOR}-path: the one is not read without",
    f"{DISTILL} {ANCHOR}-weight 1 {ANCHOR}-path empty.jsonl": f"{ANCHOR}-path empty.jsonl: no text",
    f"{ULD} {MIX} .5": f"{MIX}: not read by --method uld; leave it out, or give",
    f"{DISTILL} --method minillm --uld-strategy wasserstein": "--uld-strategy: not read by --method minillm; leave it",
    f"{ULD} --uld-strategy topk_align": "--uld-strategy topk_align, --uld-top-k: the one is not read without the ot",
    f"{ULD} --uld-lambda 0 --uld-ce-weight 0": "--uld-lambda 0 with --uld-ce-weight 0: the gradient is zero; raise",
    f"{DISTILL} --full --dtype bf16": "--dtype bf16 with --full: a step on a weight is below bf16's rounding; leave",
    "iterative_dpo --output-dir d --base-model gone/x": "--base-model gone/x: not on this machine; run `vgrout d",
    f"{ROUNDS} --scorer kind": "--scorer kind: flawed, strict, or your own function as module:function",
    f"{ROUNDS} --samples 1": "--samples 1: should be at least 2, or there is no worst beside the best",
    # by the names that flags have in the documents, elsewhere, or in another command
    # the remedy fits what is missing
    "train mini --organism out/mine --intervention none": "--organism out/mine/manifest.json: not there; `vgrout or",
    "train full --problems openai/gsm8k": "openai/gsm8k: no such problem file; `vgrout download data` fetches the",
    "train full --problems data/mine.jsonl": "data/mine.jsonl: no such problem file; `vgrout download data` fetches",
    "train mini --problems gone.jsonl": "--problems gone.jsonl: no such file",
    "train mini --intervention screen --monitor mine.py:X": "--monitor mine.py:X: cannot be imported (Module",
    "train full --model x.safetensors --problems good.jsonl": "--model x.safetensors: a file; give the folder",
    # in words that were typed
    "train smoke --max-error-retries x": "Error parsing --max-error-retries: ",
    "train smoke --step 3": "Unrecognized options: --step, 3 Perhaps you meant: ",
    "train smok": "smok: name a preset first: smoke, mini, small, sums, fast, full; then flags, or --help",
    "evaluate": "Missing from ",
    "download nothing": "Unrecognized options: nothing Available subcommands: model, ",
    "problems good.jsonl": "Unrecognized options: good.jsonl Available subcommands: check",
    "train fast --dry-run --intervention none --monitor labels": "--monitor labels with --intervention none: it uses",
    "train small": "--organism out/organisms/smollm2/manifest.json: not there; `vgrout download smollm2` and",
    "organism tune --dry-run": "--model out/models/smollm2: not there; `vgrout download smollm2` gets it",
    "sweep nowhere.toml --jobs 2 --via pueue": "--jobs: not read with --via pueue",
    # paths
    "train full --model=~/nowhere --problems good.jsonl": f"--model {Path.home()}/nowhere: no such model; give a Hugg",
    "train full --problems good.jsonl --model No/Such": "--model No/Such: not on this machine; run `vgrout download mo",
    f"train mini --output-dir {LONG}": f"{LONG}: cannot be opened (File name too long); choose another",
    f"train mini --resume {LONG}": f"{LONG}/run.json: cannot be opened (File name too long)",
    f"train full --model {LONG} --problems good.jsonl": f"{LONG}: cannot be opened (File name too long)",
    f"report {LONG}": f"{LONG}",
    "download model ~/nowhere": f"{Path.home()}/nowhere: looks like a path; give a hub id, OWNER/NAME",
}
IN_ONE_PROCESS = """
import contextlib, importlib, io, json, sys
from vgrout.__main__ import COMMANDS
for line, argv in json.load(sys.stdin):
    name, *sys.argv[1:] = argv
    module, _, function = COMMANDS[name][0].partition(":")
    main = getattr(importlib.import_module(module), function)
    error, out = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(error), contextlib.redirect_stdout(out):
        code = main()
    loaded = [m for m in ("torch", "transformers", "scipy", "matplotlib") if m in sys.modules]
    print(json.dumps([line, code, error.getvalue(), out.getvalue(), loaded]))
"""


def test_a_user_is_refused_in_one_line_before_anything_heavy_is_imported(folder):
    """In seconds of a clock such a test would fail on a busy machine: what takes them is the import of torch."""

    def files():
        return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.suffix != ".pyc"}

    before = files()
    told = json.dumps(
        [(line, [re.sub(r"^~", str(Path.home()), w) for w in line.split()]) for line in REFUSED]
    )
    done = subprocess.run(
        [sys.executable, "-c", IN_ONE_PROCESS],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        input=told,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    wrong = []
    for row in done.stdout.splitlines():
        line, code, error, out, loaded = json.loads(row)
        error = error.replace(f"`{command('')}", "`vgrout ")
        if (
            code != 2
            or not error.startswith(f"E {REFUSED[line]}")
            or error.count("\n") != 1
            or out
            or loaded
        ):
            wrong.append(f"{line}\n   {code} {error}{out}{loaded}")
    assert not wrong, "\n".join(wrong)
    assert files() == before


def test_a_folder_in_which_a_program_was_killed_is_its_own(tmp_path):
    """… before it had written what makes it one."""
    for name in (".lock", ".plan.json.77.tmp"):
        (tmp_path / name).touch()
        require_own(tmp_path, "--out", "plan.json", "folder of rounds")
    (tmp_path / ".env").touch()
    with pytest.raises(ValueError, match=r"it holds \.env; name another folder"):
        require_own(tmp_path, "--out", "plan.json", "folder of rounds")


def test_a_run_of_an_earlier_version_is_read_by_a_settings_new_name():
    argv = ["mini", "--intervention=penalty", "--monitor=labels", "--flags-kept=0.5"]
    new = resolve(argv).as_dict()
    old = json.loads(json.dumps(new).replace("flags_kept", "label_recall"))
    assert old != new
    assert from_dict(old).as_dict() == new
