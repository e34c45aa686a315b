"""Shared fixtures."""

import os
import re
import sys

# Where Python is told to write no bytecode (containers often are), every process that the tests
# start would compile torch, transformers and this project once more: a second or two each. It is
# kept beside pytest's own cache then, so that sources and packages stay as they are.
if sys.dont_write_bytecode:
    kept = os.path.join(os.path.dirname(os.path.dirname(__file__)), ".pytest_cache", "bytecode")
    sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = kept
    sys.dont_write_bytecode = False
    del os.environ["PYTHONDONTWRITEBYTECODE"]

# Before torch is imported, here and in what the tests start: two workers on two cores, one thread
# each.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook
from loguru import logger

# Shapes are checked at run time in the modules that write them; in all it took two fifths of the
# suite's time.
SOURCE = Path(__file__).resolve().parents[1] / "src"
SHAPED = [
    path
    for path in SOURCE.rglob("*.py")
    if re.search("jaxtyping|tensor_types", path.read_text("utf-8"))
]
install_import_hook(
    [".".join(path.relative_to(SOURCE).with_suffix("").parts) for path in SHAPED],
    "beartype.beartype",
)

# The same examples each time: what passes here passes in CI. HYPOTHESIS_PROFILE=explore draws new
# ones.
# What a loaded machine takes longer for is no fault.
settings.register_profile(
    "fixed", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "explore", settings.get_profile("fixed"), derandomize=False, max_examples=1000
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


@pytest.fixture(autouse=True)
def only_built_in_methods():
    """A class of one's own that a test names is forgotten after it: other tests go through all that there are."""
    # not above: the import hook has to be installed before the first module is imported
    from vgrout.config.specs import INTERVENTIONS, MONITORS

    with patch.dict(MONITORS), patch.dict(INTERVENTIONS):
        yield


class OfTheShipped(dict):
    """What functions marked `once` have read of the shipped organism, whose files no test changes."""

    def __setitem__(self, key, value):
        _, _, *arguments = key
        shipped = str(SOURCE / "vgrout/organism/data")
        by_value = all(isinstance(argument, tuple) for argument in arguments)
        if by_value and any(str(argument[-1:]).find(shipped) >= 0 for argument in arguments):
            super().__setitem__(key, value)


@pytest.fixture(autouse=True, scope="session")
def shipped_files_are_read_once():
    """By each of pytest-xdist's workers: it was a quarter of every small run."""
    from vgrout.ground import io

    token = io._READ.set(OfTheShipped())
    yield
    io._READ.reset(token)


@pytest.fixture(autouse=True, scope="session")
def command_lines_are_parsed_as_outside_pytest():
    """Where tyro sees pytest it works out a tenth of what it has kept once more, for its own tests.

    It also reads the source of the settings' classes at each call, for their comments: here once.
    """
    from tyro import _docstrings, _unsafe_cache

    read = _docstrings._ClassTokenization.make.__wrapped__
    with (
        patch.object(_unsafe_cache, "sys", SimpleNamespace(modules={})),
        patch.object(_docstrings._ClassTokenization, "make", staticmethod(cache(read))),
    ):
        yield


@pytest.fixture(scope="session")
def shared_data():
    """Real problems and rollouts, where they lie beside the checkout or where VGROUT_SHARED_DATA points."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("VGROUT_SHARED_DATA", beside))
    if not folder.is_dir():
        pytest.skip("the real data are not on this machine (set VGROUT_SHARED_DATA)")
    return folder


@pytest.fixture(scope="session")
def shared_run(tmp_path_factory):
    """Whole runs that several tests read: made once, whichever of pytest-xdist's workers needs them."""
    from runs import SharedRuns

    own = tmp_path_factory.getbasetemp()
    return SharedRuns(own.parent if "PYTEST_XDIST_WORKER" in os.environ else own)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory of its own, whose modules can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.fixture
def no_network(tmp_path, monkeypatch):
    """A working directory of its own, from which no address can be reached."""

    def unreachable(*_, **__):
        raise OSError("no route to host")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("urllib.request.urlopen", unreachable)


@pytest.fixture
def warnings():
    """Messages logged at WARNING and above while the test runs."""
    lines = []
    sink = logger.add(lambda message: lines.append(message.record["message"]), level="WARNING")
    yield lines
    logger.remove(sink)
