"""The same verdicts at every level at which the strict oracle is trusted."""

import os

import pytest

from vgrout.envs.code.grading.grade import Grader, WeakSandbox

from . import honest
from .attacks import ATTACKS, method
from .conftest import SUM_RIGHT, SUM_WRONG, fenced, graded, sum_problem

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can change its root")
LEVELS = [
    pytest.param(("", 3), id="3"),
    pytest.param(("namespaces", 2), id="2"),
    pytest.param(("landlock", 1), id="1, no landlock"),
    pytest.param(("seccomp", 1), id="1, no seccomp"),
    pytest.param(("namespaces landlock", 1), id="1, chroot", marks=needs_root),
]
# Answers that need a file of the library, of their own, or what an interpreter does at its end: a few of each kind.
FEW = (
    "imports unittest",
    "imports sqlite3",
    "imports: an identifier that is not ASCII",
    "imports: codecs",
    "imports: asyncio with a queue",
    "files: its own file",
    "files: one in the module",
    "files: a temporary file",
    "files: /dev/null",
    "files: beside itself",
    "ends: restores stdout",
    "ends: a finalizer",
    "ends: every hack at once",
    "itself: its class's source",
    "tag: in a docstring",
    "text: a thought with it in code",
)


@pytest.fixture(scope="module", params=LEVELS)
def at_level(request):
    """A grader at each level."""
    without, level = request.param
    with Grader(1, without=tuple(without.split())) as grader:
        assert grader.protections.level == level
        yield grader


def test_right_answers_are_solved_at_every_level(at_level, monkeypatch):
    monkeypatch.setattr(honest, "ANSWERS", {name: honest.ANSWERS[name] for name in FEW})
    assert honest.wrongly_judged(at_level, ("run_tests", "exit_code")) == []
    assert at_level.restarts == 0


@pytest.mark.long
def test_all_right_answers_are_solved_at_every_level(at_level):
    assert honest.wrongly_judged(at_level) == []
    assert at_level.restarts == 0


def test_attacks_on_files_at_every_level(at_level):
    """Where it is chroot that bounds them too."""
    for attack in ATTACKS:
        if attack.name.split()[0] in ("H48", "H49", "H53"):
            assert not graded(at_level, sum_problem("sentinel"), attack.code).solved


def test_no_answer_reads_a_file_of_this_machine(tmp_path, at_level):
    """Neither by its path, nor by a path that leads out of its folder, nor through a link that it made."""
    secret = tmp_path / "secret"
    secret.write_text("6")
    os.chmod(tmp_path, 0o755)
    os.chmod(secret, 0o644)
    ways = [
        f"open({str(secret)!r})",
        f"open('../' * 20 + {str(secret).lstrip('/')!r})",
        f"open(os.open({str(secret)!r}, os.O_RDONLY))",
        f"io.FileIO({str(secret)!r})",
    ]
    for way in ways:
        code = method(f"import io, os\nreturn int({way}.read())")
        grade = graded(at_level, sum_problem("shown_test"), code)
        assert not grade.passed, way
        assert grade.status.startswith("error:")
    linked = method(f"import os\nos.symlink({str(secret)!r}, 'x')\nreturn int(open('x').read())")
    assert not graded(at_level, sum_problem("shown_test"), linked).passed


@needs_root
def test_a_root_made_by_chroot_is_removed_without_a_word(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Grader(1, without=("namespaces", "landlock")) as grader:
        assert "chroot" in grader.protections.active
        assert graded(grader, sum_problem(), SUM_RIGHT).solved
        assert list(tmp_path.glob("*/*/dev/null"))
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


def test_without_a_bound_on_files_it_is_refused_by_name():
    """An answer that opens a file of its own could not be judged: in the strict run it may open none."""
    without = ("namespaces", "landlock", "chroot")
    with pytest.raises(WeakSandbox, match=r"files.*--allow-weak-sandbox") as refused:
        Grader(1, without=without)
    assert "\n" not in str(refused.value)
    with Grader(1, without=without, allow_weak=True) as grader:
        assert grader.protections.level == 0
        assert graded(grader, sum_problem(), f"import csv, unittest\n{SUM_RIGHT}").solved
        assert not graded(grader, sum_problem(), SUM_WRONG).passed


def test_a_test_that_calls_a_builder_which_the_setup_code_lacks_is_refused(grader):
    problem = sum_problem()
    test = "assert Solution().total(nums = {}([1, 2])) == 3"
    for name in ("list_node", "tree_node"):
        object.__setattr__(problem, "tests", (test.format(name),))
        with pytest.raises(ValueError, match=f"problem 7: its tests call {name}"):
            grader.grade(problem, fenced(SUM_RIGHT))
