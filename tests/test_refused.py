"""Names of other programs and versions are refused with the name to use; so are files of another version."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from vgrout.config.checks import NOT_HERE, flag
from vgrout.config.presets import flag_names, parse
from vgrout.config.run import from_dict
from vgrout.sweep.study_file import load_study_file


def line(key: str) -> str:
    name, _, word = key.partition(" ")
    return f"{' '.join(filter(None, (flag(name), word)))}: not here; {NOT_HERE[key]}"


@pytest.mark.parametrize("key", NOT_HERE)
def test_such_a_flag_is_refused(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, _, word = key.partition(" ")
    dashed = flag(name)
    if word:
        spelt = [[dashed, word], [f"{dashed}={word}"], [f"--{name}={word}"], ["--lr", "0.1", f"{dashed}={word}"]]
    else:
        spelt = [[dashed], [dashed, "x"], [f"{dashed}=x"], [f"--{name}"], [f"--no-{dashed[2:]}", "--steps=3"]]
    for argv in spelt:
        with pytest.raises(SystemExit) as stop:
            parse(["mini", *argv])
        assert stop.value.code == 2
        assert capsys.readouterr().err == f"E {line(key)}\n"


@pytest.mark.parametrize("key", NOT_HERE)
@pytest.mark.parametrize("listed", [False, True])
def test_such_a_flag_in_a_study_file_is_refused(key: str, listed: bool, tmp_path: Path) -> None:
    path = tmp_path / "study.toml"
    name, _, word = key.partition(" ")
    value = f'["both", "{word}"]' if listed else f'"{word}"'
    path.write_text(f'preset = "mini"\nseeds = [1]\n[[arms]]\nname = "one"\n{name.replace("_", "-")} = {value}\n')
    with pytest.raises(ValueError, match="not here") as refused:
        load_study_file(path)
    assert str(refused.value) == f"{path}: [[arms]] 1 (one): {line(key)}"


@pytest.mark.parametrize("key", NOT_HERE)
def test_the_suggested_flag_exists(key: str) -> None:
    name, _, word = key.partition(" ")
    assert bool(word) == (flag(name) in flag_names())
    if "; leave it out" in NOT_HERE[key]:
        return
    for message in NOT_HERE[key].removeprefix("say ").split(" or "):
        values = {"--max-error-retries": ["3"], "--report-detectors": ["E"], "--monitor": []}
        words = shlex.split(message)
        usual = [] if "--intervention" in words else ["--intervention", "route2"]
        parse(["mini", *usual, *words, *(values.get(words[0], []) if len(words) == 1 else [])])


def test_other_flags_may_have_such_a_value() -> None:
    assert parse(["mini", "--intervention", "none", "--out-tag", "oracle"]).run.out_tag == "oracle"


def test_the_program_refuses_before_it_loads_torch() -> None:
    code = (
        "import sys, vgrout.train\n"
        "try: sys.exit(vgrout.train.main(sys.argv[1:]))\n"
        "finally: assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "mini", "--half-a", "E"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"E {line('half_a')}\n")


def test_settings_of_another_version_are_refused_in_one_line() -> None:
    cfg = parse(["mini", "--intervention=route2"])
    stored = cfg.as_dict()
    assert from_dict(stored) == cfg
    stored["method"] |= {"own_streams": "usual", "route2_gate": "tau"}
    message = "run.json: unknown settings arm, own_streams, route2_gate; the run was made by another version"
    with pytest.raises(ValueError, match=re.escape(message)):
        from_dict(stored | {"arm": {}})
