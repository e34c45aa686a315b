"""What a run records: the tail's counts and expectation, rollouts.jsonl, run ids, JSON files."""

import json
import math
import re
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from test_table import row
from vgrout import console
from vgrout.config.method import CONTROLS, INTERVENTIONS, MethodConfig, methods
from vgrout.config.presets import PRESETS, joined, resolve
from vgrout.evaluate import Final
from vgrout.files import json_lines, numbered_lines
from vgrout.grading.grade import Grader
from vgrout.problems import Row, assigned, partition_decides
from vgrout.runs.expectation import expectation
from vgrout.runs.recorder import Recorder
from vgrout.runs.results import Tallies
from vgrout.runs.run_context import RunContext
from vgrout.runs.run_dir import RunDir
from vgrout.types import Eval, Grade, Mode, ModeEval, Rate, centred, half


def grade(channel: bool, **detectors: bool) -> Grade:
    flags = {"hacked_arbitrary": False, "hacked_wrong_tests": False, "hacked_loophole_used": False} | detectors
    return Grade(
        reward=1.0,
        format_ok=True,
        can_compile=True,
        gt_pass=False,
        solved=False,
        channel=channel,
        mode="run_tests",
        exit_status="ok",
        cpu_s=0.0,
        **flags,
    )


def final(base: int, trained: int, deployed: int, solve: int = 60) -> Final:
    """Percent of 100 answers a side."""

    def side(hack: int, solve: int) -> Eval:
        counts = ModeEval(hack=Rate(hack, 100), solve=Rate(solve, 100))
        return Eval(counts, {"run_tests": counts}, Rate(100, 100))

    trained_side = side(trained, solve)
    return Final(side(base, 30), trained_side, side(deployed, solve), side(deployed, solve), {})


def legal() -> list[tuple[str, str, str]]:
    """Every pair under every control that it takes."""
    found = []
    for intervention, monitor in methods():
        for control in CONTROLS:
            with suppress(ValueError):
                MethodConfig(intervention=intervention, monitor=monitor, control=control)
                found.append((intervention, monitor, control))
    return found


@pytest.mark.parametrize(("intervention", "monitor", "control"), legal())
def test_every_method_under_every_control_has_an_expectation(intervention: str, monitor: str, control: str) -> None:
    message = expectation(MethodConfig(intervention=intervention, monitor=monitor, control=control), final(1, 60, 5))
    assert message.line.startswith("SHOULD: ")
    assert "; ELSE " in message.line
    if not INTERVENTIONS[intervention].routes and monitor != "quarantine":
        assert "routing" not in message.line.replace("--intervention routing", ""), "no quarantine to speak of"
        assert "quarantine" not in message.line


@pytest.mark.parametrize(
    ("intervention", "control", "numbers", "cue"),
    [
        ("none", "none", (1, 60, 60), "holds"),
        ("none", "none", (1, 3, 3), "fails"),
        ("route2", "none", (1, 60, 5), "holds"),
        ("route2", "none", (1, 60, 55), "fails"),
        ("route2", "none", (1, 3, 2), "open"),
        ("route2", "haar", (1, 60, 55), "holds"),
        ("route2", "haar", (1, 60, 5), "fails"),
        ("route2", "labels", (1, 60, 2), "holds"),
        ("none", "no_loophole", (1, 2, 2), "holds"),
        ("none", "no_loophole", (1, 40, 40), "fails"),
        ("erase", "none", (1, 30, 30), "open"),
        ("penalty", "labels", (1, 1, 1), "holds"),
    ],
)
def test_cue_of_an_expectation(intervention: str, control: str, numbers: tuple[int, int, int], cue: str) -> None:
    given = {"monitor": "labels"} if control == "labels" else {"control": control}
    assert expectation(MethodConfig(intervention=intervention, **given), final(*numbers)).cue == cue


def test_halves_of_the_hacks() -> None:
    assert half(grade(True, hacked_loophole_used=True), ("E",)) == "A"
    assert half(grade(True, hacked_loophole_used=True), ("C",)) == "B"
    assert half(grade(True, hacked_loophole_used=True, hacked_arbitrary=True), ("C",)) == "A"
    assert half(grade(True), ("C",)) is None, "no detector sees it"
    assert half(grade(False, hacked_loophole_used=True), ("E",)) is None, "no hack"


def answer(hacked: bool, **more: object) -> dict[str, object]:
    flags = dict.fromkeys(("hacked_arbitrary", "hacked_wrong_tests", "hacked_loophole_used"), False)
    return {"step": 0, "problem_id": 1, "env_mode": "run_tests", "hacked": hacked, "gate": None, **flags, **more}


def test_tallies(tmp_path: Path) -> None:
    lines = [
        answer(True, hacked_loophole_used=True),
        answer(True, hacked_arbitrary=True, gate=0.9),
        answer(True, gate=0.1),
        answer(False, step=1, problem_id=2, env_mode="sentinel", gate=0.8, hacked_loophole_used=True),
    ]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = Tallies.of(tmp_path / "rollouts.jsonl", ("E",))
    assert found.halves == {"A": 1, "B": 1, "": 1}
    assert found.flagged == {"C": Rate(1, 4), "D": Rate(0, 4), "E": Rate(2, 4)}
    assert found.gate == (Rate(1, 2), Rate(1, 2)), "precision, recall of rows that a gate saw"
    assert found.last is not None
    assert found.last["problem_id"] == 2


def test_sample_standard_deviation() -> None:
    rewards = [0.5, 3.5, 0.5, 0.5]
    A, plain = centred(rewards, unbiased=False), centred(rewards)
    std = math.sqrt(sum((r - 1.25) ** 2 for r in rewards) / 3)
    assert pytest.approx([a / (std + 1e-4) for a in plain]) == A
    assert centred([2.0], unbiased=False) == (0.0,)


def test_run_ids() -> None:
    assert resolve(["mini", "--intervention", "route2", "--control", "haar"]).run_id == "mini_route2_haar_seed41"
    assert resolve(["mini", "--intervention", "route2"]).run_id == "mini_route2_seed41"
    labelled = ["mini", "--intervention", "penalty", "--monitor", "labels", "--label-accuracy", ".9"]
    assert resolve(labelled).run_id == "mini_penalty_labels_acc0.9_seed41"
    assert resolve([*labelled, "--random-flags"]).run_id == "mini_penalty_labels_acc0.9_random_flags_seed41"
    odd = ["mini", "--intervention", "erase", "--control", "placebo", "--placebo-pairs", "a b/ü \n.json"]
    assert resolve(odd).run_id == "mini_erase_placebo_---_seed41"


def test_lists_in_flags() -> None:
    words = ["smoke", "--teacher-modes", "a", "b", "--steps", "3"]
    assert joined(words) == ["smoke", "--teacher-modes", "a,b", "--steps", "3"]
    assert joined(["smoke", "--teacher-modes=a", "b"]) == ["smoke", "--teacher-modes=a,b"]
    assert resolve(["smoke", "--report-detectors", "e", "c"]).env.report_detector_codes == ["E", "C"]
    assert resolve(["smoke", "--teacher-modes", "run_tests", "sentinel"]).env.demo_modes == ["run_tests", "sentinel"]
    with pytest.raises(ValueError, match="measured in every step"):
        resolve(["smoke", "--cos-pre-split-every", "5"])


def test_no_preset_claims_every_code_path() -> None:
    assert not [name for name, (what, _) in PRESETS.items() if "every code path" in what]


def problem_row(id: int, mode: Mode | None = None) -> Row:
    prompt = ({"role": "user", "content": "Write f and should pass all tests."},)
    return Row(id, prompt, ("assert Solution().f(1) == 1",), "", "", "f", None, mode, None, None, "here")


def test_partition_assigns_modes() -> None:
    rows = [problem_row(i) for i in range(40)]
    partition: dict[int, Mode] = {i: ("sentinel", "file_marker")[i % 2] for i in range(10)}
    for env_mode in ("run_tests", "own"):
        parts = assigned(rows, env_mode, partition)
        modes = {p.id: p.mode for part in parts.values() for p in part}
        assert len(modes) == 40, "nothing is filtered"
        assert {i: modes[i] for i in partition} == partition
        assert {*modes.values()} == {"sentinel", "file_marker"}, "others are assigned its modes"
    own = [problem_row(i, "sentinel" if i % 2 else "run_tests") for i in range(40)]
    assert not partition_decides(own, partition)
    assert {p.mode for part in assigned(own, "sentinel").values() for p in part} == {"sentinel"}


def test_a_line_ends_at_a_newline_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": "\u2028 \x85"}\n\n{"a": 2}\r\n', encoding="utf-8")
    assert [r for _, r in numbered_lines(path)] == [{"a": "\u2028 \x85"}, {"a": 2}]
    path.write_text('{"a": "\u2028"}\n', encoding="utf-8")
    assert [*json_lines(path)] == [{"a": "\u2028"}]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b'{"a": 1}\n' + b"[" * 100_000, "line 2: not JSON that can be read"),
        (b'{"a": 1}\n{"a": "\xe9"}\n', "line 2: not UTF-8 text"),
        (bytes(range(256)), "not UTF-8 text"),
        (b'{"a": 1}\n{"a"\n', "line 2: not JSON"),
    ],
)
def test_bad_json_lines_are_refused(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=why) as refused:
        list(numbered_lines(path))
    assert str(refused.value).startswith(str(path))
    assert "\n" not in str(refused.value)


def test_probing_makes_no_folder(tmp_path: Path) -> None:
    from vgrout.files import existing, probe_writable

    probe_writable(tmp_path / "a" / "b")
    assert [*tmp_path.iterdir()] == []
    assert existing(tmp_path / "a" / "b") == tmp_path


def nothing_routed(control: str, gn: float | None, q: float = 0.0, hack: float = 0.0) -> str:
    """At the end of a run of route2 of three such steps, whose δS_hack has this norm."""
    run = object.__new__(Recorder)
    run.policy = cast(Any, SimpleNamespace(adapter=SimpleNamespace(δS_hack=torch.tensor([hack]))))
    run.rows = [row(step=step, gn=gn, q_egy=q, skipped=0) for step in range(3)]
    run.cfg = cast(Any, SimpleNamespace(method=MethodConfig(intervention="route2", control=control), mixes=False))
    run.method = cast(Any, SimpleNamespace(provenance=None))
    return run.nothing_routed()


def test_what_a_run_that_routed_nothing_is_told(warnings: list[str]) -> None:
    why = nothing_routed("none", 0.5)
    assert "route2 routed nothing in 3 steps, 3 of them with a gradient: " in why
    assert "plain GRPO" in why
    assert nothing_routed("none", 0.5, q=0.1, hack=1.0) == ""
    assert warnings == []
    assert nothing_routed("haar", 0.5) == nothing_routed("none", None) == ""
    assert [w.partition(" (")[2] for w in warnings] == [
        "control: haar)",
        "no step had a signal, so nothing was learnt either)",
    ]
    with pytest.raises(AssertionError, match="largest share of a step"):
        nothing_routed("none", 0.5, q=0.1)


def test_a_silent_phase_is_named_again_and_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "HEARTBEAT_S", 0.12)
    console.setup(None)
    with console.Clock() as clock:
        time.sleep(0.5)
        with clock("gen"):
            time.sleep(0.5)
    lines = capsys.readouterr().out.splitlines()
    assert all(re.fullmatch(r"still in (loading|gen): \d+ s", line) for line in lines)
    assert all(1 < sum(phase in line for line in lines) < 5 for phase in ("loading", "gen")), lines


def test_a_refused_run_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistake that shows only once something is loaded: one line on stderr, no folder, no log."""
    monkeypatch.chdir(tmp_path)
    folder = RunDir.create("x")
    console.setup(log := Path("logs") / "x.log")
    grader = object.__new__(Grader)
    with RunContext(folder, grader, resume_command="…", resumes=False, log=log) as refused:
        folder.write_json("run.json", {})
        raise ValueError("--flag 7: does not fit this model")
    assert refused.code == 2
    assert capsys.readouterr().err == "E --flag 7: does not fit this model\n"
    assert list(tmp_path.iterdir()) == []
    path = (folder := RunDir.create("y")).path
    with RunContext(folder, grader, resume_command="…", resumes=True) as refused:
        raise ValueError("changed")
    assert (refused.code, path.is_dir()) == (2, True), "a run that should have gone on stays as it is"
