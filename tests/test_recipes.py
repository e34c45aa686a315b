"""The recipes "An intervention", "A monitor", "A column", followed word for word in a copy."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from recipes import ROOT, Step, section, steps
from runs import SMALL

TITLES = ("An intervention", "A monitor", "A column")
RUN = ["smoke", "--intervention", "cap", "--threads", "1", *SMALL[2:]]
RUN += ["--steps", "2", "--eval-ablate-every", "0", "--columns", "all"]
# the run, then the new intervention on three gradients of lengths 5, 1 and 2, the last one in two
# modules
SCRIPT = f"""
import torch, vgrout
from dataclasses import replace
from pathlib import Path
from vgrout.config.specs import intervention_class, monitor_class
from vgrout.config.presets import resolve
from vgrout.method.base import StepGradient
from vgrout.train import main
from vgrout.data import GroupView

assert Path(vgrout.__file__).is_relative_to(Path.cwd()), vgrout.__file__
assert main({RUN!r}) == 0
g = torch.tensor([[3.0, 4.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 2.0]])
spans = {{"a": slice(0, 2), "b": slice(2, 3)}}
Cap = intervention_class("cap")
keep = Cap(spans, resolve(["smoke", "--intervention", "cap"])).route(StepGradient(g, (), spans)).keep
assert torch.allclose(keep, torch.tensor([1.2 + 1, 1.6, 2.0])), keep

for name in ("screen", "penalty", "route2"):
    assert resolve(["smoke", "--intervention", name, "--monitor", "short"]).method.monitor_name == "short"
view = GroupView(("student",) * 3, (False,) * 3, (1.0,) * 3, (True,) * 3, (1.0,) * 3, (False,) * 3, ("",) * 3)
answers = replace(view, completion_ids=((1,) * 9, (1,) * 8, (1,)))
assert [f.flagged for f in monitor_class("short")().flag([answers], 0)] == [(False, False, True)]
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with sources, tests and documents as the recipes leave them."""
    folder = tmp_path_factory.mktemp("recipes")
    for name in ("src", "tests", "docs"):
        shutil.copytree(
            ROOT / name,
            folder / name,
            ignore=shutil.ignore_patterns("__pycache__", "figures", "golden"),
        )
    for title in TITLES:
        for step in steps(title):
            step.apply(folder)
    return folder


def python(folder: Path, *arguments: str) -> str:
    env = os.environ | {"PYTHONPATH": str(folder / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_the_recipes_intervention_and_column_train(copy: Path) -> None:
    printed = python(copy, "-c", SCRIPT)
    (path,) = (copy / "out" / "runs").iterdir()
    config = json.loads((path / "run.json").read_text(encoding="utf-8"))["config"]
    assert config["method"]["intervention"] == "cap"
    rows = [
        json.loads(line) for line in (path / "steps.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    rollouts = [
        json.loads(line)
        for line in (path / "rollouts.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [row["step"] for row in rows] == [0, 1]
    for row in rows:
        ended = [r["finished"] for r in rollouts if r["step"] == row["step"]]
        assert (row["ended_k"], row["ended_n"]) == (sum(ended), len(ended))
        assert row["gn"] > 0
        assert row["skipped"] == 0
    heads = next(line.split() for line in printed.splitlines() if line.startswith("step "))
    assert heads[heads.index("n") + 1] == "ended"
    (log,) = (copy / "logs").iterdir()
    assert (
        "student answers that ended. SHOULD: near all; ELSE --max-new cuts them off"
        in log.read_text(encoding="utf-8")
    )


@pytest.mark.slow
def test_tests_and_documents_pass_after_the_recipes(copy: Path) -> None:
    python(copy, "docs/reference.py")
    files = [f"tests/test_{name}.py" for name in ("method", "config", "docs", "flags", "table")]
    chosen = (
        "every_row_has_its_class or flag_list or bounds_or_a_reason or registries_say or help_has "
        "or generated_pages or measured_once or recorded_order or flag_has_an_entry"
    )
    printed = python(copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "-k", chosen)
    assert " passed" in printed


# ── the format


def test_every_recipe_ends_with_a_check() -> None:
    for title in TITLES:
        assert {step.file.split("/")[0] for step in steps(title)} <= {"src", "tests", "docs"}
        assert "golden" in section(title) or "pytest" in section(title), title


def test_an_anchor_has_to_stand_in_its_file_once(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\nif x:\n    y = 2\n")
    Step("a.py", "below", "y = 2", "    z = 3\n").apply(tmp_path)
    Step("a.py", "in place of", "x = 1", "x = 4\n").apply(tmp_path)
    assert (tmp_path / "a.py").read_text() == "x = 4\nif x:\n    y = 2\n    z = 3\n"
    with pytest.raises(ValueError, match="unpack"):
        Step("a.py", "above", "y = 5", "").apply(tmp_path)
    with pytest.raises(AssertionError, match="is there already"):
        Step("a.py", "", "", "").apply(tmp_path)
