"""`just` recipes and what studies start from: the documents name recipes that there are, and prepare.sh makes every
organism that a study names. Nothing is built here: `uv` is a stub that notes its command and makes the folder."""

import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
STUDIES = sorted((ROOT / "studies").glob("*.toml"))
STUB = """#!/usr/bin/env bash
echo "$*" >> "$CALLS"
while [ $# -gt 0 ]; do
    case "$1" in
    --out) mkdir -p "$2/model" ;;
    smollm2) mkdir -p out/models/smollm2 ;;
    --seed=*) seed=${1#*=} ;;
    --out-tag=*) mkdir -p "out/runs/20990101_mini_none_seed$seed${1#*=}" ;;
    esac
    shift
done
"""


def prepare(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """prepare.sh in a copy of the checkout that has nothing but the shipped organism's folder."""
    (folder / "src" / "vgrout" / "organism" / "data" / "model").mkdir(parents=True, exist_ok=True)
    for name in ("studies", "bin"):
        (folder / name).mkdir(exist_ok=True)
    (folder / "studies" / "prepare.sh").write_text(
        (ROOT / "studies" / "prepare.sh").read_text(encoding="utf-8")
    )
    (folder / "bin" / "uv").write_text(STUB)
    (folder / "bin" / "uv").chmod(0o755)
    env = os.environ | {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "CALLS": str(folder / "calls"),
    }
    return subprocess.run(
        ["bash", str(folder / "studies" / "prepare.sh"), *arguments],
        env=env,
        capture_output=True,
        text=True,
    )


def organisms(message: Any) -> set[str]:
    """Every organism below out/ that a study names, wherever in its file."""
    if isinstance(message, dict):
        return {
            o
            for name, value in message.items()
            for o in (organisms(value) if name != "organism" else {*_list(value)})
        }
    return (
        {o for value in message for o in organisms(value)} if isinstance(message, list) else set()
    )


def _list(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


@pytest.mark.parametrize("study", STUDIES, ids=lambda p: p.stem)
def test_prepare_builds_what_a_study_starts_from_once(study: Path, tmp_path: Path) -> None:
    wanted = organisms(tomllib.loads(study.read_text(encoding="utf-8")))
    assert prepare(tmp_path, study.stem).returncode == 0
    calls = (tmp_path / "calls").read_text() if (tmp_path / "calls").is_file() else ""
    assert {o for o in wanted if not (tmp_path / o / "model").is_dir()} == set()
    assert bool(calls) == bool(wanted), "what starts from the shipped organism needs nothing"
    assert prepare(tmp_path, study.stem).returncode == 0
    assert not calls or (tmp_path / "calls").read_text() == calls


def test_warm_refuses_a_folder_that_exists(tmp_path: Path) -> None:
    assert prepare(tmp_path, "warm", "50", "out/warm", "src/vgrout/organism/data").returncode == 0
    again = prepare(tmp_path, "warm", "40", "out/warm", "src/vgrout/organism/data")
    assert (again.returncode, again.stderr) == (
        1,
        "warm: out/warm is there already; move it away to make it again\n",
    )


def test_every_recipe_in_the_documents_exists() -> None:
    lines = (ROOT / "justfile").read_text(encoding="utf-8").splitlines()
    recipes = {
        line.split()[0].rstrip(":") for line in lines if line[:1].islower() and ":=" not in line
    }
    for page in [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").glob("*.md"),
        *STUDIES,
    ]:
        for line in re.findall(
            r"^ *(?:uv run )?just .*$|`just [^`]+`", page.read_text(encoding="utf-8"), re.MULTILINE
        ):
            for name, argument in re.findall(r"just ([a-z][\w-]*)(?: ([\w-]+))?", line):
                assert name in recipes, f"{page.name}: just {name}"
                named = argument if name == "study" else ""
                assert (
                    not named or named == "NAME" or (ROOT / "studies" / f"{named}.toml").is_file()
                ), f"{page.name}: {named}"
