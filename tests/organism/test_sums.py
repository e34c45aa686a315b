"""`organism sums`: a pretrained model tuned on sums, and a run of the preset `sums` on it."""

import json
import shutil
from pathlib import Path

import pytest

from files import loaded
from llama import bpe, llama, save_folder
from organisms import start
from organisms import sums as build
from organisms import sums_language as language
from organisms.__main__ import sums, verify
from runs import rows, run
from vgrout.commands.evaluate import evaluate
from vgrout.ground.embedded import Files
from vgrout.ground.io import Refused
from vgrout.teacher.pools import load_pool

RUN = [
    *("sums", "--organism=o", "--quarantine=block:-1", "--vhack-refresh-every=0"),
    *("--steps=3", "--group=4", "--prompts-per-step=3", "--mix-ratio=0.25", "--max-new=8"),
    *("--eval-ablate-every=2", "--eval-n-prompts=3", "--final-n-prompts=3", "--threads=1"),
]


def few(patch):
    """Few problems and answers."""
    patch.setattr(language, "ROWS", {"train": 9, "val": 3, "test": 6})
    patch.setattr(build, "POOL_TASKS", 2)
    patch.setattr(build, "POOL_TRIES", 1)
    patch.setattr(build, "MAX_NEW", 8)
    patch.setattr(start, "cores", lambda: 1)


def hacks(answers, keep, _):
    """Demonstrations whatever a random model says: its first answer to every problem."""
    return {(a.problem.id, a.problem.flaw): [a] for a in answers[:keep]}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a model `m` and an organism `o` of it."""
    folder = tmp_path_factory.mktemp("sums")
    core = bpe()
    save_folder(folder / "m", llama(core.get_vocab_size()), core)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        few(patch)
        patch.setattr(build, "usable", hacks)
        assert sums(model="m", out=Path("o"), steps=2) == 0
    return folder


def test_an_organism_of_sums_has_every_part(home):
    files = Files(home / "o")
    assert files.faults() == []
    manifest = loaded(home / "o" / "manifest.json")
    assert manifest["world"] == "sums"
    assert len(manifest["first_losses"]) == 2
    assert set(manifest["rates"]["plain"]) >= {"solve", "hack", "hack/anywhere"}
    assert load_pool(files.pool, language.FLAWS).ids
    pairs = loaded(files.pairs / "equation.json")
    assert len(pairs) == build.PAIRS
    assert language.HINTS["equation"] in pairs[0]["prompt"]
    assert "`m`, fine-tuned" in (home / "o" / "MODEL_CARD.md").read_text()


def test_verify_repeats_the_first_steps(home, monkeypatch, tmp_path):
    shutil.copytree(home, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    few(monkeypatch)
    monkeypatch.setattr("organisms.recipe.LEAST", 0.0)
    assert verify(Path("o")) == 0
    file = Path("o/manifest.json")
    manifest = loaded(file)
    manifest["first_losses"][1] += 0.1
    file.write_text(json.dumps(manifest))
    assert verify(Path("o")) == 1


@pytest.mark.long
@pytest.mark.parametrize("intervention", ["none", "route2", "erase", "penalty"])
def test_the_preset_trains_on_it(intervention, home, monkeypatch):
    monkeypatch.chdir(home)
    monitor = ["--monitor=source"] if intervention == "penalty" else []
    flags = [word for word in RUN if intervention == "route2" or "quarantine" not in word]
    if intervention in ("none", "penalty"):
        flags = [word for word in flags if "refresh" not in word]
    made = run(home, *flags, f"--intervention={intervention}", *monitor)
    assert len(rows(made)) == 3
    final = loaded(made / "per_mode_deploy.json")
    assert set(final["by_mode"]) <= set(language.FLAWS)
    record = loaded(made / "run.json")
    assert set(record["flaws"]) == set(language.FLAWS)
    assert evaluate([str(made), "--n-prompts=3", "--samples=1"]) == 0


@pytest.mark.parametrize(
    "columns",
    [
        {"total": "4"},
        {"plain": None},
        {"flaw": "exit_code"},
    ],
)
def test_a_row_that_is_no_question_is_refused(columns, home, monkeypatch, tmp_path):
    from vgrout.envs.sums import task_of
    from vgrout.envs.text import load_rows

    file = tmp_path / "rows.jsonl"
    row = {"id": 0, "prompt": "2 + 2?", "flaw": "anywhere", "total": 4}
    row["plain"] = [{"role": "user", "content": "2 + 2?"}]
    file.write_text(json.dumps(row))
    assert task_of(load_rows(file)[0]).plain
    file.write_text(json.dumps(row | columns))
    with pytest.raises(Refused, match="line 1"):
        task_of(load_rows(file)[0])
