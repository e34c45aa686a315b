"""Work that must not grow: with the runs of a study, the rows of a problem file, or the steps of a log. What is counted
is work: calls, lines, bytes. Nothing here measures time."""

import json
from collections import Counter
from pathlib import Path

import pytest

from files import loaded
from vgrout.envs.code import problems
from vgrout.envs.code.grading import check
from vgrout.envs.code.problems import load_problems
from vgrout.ground import embedded, io
from vgrout.ground.data import Ungraded
from vgrout.ground.io import Refused, numbered_lines, once, reading_once
from vgrout.ground.table import SECONDS, StepRow
from vgrout.model.load import source
from vgrout.runs import checkpoint
from vgrout.runs.checkpoint import Checkpoint
from vgrout.runs.plan import require_disk
from vgrout.runs.recorder import ROWS, rows_as_json
from vgrout.runs.run_dir import RunDir, steps_on_disk
from vgrout.sweep.runner import Sweep
from vgrout.sweep.study_file import load_study_file


@pytest.fixture
def counted(monkeypatch):
    """Counts the calls of functions, given as (module, name)."""

    def begin(*named):
        calls = Counter()
        for module, name in named:
            real = getattr(module, name)

            def calling(*args, real=real, name=name, **kwargs):
                calls[name] += 1
                return real(*args, **kwargs)

            monkeypatch.setattr(module, name, calling)
        return calls

    return begin


# ── the runs of a study

STUDY = """preset = "mini"
seeds = [1]
arms = [
    { intervention = "none" },
    { intervention = "route2" },
    { intervention = "penalty", monitor = "labels" },
]
[[overrides]]
steps = [60, 61]
"""


def test_different_jobs_read_and_check_a_file_once(here, counted):
    study = Path("study.toml")
    study.write_text(STUDY)
    of_files = counted(
        (problems, "numbered_lines"), (embedded, "file_sha256"), (source, "safetensors_head")
    )
    planned = load_study_file(study)
    assert len(planned.runs) == 6
    Sweep.of(planned, dry_run=True)
    organism = len(embedded.shipped(embedded.DATA_DIR))
    assert of_files == {"numbered_lines": 1, "file_sha256": organism, "safetensors_head": 1}


def test_outside_a_study_every_read_is_a_new_one(tmp_path):
    """A file may have changed meanwhile; and a refusal is never kept."""
    path, calls = tmp_path / "a", list[str]()

    @once
    def read(path, word=""):
        calls.append(word)
        if not path.exists():
            raise Refused(f"{path}: not there")
        return path.read_text()

    for text in ("one", "two"):
        path.write_text(text)
        assert read(path) == text
    with reading_once():
        assert read(path) == "two"
        path.write_text("three")
        assert read(path) == "two"
        assert read(path, "other") == read(path, word="other") == "three"
        for _ in range(2):
            with pytest.raises(Refused):
                read(tmp_path / "b", "absent")
    assert calls == ["", "", "", "other", "other", "absent", "absent"]
    assert read(path) == "three"


# ── the rows of a problem file


def test_a_file_is_read_line_by_line(tmp_path, counted):
    path = tmp_path / "rows.jsonl"
    path.write_text("\ufeff" + "".join(f'{{"id": {i}}}\r\n\n' for i in range(50)))
    calls = counted((io, "from_json"), (io, "read_text"))
    lines = numbered_lines(path)
    assert next(lines) == (f"{path}, line 1", {"id": 0})
    assert calls == {"from_json": 1}
    assert [where.rpartition(" ")[2] for where, _ in lines] == [str(n) for n in range(3, 100, 2)]


class SlowGrader:
    """Grades nothing until it is asked for a result."""

    workers = 2

    def __init__(self):
        self.waiting = self.most = 0

    def submit_code(self, problem, code):
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        return self

    def result(self):
        self.waiting -= 1
        return Ungraded("none")


@pytest.mark.parametrize("tries", [check.check_problems, check.check_flaws])
def test_a_few_answers_wait_at_a_time(tries):
    problems = load_problems(embedded.PROBLEMS)[:200]
    grader, begun = SlowGrader(), list[int]()

    def track(problems):
        for problem in problems:
            begun.append(problem.id)
            yield problem

    tries(problems, grader, track=track)
    assert begun == [problem.id for problem in problems]
    assert grader.waiting == 0
    programs = 1 if tries is check.check_problems else 2
    assert grader.most <= programs * (check.AHEAD * grader.workers + 1)


# ── the steps of a log

GOLDEN = loaded(Path(__file__).parent / "golden/none.json")
ROW = GOLDEN["rows"][0] | dict.fromkeys(SECONDS, 0.5)


def test_a_save_has_the_last_rows_alone(counted):
    """However many there are."""
    rows = [StepRow.from_json(ROW | {"step": step}) for step in range(1500)]
    calls = counted((StepRow, "as_json"))
    text = rows_as_json(rows)
    assert len(text) <= ROWS + 4000
    kept = json.loads(text)
    assert calls["as_json"] == len(kept) < 1000
    assert [row["step"] for row in kept] == [*range(1500 - len(kept), 1500)]


def _bytes_read():
    """What this process has read so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts reads as Linux does")
def test_a_resume_does_not_read_a_long_log_of_answers(tmp_path):
    size, steps = 5 * 10**9, 30
    lines = "".join(json.dumps(ROW | {"step": step}) + "\n" for step in range(steps))
    (tmp_path / "steps.jsonl").write_text(lines)
    with open(tmp_path / "rollouts.jsonl", "wb") as log:
        log.truncate(size + 100)  # without content, so it takes no room
    sizes = {"steps.jsonl": len(lines), "rollouts.jsonl": size}
    point = Checkpoint(tmp_path, steps, {}, sizes)
    before = _bytes_read()
    with RunDir.reopen(tmp_path) as run:
        require_disk(10**6, tmp_path, tmp_path)
        rows = checkpoint.rows_before(tmp_path, steps, sizes, dict)
        assert len(rows) == steps_on_disk(run.path) == steps
        checkpoint.rewind(tmp_path, point)
        assert (tmp_path / "rollouts.jsonl").stat().st_size == size
        assert _bytes_read() - before < 3 * len(lines)
