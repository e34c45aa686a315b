"""Code of a user's own: edited while the process lives, as in a notebook, a run has what its hash is of; interrupted,
it has not failed."""

import importlib
import signal
import sys
from pathlib import Path

import pytest

from vgrout.config.presets import import_named
from vgrout.config.specs import INTERVENTIONS, MONITORS
from vgrout.envs.text import TextTask, own_function
from vgrout.ground.io import Refused, file_sha256, hash_if_there
from vgrout.ground.scoring import ScoringFunction, import_function
from vgrout.runs.inputs import hash_of_class


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a module of the working directory; it goes from the process afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = {*sys.modules}

    def write(name, text):
        file = tmp_path / f"{name.replace('.', '/')}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        return file

    yield write
    for name in sys.modules.keys() - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "").is_relative_to(tmp_path):
            del sys.modules[name]


def score(name="mine_edited:f"):
    """What a run that names this function gets of it, and the hash that it records."""
    import_named(["--reward", name])
    function = ScoringFunction(name, lambda task, answer: {}, flag="--reward")
    return function.called(None, ["x"])[0], function.sha256


ASKED = TextTask(0, ({"role": "user", "content": "q"},), "reward", None, {}, "row 0")
F = "def f(): return {}\n"
HELPED = {  # how a helper module is imported → the modules, with {} for what is edited
    "from": {"mine_edited": "from its_helper import g\ndef f(): return g()\n", "its_helper": "def g(): return {}\n"},
    "in a function": {
        "mine_edited": "def f():\n    import its_helper\n    return its_helper.G\n",
        "its_helper": "G = {}\n",
    },
    "by another": {
        "mine_edited": "from middle_one import g\ndef f(): return g()\n",
        "middle_one": "from its_helper import G\ndef g(): return G\n",
        "its_helper": "G = {}\n",
    },
    "in a package": {
        "mine_edited": "from own_pack import a\ndef f(): return a.g()\n",
        "own_pack.__init__": "",
        "own_pack.a": "from .b import G\ndef g(): return G\n",
        "own_pack.b": "G = {}\n",
    },
}  # fmt: skip


@pytest.mark.parametrize("how", HELPED)
def test_a_helper_module_that_was_edited_is_loaded_again(how, write):
    """At once too, where the file has the same size and the same second."""
    *others, edited = HELPED[how].items()
    for name, text in others:
        write(name, text)
    for value in (0.25, 0.75, 0.5):
        write(edited[0], edited[1].format(value))
        assert score()[0] == value


def test_a_function_is_that_of_the_file_that_is_hashed(write):
    for value in (0.25, 0.75, 0.25):
        file = write("mine_edited", F.format(value))
        assert score() == (value, file_sha256(file))
    first = import_function("mine_edited:f", "--reward")
    score()
    assert import_function("mine_edited:f", "--reward") is first, "unedited, it is what it was"


def test_a_function_that_a_package_hands_on_is_hashed_where_it_was_written(write):
    write("its_package.__init__", "from its_package.functions import f\n")
    file = write("its_package.functions", F.format(0.5))
    assert score("its_package:f") == (0.5, file_sha256(file))


def test_a_module_that_the_user_imported_before_it_was_edited(write):
    write("its_helper", "G = 0.25\n")
    sys.path.append(".")
    importlib.import_module("its_helper")
    write("its_helper", "G = 0.75\n")
    write("mine_edited", "from its_helper import G\ndef f(): return G\n")
    assert score()[0] == 0.75


def test_two_functions_that_share_a_helper(write):
    for value in (0.25, 0.75):
        write("its_helper", f"G = {value}\n")
        for name in ("one_of_two", "two_of_two"):
            write(name, "from its_helper import G\ndef f(): return G\n")
        import_named(["--reward=one_of_two:f", "--reference=two_of_two:f"])
        for name in ("one_of_two", "two_of_two"):
            assert import_function(f"{name}:f", "--reward")() == value


def test_an_edit_that_cannot_be_imported_is_refused_until_it_can(write):
    write("mine_edited", F.format(0.25))
    assert score()[0] == 0.25
    for wrong in ("def f(:\n", "raise SystemExit\n", "import nowhere_at_all\n"):
        write("mine_edited", wrong)
        with pytest.raises(Refused, match="cannot be imported"):
            score()
    write("mine_edited", F.format(0.75))
    assert score()[0] == 0.75


CLASSES = {
    "--monitor": ("Monitor", "def flag(self, views): return {}", MONITORS),
    "--intervention": ("Intervention", "def route(self, g, flags): return {}", INTERVENTIONS),
}  # fmt: skip


@pytest.mark.parametrize("flag", CLASSES)
def test_a_class_is_that_of_the_file_that_is_hashed(flag, write):
    base, method, registry = CLASSES[flag]
    named = "class_edited:Own"
    try:
        for value in (1, 2):
            body = f"value = {value}\n    {method.format(value)}"
            imported = f"from vgrout.method.base import {base}"
            file = write("class_edited", f"{imported}\nclass Own({base}):\n    {body}\n")
            import_named([flag, named])
            assert registry[named].where.value == value
            assert hash_of_class(named) == hash_if_there(file)
    finally:
        registry.pop(named, None)


def test_what_is_not_trusted_is_not_imported(write):
    write("mine_edited", "raise AssertionError('imported')\n")
    with pytest.raises(Refused, match="--trust-code"):
        import_named(["--reward=mine_edited:f"], trusted=False)
    assert "mine_edited" not in sys.modules


def test_what_a_notebook_has_defined_stays(monkeypatch):
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "f_of_a_cell", lambda: 0.5, raising=False)
    import_named(["--reward=__main__:f_of_a_cell"])
    assert sys.modules["__main__"] is main


# ── Ctrl-C, while a function of a user's own is waited for

WAITING = """
import asyncio, threading
go_on = threading.Event()
def plain(completion): go_on.wait(); return 1.0
async def awaited(completion):
    while not go_on.is_set(): await asyncio.sleep(0.01)
    return 1.0
def raises(completion): raise KeyboardInterrupt
"""


@pytest.mark.parametrize("answers", [["a"], ["a", "b", "c"]])
@pytest.mark.parametrize("name", ["plain", "awaited"])
def test_an_interrupt_is_no_failure_of_the_function_that_is_waited_for(name, answers, write):
    write("waits_long", WAITING)
    function = own_function(f"waits_long:{name}", "--reward")

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            function.scores(ASKED, answers, retries=None)
    finally:
        signal.signal(signal.SIGALRM, before)
        sys.modules["waits_long"].go_on.set()


def test_an_interrupt_that_the_function_raises_is_its_failure(write):
    write("waits_long", WAITING)
    (failed,) = own_function("waits_long:raises", "--reward").scores(ASKED, ["a"])
    assert str(failed) == "raised KeyboardInterrupt"
