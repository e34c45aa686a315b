"""Command lines by tyro, their complaints in one line: what was wrong, which flag, what is legal."""

import contextlib
import errno
import io
import os
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any, TypeVar

import tyro

from vgrout.files import drop_stdout, printable

T = TypeVar("T")


def parse_args(
    what: Callable[..., T] | Mapping[str, Callable[..., T]], argv: list[str] | None, prog: str, **settings: Any
) -> T:
    """An instance of a settings class as a command line fills it, or what a function returns when it is called with a
    command line's flags; of several, the one that the first word names. `--help` leaves.

    Raises:
        ValueError: one line, for the first bad flag; or whatever the class or the function raises.
    """
    if isinstance(what, Mapping):
        named = {name: _later(f) for name, f in what.items()}
        return parsed(lambda: tyro.extras.subcommand_cli_from_dict(named, args=argv, prog=prog, **settings))()
    if isinstance(what, type):
        return parsed(lambda: tyro.cli(what, args=argv, prog=prog, **settings))
    return parsed(lambda: tyro.cli(_later(what), args=argv, prog=prog, **settings))()


def _later(call: Callable[..., T]) -> Callable[..., Callable[[], T]]:
    """The same flags; the call itself waits until the parser has let go of stderr."""

    @wraps(call)
    def bind(*args: Any, **kwargs: Any) -> Callable[[], T]:
        return partial(call, *args, **kwargs)

    return bind


def cli_exit(run: Callable[[], int], interrupted: str = "interrupted") -> int:
    """An entry's exit code: a ValueError is a refusal, one line on stderr and 2; Ctrl-C says `interrupted`, 130; a
    closed pipe (`| head`) exits silently, 141, as other programs do; a standard output that takes nothing more (a full
    disk) one line, 1. What standard output cannot encode is escaped; a closed stream takes everything."""
    for fd in (0, 1, 2):  # a closed one (`>&-`) would be the number of the next file, and of every child's
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            return run()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except ValueError as e:
        print(f"E {printable(str(e))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"E {interrupted}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        drop_stdout()
        return 141
    except OSError as e:
        if e.filename is not None or e.errno not in (errno.ENOSPC, errno.EIO, errno.EBADF):
            raise
        drop_stdout()
        print(f"E standard output cannot be written ({e.strerror})", file=sys.stderr)
        return 1


def not_installed(package: str, extra: str = "") -> ValueError:
    """The refusal where an extra of the installation is needed."""
    return ValueError(f"{package} is not installed: `uv sync --extra {extra or package}` or `pip install {package}`")


def parsed(cli: Callable[[], T]) -> T:
    """What `cli` reads from a command line; `--help` leaves. Raises ValueError, tyro's complaint in one line."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return cli()
    except SystemExit as e:
        if e.code:
            raise ValueError(one_line(said.getvalue())) from None
        raise


def one_line(box: str) -> str:
    """tyro's framed message as one line, without its frame, its inner names and its closing hint."""
    text = box.split("For full helptext")[0]
    text = re.sub(r"╭─[^\n]*─╮|\A[^\n]*\n\s*-{20,}\s*\n", "", text)  # the second where stdout cannot draw frames
    text = " ".join(re.sub(r"[╭╮╰╯│─]+|-{20,}", " ", text).split())
    return re.sub(r"^Error parsing \S+: ", "", text)
