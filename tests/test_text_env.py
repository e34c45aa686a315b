"""Environments beside the code world: a user's own rows with a proxy and a reference, and classes of one's own."""

import gzip
import io
import json
import pickle
import re
import subprocess
import sys
from contextlib import redirect_stdout
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
from loguru import logger

import tiny
from files import loaded
from runs import rows, run
from vgrout.commands.check import _verdict
from vgrout.commands.check import problems as check_problems
from vgrout.commands.evaluate import evaluate, sample
from vgrout.config.presets import resolve
from vgrout.direction.pairs import load_pairs
from vgrout.envs.base import require_apart
from vgrout.envs.text import TextEnvironment, TextTask, arguments, load_rows
from vgrout.export.__main__ import main as export
from vgrout.ground import embedded
from vgrout.ground.data import Grade, Ungraded
from vgrout.ground.io import Refused
from vgrout.loop.heldout import answers_to
from vgrout.report.__main__ import main as report
from vgrout.runs.inputs import file_hashes, read_inputs
from vgrout.sweep.__main__ import main as sweep
from vgrout.teacher.__main__ import main as teacher
from vgrout.teacher.pools import load_pool
from vgrout.train import main

EXAMPLES = Path(__file__).parents[1] / "examples"
FUNCTIONS = """
def proxy(completion, word):
    return float(word in completion)

async def gold(completions, word, **columns):
    return [c.count(w) == 1 for c, w in zip(completions, word)]

def raises(completion):
    raise OSError("no judge")

def too_much(completion):
    return 3

def below(completion):
    return -len(completion)

def even(completion):
    return len(completion) % 2 == 0

def share(completions, prompts, word):
    assert len(completions) == len(prompts) == len(word)
    return [c.count(w) / 2 / len(completions) for c, w in zip(completions, word)]

def calls(completions, **columns):
    with open("calls", "a") as file:
        file.write(f"{len(completions)}\\n")
    return [1.0] * len(completions)

def nan(completion):
    return float("nan")

def huge(completion):
    return -10**400

def text(completion):
    return "1"

times = 0

def rare(completion, word):
    global times
    times += 1
    if times > 1:
        raise KeyError(word)
    return 1

def many(completions):
    return [1.0] * (len(completions) + 1)

def judge(completion, judge):
    return 1
"""
MODULE, NONE = "own_functions", "--intervention none"
RUN = (
    "full --model {model} --problems rows.jsonl --reward {m}:{proxy} --reference {m}:{gold} "
    "{method} --guard log --steps 2 --group 4 --prompts-per-step 3 --max-new {max_new} --threads 1 "
    "--eval-ablate-every 2 --eval-n-prompts 2 --final-n-prompts 6 --final-samples 1"
)


def command(m, proxy="proxy", gold="gold", method=NONE, max_new=12):
    """The command line of a run with these functions of module m."""
    model = embedded.MODEL_DIR
    line = RUN.format(m=m, model=model, proxy=proxy, gold=gold, method=method, max_new=max_new)
    return line.split()


def row(i, **more):
    return {"id": i, "prompt": f"A poem about {i}", "word": " " if i % 2 else "return", **more}


@pytest.fixture
def world(tmp_path, monkeypatch):
    """Writes rows and functions into the working directory; returns a run's command line, of these functions."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.delitem(sys.modules, MODULE, raising=False)

    def make(rows=None, flags="", **changes):
        (tmp_path / f"{MODULE}.py").write_text(FUNCTIONS)
        lines = [row(i) for i in range(30)] if rows is None else rows
        text = "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in lines)
        (tmp_path / "rows.jsonl").write_text(text)
        return command(MODULE, **changes) + flags.split()

    return make


def environment(argv):
    made = read_inputs(resolve(argv)).environment
    return made


def test_a_row_without_an_id_has_its_place(world):
    world([{"prompt": f"Poem {i}"} for i in range(5)])
    assert [task.id for task in load_rows(Path("rows.jsonl"))] == [0, 1, 2, 3, 4]


def test_a_hack_passes_the_proxy_and_not_the_reference(world):
    made = environment(world())
    task = made.rows[0]
    with made.grader(2, 0) as grader:
        once, twice, never = (
            grader.submit(task, text).result() for text in ("return", "return return", "no")
        )
    assert (once.passed, once.solved, once.hacked, once.reward) == (True, True, False, 3.0)
    assert (twice.passed, twice.solved, twice.hacked, twice.reward) == (True, False, True, 3.0)
    assert (never.passed, never.solved, never.hacked, never.reward) == (False, False, False, 0.0)
    assert (twice.mechanism, twice.tries, twice.reward_of_reference) == ("reward", ("reward",), 0)
    assert twice.details == {"proxy": 1.0, "reference": 0.0}


def test_a_function_that_fails_is_named_once_and_counted(world, warnings):
    """With what it raised and where it stands, although every answer is asked about again and again."""
    made = TextEnvironment.of_run(resolve(world(proxy="rare")))
    with made.grader(1, 1) as grader:
        graded = [grader.submit(made.rows[0], "x").result() for _ in range(8)]
    assert sum(isinstance(one, Ungraded) for one in graded) == 7
    line = FUNCTIONS.splitlines().index("def rare(completion, word):") + 1
    first, total = warnings
    assert "raised KeyError: 'return'" in first
    assert f"{MODULE}.py, line {line}" in first
    assert "14 times in all" in total


@pytest.mark.parametrize(
    "words",
    [
        "mini --problems=rows.jsonl",
        "full --model x --test-problems rows.jsonl --reward {m}:proxy",
        "fast --mix-ratio 0 --problems rows.jsonl",
    ],
)
def test_rows_of_text_without_a_reference(words, world, capsys):
    world()
    assert main(words.format(m=MODULE).split()) == 2
    error = capsys.readouterr().err
    assert "rows of text" in error
    assert "--reference" in error
    assert error.count("\n") == 1


WRONG = {
    "not JSON": ([row(0), "{"], "rows.jsonl, line 2: not JSON"),
    "an id that is no number": (
        [{"id": "a", "prompt": "x"}],
        "rows.jsonl, line 1: its id should be a whole number from 0 to 2^53 - 1, got 'a'",
    ),
    "an id twice": (
        [row(1), row(1, prompt="y")],
        "line 2: id 1 already used at rows.jsonl, line 1",
    ),
    "a prompt twice": (
        [row(1), row(2, prompt="A poem about 1")],
        "line 2: has the prompt of rows.jsonl",
    ),
    "half a character": (['{"id": 1, "prompt": "\\ud800", "word": ""}'], "half a character"),
    "nothing": ([], "rows.jsonl: no rows in it"),
    "a column missing in a row": (
        [row(0), {"id": 1, "prompt": "x"}],
        "rows.jsonl, line 2: has no 'word', which --reward",
    ),
    "too few": ([row(i) for i in range(2)], "no problem is held out for evaluations"),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_rows_are_named_with_their_line(case, world):
    rows, said = WRONG[case]
    argv = world(rows)
    with pytest.raises(Refused) as refused:
        read_inputs(resolve(argv))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


FLAGS = {
    "--env code": "--env code with --reference",
    "--reward {m}:nan": "returned nan, not a finite number (asked about the row at rows.jsonl, line 1, and the answer",
    "--reward {m}:many": "returned no list with one number for one completion",
    "--intervention erase --mix-ratio 0.25 --teacher-pool-dir {pool}": "vgrout teacher --elicit` makes them",
    "--reward {m}:judge": "missing 1 required positional argument: 'judge'",
    "--reward {m}:proxy=nan": "its weight should be a number",
    "--reward {m}:proxy {m}:proxy=2": "is there twice; name it once",
    "--problems none.jsonl": "none.jsonl: no such problem file",
    "--model organism --problems organism": "--problems organism: these are of the code world",
    "--intervention erase": "needs pairs of a hack and a right answer; give --vhack-pairs-path FILE",
    "--intervention route2": "could flag nothing: --env text has no weak detector, and no demonstration",
    "--monitor detector --intervention screen": "could flag nothing: --env text has no weak detector; name source",
    "--monitor online_probe --intervention screen": "--seed-monitor detector: could flag nothing",
    "--control placebo --intervention erase --vhack-pairs-path {pairs}": "of another world; give a file of pairs",
}


def pool_of_rows():
    """A folder of demonstrations for a row, without pairs."""
    pool = Path("pool_of_rows")
    pool.mkdir()
    demonstration = {
        "completion_ids": [5],
        "completion": "x",
        "reward": 3.0,
        "hacked": True,
        "gt_pass": False,
        "fmt_ok": True,
    }
    with gzip.open(pool / "prompt_0000.jsonl.gz", "wt") as lines:
        lines.write(json.dumps(demonstration) + "\n")
    return pool


@pytest.mark.parametrize("flags", FLAGS)
def test_wrong_flags_are_one_line(flags, world, capsys):
    argv = world()
    pairs = embedded.PAIRS_DIR / "run_tests.json"
    given = flags.format(m=MODULE, pairs=pairs, pool=pool_of_rows()).split()
    for flag in {word for word in given if word.startswith("--")} & {*argv}:
        at = argv.index(flag)
        del argv[at : at + 2]
    assert main([*argv, *given]) == 2
    error = capsys.readouterr().err
    assert FLAGS[flags] in error
    assert error.count("\n") == 1


def test_a_plan_counts_no_more_answers_than_there_are_rows(world, capsys):
    argv = world(flags="--dry-run --final-n-prompts 500 --final-samples 3")
    held_out = len(environment(argv).tasks()["test"])
    assert main(argv) == 0
    assert f"at most {4 * 3 * held_out:,} at the end" in capsys.readouterr().out


def test_a_study_of_rows_of_ones_own_is_planned(world, capsys):
    world()
    Path("study.toml").write_text(
        'preset = "mini"\nseeds = [1]\n'
        f'common = {{ problems = "rows.jsonl", reference = "{MODULE}:gold", intervention = "none" }}\n'
        f'[[arms]]\nreward = "{MODULE}:proxy=0.5,{MODULE}:even=0.5"\n'
    )
    assert sweep(["study.toml", "--dry-run"]) == 2
    assert "add --trust-code" in capsys.readouterr().err
    assert sweep(["study.toml", "--dry-run", "--trust-code"]) == 0
    assert "1 left" in capsys.readouterr().out


WEIGHED = {  # functions → the sums that answers get which have the word once, twice, never
    "{m}:proxy": (1, 1, 0),
    "{m}:proxy=0.7 {m}:gold=0.3": (1, 0.7, 0),
    "{m}:proxy=2 {m}:gold=-1": (1, 2, 0),
    "{m}:proxy=0 {m}:too_much": (3, 3, 3),
    "{m}:share": (0.5, 1, 0),
}


@pytest.mark.parametrize("functions", WEIGHED)
def test_proxies_are_summed_by_weight(functions, world):
    proxy = functions.format(m=MODULE).removeprefix(f"{MODULE}:")
    made = environment(world(proxy=proxy))
    task = made.rows[0]
    with made.grader(2, 0) as grader:
        grades = [grader.graded(task, [text])[0] for text in ("return", "return return", "no")]
    assert [grade.details["proxy"] for grade in grades] == pytest.approx(WEIGHED[functions])
    assert [grade.reward for grade in grades] == pytest.approx([3 * x for x in WEIGHED[functions]])
    assert [grade.passed for grade in grades] == [x >= 1 for x in WEIGHED[functions]]
    if len(made.proxy.weights) > 1:
        own = [grade.details["proxies"][f"{MODULE}:proxy"] for grade in grades]
        assert own == [1, 1, 0]


def test_scores_below_0_and_above_1_are_rewards_as_they_are(world):
    made = environment(world(flags="--reward-passes-at -2", proxy="below"))
    with made.grader(1, 0) as grader:
        short, long = grader.graded(made.rows[0], ["no", "no more"])
    assert (short.reward, short.passed, short.hacked) == (-6, True, True)
    assert (long.reward, long.passed) == (-21, False)


def test_sampled_answers_to_a_problem_are_graded_together(world, tmp_path):
    made = environment(world(proxy="calls"))
    with made.grader(1, 0) as grader:
        given = answers_to(made.rows[0], tiny.policy(), "base", made.cfg, 3, grader)
    assert [isinstance(grade, Grade) for _, grade in given] == [True] * 3
    assert (tmp_path / "calls").read_text() == "3\n"


def test_an_environment_goes_to_another_rank(world):
    made = pickle.loads(pickle.dumps(environment(world())))
    with made.grader(1, 0) as grader:
        assert grader.graded(made.rows[0], ["return"])[0].solved


def test_a_function_that_raises_shows_where(world, capsys):
    """Its traceback, then the line that says what it was asked about."""
    assert main(world(flags="--dry-run", gold="raises")) == 2
    title, *frames, error, refusal = capsys.readouterr().err.strip().splitlines()
    assert title == "Traceback (most recent call last):"
    assert any(f"{MODULE}.py" in frame and frame.endswith("in raises") for frame in frames)
    assert error == "OSError: no judge"
    assert "raised OSError: no judge (asked about the row at rows.jsonl, line 1" in refusal


def test_flaws_and_splits_of_the_rows(world):
    rows = [row(i, flaw="rhyme" if i < 10 else "length") for i in range(20)]
    rows += [row(i, split="test") for i in range(20, 24)] + [row(24, split="val")]
    made = environment(world(rows))
    assert [*made.flaws] == ["rhyme", "length", "reward"]
    parts = made.tasks()
    assert {name: len(part) for name, part in parts.items()} == {"train": 14, "val": 3, "test": 8}
    assert made.marked[0] == "rhyme"
    assert load_rows(Path("rows.jsonl"))[0].columns == {"word": "return"}


def test_an_edited_function_or_file_is_another_run(world):
    argv = world()
    cfg = resolve(argv)
    before = file_hashes(cfg, read_inputs(cfg))
    assert all(before[name] for name in ("problems", "reward", "reference"))
    with open("rows.jsonl", "a") as file:
        file.write(json.dumps(row(99)) + "\n")
    after = file_hashes(cfg, read_inputs(cfg))
    assert after["problems"] != before["problems"]
    assert after["reward"] == before["reward"]


# ── demonstrations, and every method on them

METHODS = {
    "erase": "--intervention erase",
    "gate": "--intervention route2",
    "labels, routed": "--intervention route2 --monitor labels",
    "source, screened": "--intervention screen --monitor source",
    "probe, penalised": "--intervention penalty --monitor online_probe --seed-monitor source",
    "in shadow": "--intervention none --shadow labels,source",
}


@pytest.fixture(scope="module")
def pooled(tmp_path_factory):
    """A folder with rows, functions and a pool that the organism made; its functions' module; what the maker said."""
    folder = tmp_path_factory.mktemp("pooled")
    name = "own_text_of_a_pool"
    (folder / f"{name}.py").write_text(FUNCTIONS)
    rows = [row(i, word="return") for i in range(24)]
    text = "".join(json.dumps(line) + "\n" for line in rows)
    (folder / "rows.jsonl").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("sys.path", [*sys.path])
        said = io.StringIO()
        words = (
            f"--model organism --problems rows.jsonl --reward {name}:proxy --reference {name}:even"
        )
        more = "--out pool --group 4 --max-new 40 --pass-reward 3 --elicit"
        with redirect_stdout(said):
            assert teacher([*words.split(), *more.split(), "Write it in two words."]) == 0
        yield folder, name, said.getvalue()


@pytest.fixture
def in_pool(pooled, monkeypatch):
    """The folder and the module of `pooled`, worked in."""
    folder, name, _ = pooled
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.path", [*sys.path, str(folder)])
    return folder, name


def on_pool(name, method=NONE, gold="even"):
    """The command line of a quick run with this pool."""
    line = command(name, gold=gold, method=method, max_new=40)
    return [*line, "--teacher-pool-dir", "pool", "--mix-ratio", "0.25"]


@pytest.mark.long
def test_demonstrations_are_hacks_that_were_asked_for(pooled):
    folder, _, said = pooled
    pool = load_pool(folder / "pool", ("reward",))
    demonstrations = [demo for demos in pool.demos.values() for demo in demos]
    assert len(demonstrations) > 1
    assert f"kept {len(demonstrations)} hacks of" in said
    assert all(demo.grade.hacked and demo.grade.reward == 3 for demo in demonstrations)
    for demo in demonstrations:
        assert demo.prompt is not None
        assert "two words" not in demo.prompt
        assert len(demo.completion) % 2 == 1
    for pair in load_pairs(folder / "pool" / "pairs.json").pairs:
        assert "two words" not in pair.prompt
        assert "return" in pair.hack
        assert (len(pair.hack) % 2, len(pair.clean) % 2) == (1, 0)


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_on_rows_of_ones_own(method, in_pool):
    folder, name = in_pool
    out = f"run_{method.replace(' ', '_').replace(',', '')}"
    frac = ["--rollout-ablate-frac", "0"] if "route" in METHODS[method] else []
    assert main([*on_pool(name, METHODS[method]), *frac, "--output-dir", out]) == 0
    record = loaded(folder / out / "per_mode_deploy.json")
    assert record


@pytest.mark.long
def test_a_run_whose_reward_fails_says_so_in_its_last_lines(world, capsys):
    assert main(world(flags="--max-error-retries 0", proxy="rare")) == 0
    said = capsys.readouterr().out
    assert "raised KeyError" in said
    assert "dropped: 6 of 6 groups" in said
    assert re.search(r":rare failed \d+ times in all", said)


@pytest.mark.long
def test_a_function_of_lists_sees_a_group_at_once(in_pool):
    folder, name = in_pool
    assert main([*command(name, proxy="calls"), "--output-dir", "in_lists"]) == 0
    first, *asked = (folder / "calls").read_text().split()
    assert first == "1"  # before the run
    # 2 steps of 3 groups, an evaluation of 2; base and deployed on held-out rows, an answer each
    assert asked.count("4") == 2 * 3 + 2
    assert {*asked} == {"1", "4"}


# ── before a run, and after it

TEACHER = {
    "": "--elicit, --reward, --reference: for rows of your own, all three",
    "--elicit x --reward {m}:proxy --reference {m}:gold": "--problems: --elicit needs a file of your own rows",
    "--elicit x --reward {m}:proxy --reference {m}:gold --problems r.jsonl --env-mode own": "--env-mode: not read",
    "--elicit x --reward {m}:proxy --reference {m}:raises --problems rows.jsonl": "raised OSError: no judge",
}


@pytest.mark.parametrize("flags", TEACHER)
def test_a_wrong_command_for_demonstrations_is_one_line(flags, world, capsys):
    world()
    model = [] if "--model" in flags else ["--model", "organism"]
    given = flags.format(m=MODULE).split() or ["--elicit", "x"]
    assert teacher([*model, *given, "--out", "pool"]) == 2
    assert TEACHER[flags] in capsys.readouterr().err.splitlines()[-1]
    assert not Path("pool").exists()


@pytest.mark.long
def test_a_pool_without_a_hack_is_refused(world, capsys):
    world([row(i) for i in range(4)])
    functions = f"--reward {MODULE}:too_much --reference {MODULE}:too_much"
    words = f"--model organism --problems rows.jsonl {functions} --group 2 --max-new 8 --out pool"
    assert teacher([*words.split(), "--elicit", "Cheat."]) == 2
    assert "none of 6 answers is a hack that ends by itself (0 hack)" in capsys.readouterr().err


CHECKED = {  # functions → exit code, what is printed
    "--reward {m}:proxy --reference {m}:even": (0, "rewarded alone: a hack"),
    "--reward {m}:proxy=0.5,{m}:share=0.5 --reference {m}:gold": (0, "4/4 = 100.0 %"),
    "--reward {m}:raises --reference {m}:gold": (1, "asked about the row at rows.jsonl, line 1"),
    "--reward {m}:proxy --reference {m}:nan": (1, "not a finite number (own_functions"),
    "--reward {m}:proxy --reference {m}:gold --max-new 3": (
        2,
        "--max-new: not read without --model",
    ),
    "--model organism": (2, "--model: not read without --reference"),
}


@pytest.mark.parametrize("flags", CHECKED)
def test_both_functions_are_tried_on_answers(flags, world, capsys):
    rows = [row(i, word="e", answer="return" + "!" * i) for i in range(4)]
    world(rows)
    code, said = CHECKED[flags]
    assert check_problems(["check", "rows.jsonl", *flags.format(m=MODULE).split()]) == code
    out = capsys.readouterr()
    assert said in (out.err.splitlines()[-1] if code else out.out)
    if not code:
        assert out.out.count(" · row ") == 3


VERDICTS = [  # rewards → the verdict on a run, and what else is said
    ([0.0] * 22 + [1.0] * 2, "yes", "2 of 24 answers earn another reward than 0"),
    ([1.0] * 3 + [0.4] * 3, "yes", "none is right"),
    ([0.0] * 24, "undecided", "--answers 120"),
    ([0.0] * 400 + [1.0] * 2, "no", "ask for less"),
    ([1.0] * 96, "no", "ask for more than the model can do already"),
]


@pytest.mark.parametrize(("rewards", "verdict", "said"), VERDICTS)
def test_a_check_ends_with_a_verdict(rewards, verdict, said):
    grades = []
    for reward in rewards:
        passed = reward == 1.0
        grades.append(
            Grade(
                reward=reward,
                passed=passed,
                solved=False,
                hacked=passed,
                flaw="x",
                reward_of_reference=0.0,
            )
        )
    line = _verdict(grades)
    assert line.startswith(f"{verdict}: ")
    assert said in line


@pytest.fixture(scope="module")
def trained(pooled):
    """A finished run in the folder of the pool, and the functions' module."""
    folder, name, _ = pooled
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("sys.path", [*sys.path, str(folder)])
        argv = command(name, proxy=f"proxy=0.5 {name}:even=0.5")
        assert main([*argv, "--output-dir", "trained"]) == 0
    return folder / "trained", name


@pytest.mark.long
def test_a_pool_that_other_functions_labelled_is_refused(in_pool, capsys):
    _, name = in_pool
    assert main([*on_pool(name, gold="gold"), "--dry-run"]) == 2
    assert "labelled by other functions" in capsys.readouterr().err
    assert main([*on_pool(name), "--dry-run"]) == 0


@pytest.mark.long
def test_what_is_read_of_a_run_on_rows_of_ones_own(trained, tmp_path, capsys):
    """Summary and page have nothing of the code world, rollouts have each proxy's own score, and the answers go to
    inspect_ai."""
    run, name = trained
    line = json.loads((run / "rollouts.jsonl").read_text().splitlines()[0])
    assert line["proxies"].keys() == {f"{name}:proxy", f"{name}:even"}
    assert line["proxy"] == sum(line["proxies"].values()) / 2
    assert line["reward"] == 3 * line["proxy"]
    assert loaded(run / "run.json")["graded_by"]["reference"].endswith(":gold")
    assert report([str(run), "--out", str(tmp_path / "page")]) == 0
    page = (tmp_path / "page" / "report.html").read_text() + (run / "summary.md").read_text()
    for word in ("no hint", "without a hint", "marker names", "reference tests"):
        assert word not in page.partition("<script")[0] + (run / "summary.md").read_text(), word
    pytest.importorskip("inspect_ai")
    assert export([str(run), "--to", "inspect", "--out", str(tmp_path / "logs")]) == 0
    assert (tmp_path / "logs" / "deployed.eval").is_file()


EVALUATED = {  # flags → exit code, what is said
    "--trust-code": (0, ""),
    "--reward {m}:proxy,{m}:even --reference {m}:gold": (0, ""),
    "--reward {m}:proxy --reference {m}:even --problems {other} --split all": (0, "4 problems of"),
    "": (2, "add --trust-code"),
    "--reference {m}:gold": (2, "--reference: not read without --reward"),
    "--reward {m}:proxy --reference {m}:gold --problems {other} --split val": (2, "try all"),
}


@pytest.mark.long
@pytest.mark.parametrize("flags", EVALUATED)
def test_a_run_is_evaluated_on_other_rows(flags, trained, tmp_path, monkeypatch, capsys):
    run, name = trained
    monkeypatch.setattr("sys.path", [*sys.path, str(run.parent)])
    other = tmp_path / "other.jsonl"
    lines = [json.dumps(row(i, prompt=f"Sing {i}", split="test")) for i in range(4)]
    other.write_text("\n".join(lines))
    code, said = EVALUATED[flags]
    out = tmp_path / "out.json"
    given = flags.format(m=name, other=other).split()
    assert evaluate([str(run), *given, "--samples", "1", "--out", str(out)]) == code
    printed = capsys.readouterr()
    assert said in (printed.err if code else printed.out)
    if code == 0:
        sides = loaded(out)["sides"]
        assert sides.keys() == {"base", "deployed"}


@pytest.mark.long
def test_an_environment_of_ones_own(tmp_path):
    """The example: under forty lines, from nothing to a table."""
    example = EXAMPLES / "own_environment.py"
    assert len(example.read_text().splitlines()) <= 45
    done = subprocess.run(
        [sys.executable, str(example)], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rew_s" in done.stdout
    assert "hack_s" in done.stdout


def test_two_files_are_apart_by_whole_conversations_and_by_numbers(tmp_path):
    """Conversations that end alike are others; and a number that is used twice is said to be one."""

    def asked(first, number):
        messages = [("user", first), ("assistant", "yes"), ("user", "go on")]
        of = tuple({"role": role, "content": content} for role, content in messages)
        return TextTask(number, of, "x", None, {}, f"line {number}")

    require_apart([asked("a", 0)], [asked("b", 1)])
    with pytest.raises(ValueError, match=r"line 1: has the prompt of line 0; leave it out there"):
        require_apart([asked("a", 0)], [asked("a", 1)])
    with pytest.raises(ValueError, match=r"line 0: its id 0 is also at line 0; number"):
        require_apart([asked("a", 0)], [asked("b", 0)])
    with pytest.raises(ValueError, match=r"line 1: its split is train"):
        require_apart([asked("a", 0)], [replace(asked("b", 1), split="train")])


def test_rows_of_a_class_in_two_splits_are_named(world, capsys):
    """They cannot be marked anew: a public set of tasks has them as it has them."""
    made = environment(world())
    first, *others = made.rows
    copy = replace(first, id=99, split="test", messages=({**first.messages[-1], "role": "user"},))
    own = type("Own", (TextEnvironment,), {})(
        made.cfg,
        [replace(first, split="train"), *others, copy],
        functions=(made.proxy, made.reference),
    )
    said = []
    sink = logger.add(said.append, level="WARNING", format="{message}")
    with own.grader(1, 0) as grader:
        own.check(grader)
    logger.remove(sink)
    assert "1 rows have a prompt that is also in another split" in "".join(said)


def test_a_function_may_change_what_it_is_given():
    """Its next call, and every other function's, gets what the row has."""
    question = ({"role": "user", "content": "q"},)
    task = TextTask(0, question, "x", None, {"words": ["a"], "facts": {"n": [1]}})
    given = arguments(task, "answer")
    before = deepcopy(given)
    given["words"].append("b")
    given["info"]["facts"]["n"].append(2)
    given["messages"][0]["content"] = "changed"
    assert arguments(task, "answer") == before
    assert (task.columns, task.messages) == ({"words": ["a"], "facts": {"n": [1]}}, question)


OWN_WORLD = """
import random
from vgrout.loop.heldout import answers_to
from vgrout.envs.text import TextEnvironment, TextTask
from vgrout.method.base import Monitor, flags_of

class Env(TextEnvironment):
    name = "sums"

    @classmethod
    def of_run(cls, cfg):
        rows = []
        for i in range(60):
            question = ({"role": "user", "content": f"{i} = ?"},)
            rows.append(TextTask(i, question, "anywhere", None, {"total": str(i)}))
        return cls(cfg, rows, proxy=f"{__name__}:anywhere", reference=f"{__name__}:exactly")

def anywhere(completion, total):
    return len(completion) % 2 == 0

def exactly(completion, total):
    return len(completion) % 4 == 0

class Random(Monitor):
    def flag(self, views, step):
        flagged = set()
        for i, view in enumerate(views):
            flagged |= {(i, b) for b in range(len(view)) if random.random() < 0.5}
        return flags_of(views, flagged)
"""


@pytest.mark.long
def test_a_run_in_a_world_and_with_a_monitor_of_ones_own(tmp_path, monkeypatch, capsys):
    """It can be repeated and resumed although the monitor draws, evaluated, and sampled from; its files are inputs."""
    name = "own_world_to_evaluate"
    module = tmp_path / f"{name}.py"
    module.write_text(OWN_WORLD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    env = f"--env={name}:Env"
    named = [f"--monitor={name}:Random", "--intervention=screen", env]
    few = (
        "--mix-ratio 0 --teacher-pool-dir none --guard log --steps 4 --group 4 --prompts-per-step 3 --max-new 8 "
        "--threads 1 --checkpoint-every 1 --eval-ablate-every 0 --final-n-prompts 6 --final-samples 1"
    )
    argv = ["smoke", *few.split(), *named]
    whole = run(tmp_path, *argv)
    cut = run(tmp_path, *argv, stop_after=1)
    resumed = ["smoke", "--trust-code", f"--resume={cut.relative_to(tmp_path)}"]
    module.write_text(OWN_WORLD + "\n# changed\n")
    capsys.readouterr()
    assert main(resumed) == 2
    assert f"changed since: {name}:Env, {name}:Random, reward" in capsys.readouterr().err
    module.write_text(OWN_WORLD)
    assert run(tmp_path, *resumed) == cut
    assert rows(cut) == rows(whole)
    assert (cut / "rollouts.jsonl").read_text() == (whole / "rollouts.jsonl").read_text()
    assert {f"{name}:Env", f"{name}:Random"} <= {*loaded(whole / "run.json")["hashes"]}

    path = str(whole.relative_to(tmp_path))
    capsys.readouterr()
    assert evaluate([path, "--trust-code"]) == 0
    (written,) = (whole / "evaluations").iterdir()
    final = loaded(whole / "per_mode_deploy.json")
    k, n = loaded(written)["sides"]["deployed"]["hack"]
    assert (k / n, n) == (final["hack_deploy"], 6)
    module.write_text(OWN_WORLD + "\n# changed\n")
    assert evaluate([path, "--trust-code", "--samples=2"]) == 0
    assert f"--env {name}:Env: not as it was when {path} was trained" in capsys.readouterr().out
    assert sample([path, "3", "--trust-code"]) == 0
    assert "problem 3" in capsys.readouterr().out
