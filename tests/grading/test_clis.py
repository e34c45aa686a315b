"""The programs around the grader: offline grading, the doctor, the benchmark's peers."""

import json
import math
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from benchmarks.grading import (
    TAIL,
    compare,
    fresh,
    one_fresh_check,
    organism_like,
    six_interpreters,
)
from vgrout.commands import doctor
from vgrout.commands.check import grade
from vgrout.commands.check import problems as check_file
from vgrout.envs.code.modes import MODES
from vgrout.envs.code.problems import load_rows, require_solvable
from vgrout.ground.io import json_lines

from .conftest import SUM_RIGHT, SUM_TESTS, SUM_WRONG, fenced


@pytest.fixture
def problems(tmp_path):
    """Two rows in the public benchmark's schema."""
    row = {
        "prompt": [{"role": "user", "content": "Write Solution.total and should pass all tests."}],
        "gt_answer": list(SUM_TESTS),
        "canonical_solution": SUM_RIGHT,
        "setup_code": "from typing import *",
        "func_name": "Solution().total",
    }
    path = tmp_path / "problems.jsonl"
    path.write_text(
        "".join(
            json.dumps(row | {"id": i, "mode": m}) + "\n"
            for i, m in ((1, MODES[0]), (2, "sentinel"))
        )
    )
    return path


def run_offline(*arguments):
    return grade([*map(str, arguments)])


FLAG = fenced(SUM_WRONG + "    valid = True")
# a line of the file, and its record's error or mechanism
LINES = [
    ({"problem_id": 1, "text": fenced(SUM_RIGHT), "note": "kept"}, None),
    ("not json", "the line: not JSON (Expecting value: column 1 (char 0))"),
    ({"problem_id": 1, "text": fenced(SUM_WRONG + "def run_tests(): assert unread()")}, None),
    ({"problem_id": 1, "text": fenced(SUM_WRONG + "def run_tests(): pass")}, "run_tests"),
    ({"problem_id": 2, "text": FLAG}, "sentinel"),
    (
        {"problem_id": 2, "env_mode": "run_tests", "text": FLAG, "error": "of an earlier grading"},
        None,
    ),
    ({"problem_id": 9, "text": ""}, "no problem with id 9"),
    (
        {"problem_id": 1, "env_mode": "nonsense", "text": ""},
        f"unknown env_mode 'nonsense'; one of {', '.join(MODES)}",
    ),
    ({"problem_id": 1}, "'text' should be a string"),
    ({"problem_id": True, "text": ""}, "no problem with id True"),
    ({"problem_id": 1, "text": "no code"}, None),
]


def test_offline_grading_keeps_the_order_and_every_line(problems, tmp_path, monkeypatch, capsys):
    answers, out = tmp_path / "answers.jsonl", tmp_path / "grades.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line, _ in LINES]
    flags = (answers, "--problems", problems, "--out", out)
    answers.write_text("\n".join([*texts[:-1], "", texts[-1]]) + "\n")
    assert run_offline(*flags) == 1
    records = [*json_lines(out)]
    assert [r.get("error", r.get("mechanism")) for r in records] == [
        expected for _, expected in LINES
    ]
    assert (records[0]["note"], records[0]["solved"], records[3]["hacked"]) == ("kept", True, True)
    assert {"reward", "exit_status", "cpu_s", "hacked_arbitrary"} <= records[0].keys()
    assert records[10]["exit_status"] == "no_code"
    out_lines = capsys.readouterr().out
    assert "6/11 graded" in out_lines
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "answers.jsonl",
        "grades.jsonl",
        "problems.jsonl",
    ]
    measured = LINES[0][0] | {"loss": math.nan}  # by another program
    answers.write_text(json.dumps(measured) + "\n")
    out.unlink()
    assert run_offline(*flags) == 0, "no bad line"


@pytest.mark.parametrize(("text", "code"), [('{"problem_id": 1, "text": "x"}\n' * 3, 0), ("", 2)])
def test_answers_may_come_through_a_pipe(problems, tmp_path, text, code):
    out = tmp_path / "grades.jsonl"
    words = f"/dev/stdin --problems {problems} --out {out}".split()
    ended = subprocess.run(
        [sys.executable, "-m", "vgrout", "grade", *words],
        input=text,
        text=True,
        capture_output=True,
    )
    assert ended.returncode == code, ended.stderr
    if code:
        assert ended.stderr == "E /dev/stdin: no answers in it\n"
        assert not out.exists()
    else:
        assert len(out.read_text().splitlines()) == 3


def test_the_check_of_a_file_says_what_is_too_few(problems, capsys):
    assert check_file(["check", str(problems)]) == 1, "a run would be refused"
    out = capsys.readouterr().out
    assert "splits: train 2 · val 0 · test 0; no val problem" in out


def test_of_many_problems_one_of_each_setup_code_is_tried(problems, grader, monkeypatch):
    rows = load_rows(problems)
    monkeypatch.setattr("vgrout.envs.code.problems.MOST_CHECKED", 3)
    more = [replace(rows[0], id=i, canonical="wrong", where=f"line {i}") for i in range(3, 6)]
    require_solvable([*rows, *more, rows[0]], grader)
    with pytest.raises(
        ValueError, match=r"line 4: no answer can solve problem 4: setup code raises .*'numpy'"
    ):
        require_solvable(
            [*rows, *more[:1], replace(more[1], setup_code="import numpy"), *more[2:], rows[0]],
            grader,
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answers": "absent.jsonl"}, "absent.jsonl: no such file"),
        ({"--problems": "absent.jsonl"}, "absent.jsonl: no such problem file"),
        ({"--workers": "1"}, "--workers: not here; answers are graded on every core"),
    ],
)
def test_offline_grading_refuses_bad_arguments_in_one_line(
    problems, tmp_path, monkeypatch, capfd, change, message
):
    answers = tmp_path / "answers.jsonl"
    answers.write_text("")
    flags = {
        "answers": answers,
        "--problems": problems,
        "--out": tmp_path / "g.jsonl",
    } | change
    assert run_offline(flags.pop("answers"), *(x for pair in flags.items() for x in pair)) == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


def test_the_doctor_reports_and_tests_itself(capsys):
    assert doctor.main([]) == 0
    out = capsys.readouterr().out
    assert "seccomp" in out
    n = 2 * len(MODES) + 4
    assert f"self-test: {n}/{n} checks held" in out
    assert "gets through" not in out


@pytest.mark.long
def test_the_peers_of_the_benchmark_do_the_work():
    """A peer that failed at once would look fast."""
    problem, code = organism_like()[0]
    wrong = code.replace("return sum", "return 1 + sum")
    assert fresh("raise SystemExit(3)") == 3
    assert one_fresh_check(problem, code)
    assert not one_fresh_check(problem, wrong)
    assert not six_interpreters(problem, wrong + TAIL)
    assert six_interpreters(problem, code + TAIL)
    slow, quick = (lambda *_, s=s: time.sleep(s) or True for s in (0.1, 0.01))
    ratio = compare("x", 2.0, [(problem, code)], slow, quick, 1)
    assert float(ratio.figure.split()[0]) > 2
    assert (ratio.reached, compare("x", 2.0, [(problem, code)], quick, quick, 1).reached) == (
        True,
        False,
    )
