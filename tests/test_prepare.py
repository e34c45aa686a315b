"""`just` recipes and what studies start from: the documents name recipes that there are, and prepare.sh makes every
organism that a study names. Nothing is built here: `uv` is a stub that notes its command and makes the folder."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
STUDIES = sorted((ROOT / "studies").glob("*.toml"))
# `python -c` is real
STUB = f"""#!/usr/bin/env bash
[ "$3" = -c ] && shift 2 && exec {sys.executable} "$@"
echo "$*" >> "$CALLS"
while [ $# -gt 0 ]; do
    case "$1" in
    --out) mkdir -p "$2/model" && echo '{{"files": {{}}}}' > "$2/manifest.json" ;;
    smollm2) mkdir -p out/models/smollm2 ;;
    --seed=*) seed=${{1#*=}} ;;
    --out-tag=*) mkdir -p "out/runs/20990101_mini_none_seed$seed${{1#*=}}" ;;
    esac
    shift
done
"""


def prepare(folder, *arguments):
    """prepare.sh in a copy of the checkout that has nothing but the shipped organism's folder."""
    data = folder / "src" / "vgrout" / "organism" / "data"
    (data / "model").mkdir(parents=True, exist_ok=True)
    (data / "manifest.json").write_text('{"files": {}}')
    for name in ("studies", "bin"):
        (folder / name).mkdir(exist_ok=True)
    (folder / "studies" / "prepare.sh").write_text((ROOT / "studies" / "prepare.sh").read_text())
    (folder / "bin" / "uv").write_text(STUB)
    (folder / "bin" / "uv").chmod(0o755)
    env = os.environ | {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "CALLS": str(folder / "calls"),
        "PYTHONPATH": str(ROOT / "src"),
    }
    return subprocess.run(
        ["bash", str(folder / "studies" / "prepare.sh"), *arguments],
        env=env,
        capture_output=True,
        text=True,
    )


def organisms(message):
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


def _list(value):
    return [value] if isinstance(value, str) else value


@pytest.mark.parametrize("study", STUDIES, ids=lambda p: p.stem)
def test_prepare_builds_what_a_study_starts_from_once(study, tmp_path):
    wanted = organisms(tomllib.loads(study.read_text()))
    assert prepare(tmp_path, study.stem).returncode == 0
    calls = (tmp_path / "calls").read_text() if (tmp_path / "calls").is_file() else ""
    assert {o for o in wanted if not (tmp_path / o / "model").is_dir()} == set()
    assert bool(calls) == bool(wanted), "what starts from the shipped organism needs nothing"
    assert prepare(tmp_path, study.stem).returncode == 0
    assert not calls or (tmp_path / "calls").read_text() == calls


def test_every_recipe_in_the_documents_exists():
    lines = (ROOT / "justfile").read_text().splitlines()
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
            r"^ *(?:uv run )?just .*$|`just [^`]+`", page.read_text(), re.MULTILINE
        ):
            for name, argument in re.findall(r"just ([a-z][\w-]*)(?: ([\w-]+))?", line):
                assert name in recipes, f"{page.name}: just {name}"
                named = argument if name == "study" else ""
                assert (
                    not named or named == "NAME" or (ROOT / "studies" / f"{named}.toml").is_file()
                ), f"{page.name}: {named}"


# ── what a user has made stays


SCRIPTS = [ROOT / "justfile", *(ROOT / "studies").glob("*.sh")]
SCRIPTS += [*(ROOT / "docs" / "schedulers").iterdir()]
JUST = Path(sys.executable).with_name("just")


@pytest.fixture
def checkout(tmp_path):
    """The recipes with a user's file at every place below out/ or docs/ that one of them names, and at that place's
    temporary names; `uv run python -c` is real, any other program only notes where it was started."""
    for name in ("justfile", "studies", "docs/schedulers"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    text = "".join(script.read_text() for script in SCRIPTS)
    places = {*re.findall(r"\b(?:out|docs)/[\w./-]*\w", text)}
    places |= {"out/svd_cache", "out/vhack", "out/warm.part", "docs/figures/two-methods.png"}
    for place in sorted(places, key=len, reverse=True):  # folders after what is in them
        path = tmp_path / place
        if path.is_dir() or "." not in path.name:
            path.mkdir(parents=True, exist_ok=True)
            path /= "mine.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"mine: {place}")
    (tmp_path / "bin").mkdir()
    stub = (
        f'#!/bin/sh\n[ "$3" = -c ] && shift 2 && exec {sys.executable} "$@"\n'
        'echo "$PWD: $*" >> "$CALLS"\n'
    )
    (tmp_path / "bin" / "uv").write_text(stub)
    (tmp_path / "bin" / "uv").chmod(0o755)
    return tmp_path


def just(checkout, *words):
    env = os.environ | {
        "PATH": f"{checkout / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "CALLS": str(checkout / "calls"),
    }
    argv = [str(JUST), "--justfile", str(checkout / "justfile"), *words]
    return subprocess.run(argv, cwd=checkout, env=env, capture_output=True, text=True)


def contents(checkout):
    return {p: p.read_bytes() for p in checkout.rglob("*") if p.is_file() and p.name != "calls"}


def recipes():
    """Every recipe with a word for each argument that it must have."""
    dumped = subprocess.run(
        [str(JUST), "--justfile", str(ROOT / "justfile"), "--dump", "--dump-format", "json"],
        capture_output=True,
        text=True,
        check=True,
    )
    needed = {"name": "tutorial", "n": "5"}
    found = {}
    for name, recipe in json.loads(dumped.stdout)["recipes"].items():
        parameters = recipe["parameters"]
        required = [p for p in parameters if p["kind"] == "singular" and p["default"] is None]
        found[name] = [needed[p["name"]] for p in required]
    return found


@pytest.mark.skipif(not JUST.exists(), reason="just is not installed")
def test_no_recipe_touches_a_users_files(checkout):
    before = contents(checkout)
    assert len(before) > 20
    for name, arguments in recipes().items():
        just(checkout, name, *arguments)
        after = contents(checkout)
        changed = [
            str(path.relative_to(checkout)) for path in before if after.get(path) != before[path]
        ]
        assert changed == [], f"just {name}"


@pytest.mark.skipif(not JUST.exists(), reason="just is not installed")
@pytest.mark.parametrize(
    ("preset", "made", "after"),
    [
        ("small", "organism tune", ["report", "export"]),
        ("sums", "organism sums", ["report"]),
    ],
)
def test_a_pretrained_model_goes_from_download_to_report(preset, made, after, checkout):
    """What is there is not made again; both methods are trained, and then reported."""
    trained = [
        f"train {preset} --intervention={name} --out-tag=_path" for name in ("none", "route2")
    ]

    def calls():
        noted = checkout / "calls"
        noted.unlink(missing_ok=True)
        assert just(checkout, preset).returncode == 0
        lines = noted.read_text().splitlines()
        return [re.sub(r".*?(-m vgrout\.|vgrout )", "", line, count=1) for line in lines]

    assert calls()[:2] == trained
    shutil.rmtree(checkout / "out")
    (checkout / "out").mkdir()
    from_nothing = calls()
    assert from_nothing[:4] == ["download smollm2", made, *trained]
    assert [line.split()[0] for line in from_nothing[4:]] == after
