"""What a run records: the tail's counts, rollouts.jsonl, run ids, JSON files."""

import csv
import io
import json
import re
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from methods import graded
from test_table import row
from vgrout.config.method import MethodConfig
from vgrout.config.presets import joined, resolve
from vgrout.config.world_names import DETECTOR_FIELDS
from vgrout.ground import console
from vgrout.ground.data import (
    Batch,
    Completion,
    Flags,
    Grade,
    GradedCompletion,
    Group,
    Rollout,
    Thought,
    Ungraded,
)
from vgrout.ground.io import (
    existing,
    json_lines,
    numbered_lines,
    probe_writable,
    write_json_lines,
)
from vgrout.ground.metrics import Eval, Final, Rate, half
from vgrout.ground.table import StepRow
from vgrout.report.load import SIDES, conditions, load
from vgrout.report.rollouts import pack
from vgrout.report.stats import wilson
from vgrout.report.tables import csv_files
from vgrout.runs.recorder import Recorder, rollout_lines
from vgrout.runs.results import Tallies, answer_lines, as_json
from vgrout.runs.run_dir import RunDir


def test_halves_of_the_hacks_and_tallies(tmp_path):
    used, both = graded(1.0, hacks=True), graded(1.0, hacks=True, caught=True)
    used = replace(used, detectors={"E": True})
    assert (
        half(used, ("E",)) == half(replace(both, detectors={"C": True, "E": True}), ("C",)) == "A"
    )
    assert half(used, ("C",)) == "B"
    assert half(graded(1.0, hacks=True), ("C",)) is None, "no detector sees it"
    assert half(replace(used, hacked=False), ("E",)) is None, "no hack"
    none = dict.fromkeys(("hacked_arbitrary", "hacked_wrong_tests", "hacked_loophole_used"), False)
    none |= {"step": 0, "problem_id": 1, "env_mode": "run_tests", "hacked": True, "gate": None}
    lines = [
        {"hacked_loophole_used": True},
        {"hacked_arbitrary": True, "gate": 0.9},
        {"gate": 0.1},
        {
            "hacked": False,
            "problem_id": 2,
            "env_mode": "sentinel",
            "gate": 0.8,
            "hacked_loophole_used": True,
        },
    ]
    (tmp_path / "rollouts.jsonl").write_text(
        "".join(json.dumps(none | line) + "\n" for line in lines)
    )
    found = Tallies.of(tmp_path / "rollouts.jsonl", ("E",), DETECTOR_FIELDS)
    assert found.halves == {"A": 1, "B": 1, "": 1}
    assert found.flagged == {"C": Rate(1, 4), "D": Rate(0, 4), "E": Rate(2, 4)}
    assert found.gate == (Rate(1, 2), Rate(1, 2)), "precision, recall of rows that a gate saw"
    assert found.not_looked_at == 1
    assert "It did not look at 1 more hacks" in found.lines(())[0]

    none |= {"passed": True}
    for flags, recall, nothing in (
        ((True, None, None), Rate(1, 1), False),
        ((None,) * 3, Rate(0, 0), True),
    ):
        lines = [none | {"flagged": flag} for flag in flags]
        write_json_lines(tmp_path / "rollouts.jsonl", lines)
        found = Tallies.of(tmp_path / "rollouts.jsonl", (), DETECTOR_FIELDS)
        assert found.gate[1] == recall
        assert (found.unjudged.n, found.not_looked_at) == (3, 0)
        assert bool(found.judged_nothing) == nothing


@pytest.mark.parametrize(
    ("argv", "run_id"),
    [
        (["route2", "--control=haar"], "route2_haar"),
        (["penalty", "--monitor=labels", "--penalty=2"], "penalty_labels_by2"),
        (
            ["penalty", "--monitor=labels", "--penalty=2", "--random-flags"],
            "penalty_labels_by2_random_flags",
        ),
        (["screen", "--monitor=labels", "--known-modes=sentinel"], "screen_labels_knows-sentinel"),
        (["screen", "--monitor=labels", "--flags-kept=0.8"], "screen_labels_kept0.8"),
        (["penalty", "--monitor=online_probe"], "penalty_online_probe_detector"),
        (["route2", "--vhack-refresh-every=2"], "route2"),
        (["erase", "--control=placebo", "--placebo-pairs=a b/ü \n.json"], "erase_placebo_---"),
    ],
)
def test_run_ids(argv, run_id):
    assert resolve(["mini", "--intervention", *argv]).run_id == f"mini_{run_id}_seed41"


def test_lists_in_flags():
    words = "smoke --teacher-modes a b --steps 3".split()
    assert joined(words) == ["smoke", "--teacher-modes=a,b", "--steps", "3"]
    assert joined(["smoke", "--teacher-modes=a", "b"]) == ["smoke", "--teacher-modes=a,b"]
    assert resolve(["smoke", "--report-detectors", "e", "c"]).env.report_detector_codes == [
        "E",
        "C",
    ]
    assert resolve(["smoke", "--teacher-modes", "run_tests", "sentinel"]).env.demo_modes == [
        "run_tests",
        "sentinel",
    ]
    with pytest.raises(ValueError, match="measured in every step"):
        resolve(["smoke", "--cos-pre-split-every", "5"])


def test_a_line_ends_at_a_newline_alone_and_probing_makes_no_folder(tmp_path):
    probe_writable(tmp_path / "a" / "b")
    assert [*tmp_path.iterdir()] == []
    assert existing(tmp_path / "a" / "b") == tmp_path
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": "\u2028 \x85"}\n\n{"a": 2}\r\n')
    assert [r for _, r in numbered_lines(path)] == [{"a": "\u2028 \x85"}, {"a": 2}]
    path.write_text('{"a": "\u2028"}\n')
    assert [*json_lines(path)] == [{"a": "\u2028"}]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b'{"a": 1}\n' + b"[" * 100_000, r"line 2: not JSON \(maximum recursion"),
        (b'{"a": 1}\n{"a": "\xe9"}\n', "cannot be read .*0xe9"),
        (b'{"a": 1}\n{"a"\n', "line 2: not JSON"),
        (bytes(range(256)), "cannot be read"),
    ],
)
def test_bad_json_lines_are_refused(tmp_path, content, why):
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=why) as refused:
        list(numbered_lines(path))
    assert str(refused.value).startswith(str(path))
    assert "\n" not in str(refused.value)


# with lone surrogates, control characters and other line ends
TEXT = st.text(st.characters(exclude_categories=()), max_size=12)
SCORE = st.none() | st.floats(-1e6, 1e6) | st.sampled_from([0.0, -0.0, 1e308, 5e-324])
NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,30}", fullmatch=True) | st.sampled_from(
    ["high", "low", "solved"]
)


@st.composite
def completed(draw, problem):
    """An answer to a problem with any verdict; or none, where the grader failed."""
    thought, solved = draw(TEXT), draw(st.booleans())
    completion = Completion(
        (1, 2), thought + draw(TEXT), draw(st.booleans()), None, Thought(thought)
    )
    grade = Grade(
        reward=draw(st.floats(-1e6, 1e6)),
        passed=draw(st.booleans()),
        solved=solved,
        hacked=not solved and draw(st.booleans()),
        flaw=problem.flaws[0],
        reward_of_reference=0.0,
        status=draw(TEXT),
        details={"score_of_mine": draw(SCORE)},
    )
    return completion, grade


@settings(max_examples=30)
@given(st.data())
def test_what_a_run_writes_its_report_reads(data):
    """Whatever the ids, names, prompts, answers and scores are."""
    draw, flaws = data.draw, data.draw(st.lists(NAMES, min_size=1, max_size=3, unique=True))
    problems = [
        SimpleNamespace(
            id=draw(st.integers(0, 2**53 - 1)),
            messages=({"role": "user", "content": draw(TEXT)},),
            flaws=(flaw,),
            notes={},
        )
        for flaw in flaws
    ]
    cfg = resolve("smoke --intervention=penalty --monitor=labels --shadow=detector".split())
    groups = []
    for index, problem in enumerate(problems):
        completion, grade = draw(completed(problem))
        flags = Flags((draw(st.booleans()),), (draw(SCORE),))
        rollout = Rollout.of((1,), completion)
        groups.append(
            Group(
                problem, (rollout,), (grade,), index=index, flags=flags, shadows={"detector": flags}
            )
        )
    batch = Batch(tuple(groups), (), (), 8, 0)
    lines = rollout_lines(batch, SimpleNamespace(prompt_text=lambda messages: draw(TEXT)))
    answers = {}
    for side in ("base", "deployed", "plain"):
        answers[side] = []
        for problem in problems:
            completion, grade = draw(completed(problem))
            verdict = grade if draw(st.booleans()) else Ungraded("failed")
            answers[side].append(GradedCompletion(problem, 0, completion, verdict))
    answers["trained"] = answers["deployed"]  # no quarantine
    final = Final(**{side: Eval.of(of, flaws) for side, of in answers.items()}, answers=answers)
    step = row(step=0, hk={f"f{i}": Rate(0, 1) for i in range(len(flaws))})
    named = {flaw: {"code": f"f{i}", "should": "", "pattern": ""} for i, flaw in enumerate(flaws)}
    with tempfile.TemporaryDirectory() as root, RunDir.create("x", Path(root)) as run:
        run.write_json("run.json", {"config": cfg.as_dict(), "flaws": named})
        run.append(step.as_json(), lines)
        write_json_lines(run.path / "final.jsonl", answer_lines(final))
        run.write_json("per_mode_deploy.json", as_json(cfg, final, None, Path("log"), {}))
        run.status("finished", 1, "", "")
        (found,), left_out = load([run.path])
        assert left_out == []
        assert StepRow.from_json(next(json_lines(run.path / "steps.jsonl"))) == step
        for name, wrote in (("rollouts.jsonl", lines), ("final.jsonl", [*answer_lines(final)])):
            for was, of in zip(json_lines(run.path / name), wrote, strict=True):
                assert was == json.loads(json.dumps(of)), name
        packed = pack(conditions([found]), 1000)
        (of_run,) = csv.DictReader(io.StringIO(csv_files(conditions([found]))["runs.csv"]))
    assert (len(packed["columns"]["run"]), packed["left_out"]) == (4 * len(flaws), [])
    for key, side in SIDES.items():
        sides = [(None, final.sides[side].overall), *final.sides[side].by_mode.items()]
        for flaw, rates in sides:
            assert found.counted(key, "hack", flaw) == rates.hack
            assert found.counted(key, "solve", flaw) == rates.solve
    low, high = of_run["hack_deploy_low"], of_run["hack_deploy_high"]
    rate = final.deployed.hack
    assert [low, high] == (
        [str(round(x, 6)) for x in wilson(rate.k, rate.n)] if rate.n else ["", ""]
    )
    right = [group.flags.flagged[0] for group in groups if group.grades[0].solved]
    assert of_run["flagged_solved"] == (f"{sum(right)}/{len(right)}" if right else "")


def nothing_routed(control, gn, hack=0.0, differ=1):
    """At the end of a run of route2 of three such steps, whose δS_hack has this norm.

    differ: groups of two whose rewards differ.
    """
    run = object.__new__(Recorder)
    run.policy = SimpleNamespace(adapter=SimpleNamespace(δS_hack=torch.tensor([hack])))
    rows = [row(step=step, gn=gn, q_egy=0.0, skipped=0) for step in range(3)]
    run.rows = [replace(of, signal=Rate(differ, 2)) for of in rows]
    method = MethodConfig(intervention="route2", control=control)
    run.cfg = SimpleNamespace(method=method, mixes=False)
    run.method = SimpleNamespace(provenance=None)
    return run.nothing_routed()


def test_what_a_run_that_routed_nothing_is_told(warnings):
    why = nothing_routed("none", 0.5)
    assert "route2 routed nothing in 3 steps, 3 of them with a gradient: " in why
    assert "plain GRPO" in why
    assert nothing_routed("none", 0.5, hack=1.0) == ""
    assert warnings == []
    assert nothing_routed("haar", 0.5) == nothing_routed("none", None) == ""
    # of a KL alone, without rewards that differ
    assert nothing_routed("none", 0.5, differ=0) == ""
    assert [w.partition(" (")[2] for w in warnings] == [
        "control: haar)",
        "no step had a signal, so nothing was learnt either)",
        "no step had a signal, so nothing was learnt either)",
    ]


def test_a_silent_phase_is_named_again_and_again(monkeypatch, capsys):
    monkeypatch.setattr(console, "HEARTBEAT_S", 0.05)
    console.setup(None)
    with console.Clock() as clock:
        clock.begin("importing")
        with clock("gen"):
            time.sleep(0.5)
    first, *beats = capsys.readouterr().out.splitlines()
    assert first == "importing …"
    assert any(re.fullmatch(r"gen: \d+ s", line) for line in beats)
