"""What a fault shows: its traceback, from the first line of somebody's own code on, if any.

A fault is any exception but `Refused`, and but the ways in which a run may end. "Somebody's own" is
a monitor, an intervention, a reward, a scorer, a judge: whatever lies neither in this package, nor
in Python's library, nor among the installed packages. The frames above theirs are ours, and say
nothing to them.
"""

import contextlib
import site
import sys
import sysconfig
import traceback
from functools import cache
from pathlib import Path

from vgrout.ground.files import printable

PACKAGE = Path(__file__).resolve().parents[1]
ORGANISMS = PACKAGE.parents[1] / "organisms"  # of a clone: ours too


@cache
def _installed() -> tuple[Path, ...]:
    """The folders of this package, of Python's library and of installed packages."""
    paths = sysconfig.get_paths()
    folders = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders.append(site.getusersitepackages())
    return (PACKAGE, ORGANISMS, *(Path(folder).resolve() for folder in folders))


@cache
def is_own(file: str) -> bool:
    """Whether a frame of this file is somebody's own code."""
    if file.startswith("<"):  # frozen modules, generated code
        return False
    path = Path(file).resolve()
    if {"site-packages", "dist-packages"} & {*path.parts}:
        return False
    return not any(path.is_relative_to(folder) for folder in _installed())


def raised_here(e: BaseException) -> bool:
    """Whether an exception has come through a line of this package."""
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(e.__traceback__))
    return any(Path(file).is_relative_to(PACKAGE) for file in files)


def raised_by_own(e: BaseException | None) -> bool:
    """Whether an exception has come through somebody's own code."""
    if e is None:
        return False
    return any(is_own(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(e.__traceback__))


def place_of(e: BaseException | None) -> str:
    """Where somebody's own code raised it, as "FILE:LINE"; "": it has come through none."""
    if e is None:
        return ""
    place = ""
    for frame, line in traceback.walk_tb(e.__traceback__):
        if is_own(frame.f_code.co_filename):
            place = f"{Path(frame.f_code.co_filename).name}:{line}"
    return place


def text_of(e: BaseException) -> str:
    """The traceback of an exception, and of those that it came from, as Python prints them.

    Each begins at the first line of somebody's own code, where it has one.
    """
    whole = traceback.TracebackException.from_exception(e)
    pending, seen = [whole], set[int]()
    while pending:
        part = pending.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        own = [i for i, frame in enumerate(part.stack) if is_own(frame.filename)]
        if own:
            part.stack = traceback.StackSummary.from_list(part.stack[own[0] :])
        pending += [p for p in (part.__cause__, part.__context__, *(part.exceptions or ())) if p]
    return printable("".join(whole.format()))


def show(e: BaseException) -> None:
    """Print the traceback on stderr, above a progress bar.

    A stderr that takes nothing is no second fault.
    """
    from tqdm import tqdm  # not where answers are graded

    with contextlib.suppress(OSError):
        tqdm.write(text_of(e), file=sys.stderr, end="")
        sys.stderr.flush()
