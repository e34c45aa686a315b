"""Command lines by tyro, with errors in one line: what was wrong, which flag, what is legal."""

import contextlib
import errno
import io
import os
import re
import select
import shlex
import shutil
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, TypeVar

import tyro

from vgrout.ground import faults
from vgrout.ground.errors import Refused, one_line
from vgrout.ground.files import drop_stdout, printable, restore_inherited

T = TypeVar("T")


def parse_args(
    what: Callable[..., T] | Mapping[str, Callable[..., T]],
    argv: list[str] | None,
    prog: str,
    **settings: Any,
) -> T:
    """A settings class filled from a command line, or the result of a function called with its flags; of several
    functions, the one that the first word names. `--help` exits.

    Raises:
        Refused: one line, for the first bad flag; or whatever the class or the function raises.
    """
    settings["prog"] = prog.replace("vgrout ", command(""))
    if isinstance(what, Mapping):
        named = {name: _later(f) for name, f in what.items()}
        return parsed(partial(tyro.extras.subcommand_cli_from_dict, named, **settings), argv)()
    if isinstance(what, type):
        return parsed(partial(tyro.cli, what, **settings), argv)
    return parsed(partial(tyro.cli, _later(what), **settings), argv)()


def parsed(cli: Callable[..., T], argv: Sequence[str] | None) -> T:
    """What a parser of tyro's makes of a command line; `--help` exits.

    Raises:
        Refused: a settings class's own, or tyro's message in one line; or whatever else a settings class raises.
    """
    words = _words(sys.argv[1:] if argv is None else argv)
    message, outer = io.StringIO(), sys.exception()
    try:
        with contextlib.redirect_stderr(message):
            return cli(args=words)
    except SystemExit as e:
        if not e.code:
            raise
        before = e.__context__
        while before is not None and before is not outer:
            if isinstance(before, Refused) or faults.raised_here(before):
                raise before from before.__cause__
            before = before.__context__
        # without the frame, and the title in its first line
        text = message.getvalue().strip().partition("\n")[2]
        raise Refused(one_line(re.sub("[╭╮╰╯│─]|-{9,}", " ", text))) from None


def _words(argv: Sequence[str]) -> list[str]:
    """A command line with `--flag value` for `--flag=value`, so that tyro suggests another flag for an unknown one,
    and with the home folder for ~, which a shell puts at a word's beginning alone."""
    words: list[str] = []
    for word in argv:
        flag, equals, value = word.partition("=")
        if equals and flag.startswith("--") and value and not value.startswith("-"):
            words += [flag, os.path.expanduser(value)]
        elif words[-2:-1] == ["--reward"] and re.fullmatch(r"[\w.]+:\w+(=[^\s,=]*)?", word):
            words[-1] += f",{word}"  # several functions; what else stands there is another argument
        else:
            words.append(word)
    return words


def command(name: str) -> str:
    """A command of this program as the one who started this process would type it."""
    if "UV" in os.environ:  # set by `uv run`
        return f"uv run vgrout {name}"
    return (
        f"vgrout {name}"
        if shutil.which("vgrout")
        else f"{shlex.quote(sys.executable)} -m vgrout {name}"
    )


def spelled(text: str) -> str:
    """A message with the commands in it, `vgrout NAME …`, as `command` spells them."""
    return text.replace("`vgrout ", f"`{command('')}")


def _later(call: Callable[..., T]) -> Callable[..., Callable[[], T]]:
    """The same flags; the call itself waits until the parser has released stderr."""

    @wraps(call)
    def bind(*args: object, **kwargs: object) -> Callable[[], T]:
        return partial(call, *args, **kwargs)

    return bind


def cli_exit(run: Callable[[], int], interrupted: str = "interrupted") -> int:
    """A command's exit code, with what is to be said about how it ended.

    A refusal is the user's mistake: one line on stderr, 2. Ctrl-C prints `interrupted`: 130. A
    closed pipe (`| head`) exits silently, as other programs do: 141. `--help` exits by SystemExit.
    What the machine does not give is one line (`_machine`). Any other exception is a fault: its
    traceback on stderr, 1; so is whatever somebody's own code raises, an `exit()` in it included.

    What standard output cannot encode is escaped; a closed stream takes everything.
    """
    restore_inherited()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            return run()
        finally:
            sys.stdout.flush()
    except Refused as e:
        show_refusal(e)
        return 2
    except KeyboardInterrupt:
        print(f"E {interrupted}", file=sys.stderr)
        return 130
    except BaseException as e:
        if isinstance(e, BrokenPipeError) and _nobody_reads():
            drop_stdout()
            return 141
        own = faults.raised_by_own(e)
        if isinstance(e, SystemExit) and not own:
            raise
        if not own and (said := _machine(e)):
            line, code = said
            print(f"E {line}", file=sys.stderr)
            return code
        faults.show(e)
        return 1


def _nobody_reads() -> bool:
    """Whether nobody reads standard output, or the lines beside it, any more. Else another pipe broke: a fault."""
    poller = select.poll()
    for stream in (1, 2):
        poller.register(stream, 0)
    return bool(poller.poll(0))


def show_refusal(e: Refused) -> None:
    """Print a refusal on stderr: one line.

    Where somebody's own code raised what it was refused for, the traceback of that comes first.
    """
    if e.__cause__ is not None and faults.raised_by_own(e.__cause__):
        faults.show(e.__cause__)
    print(f"E {spelled(printable(str(e)))}", file=sys.stderr)


def _machine(e: BaseException) -> tuple[str, int] | None:
    """One line and the exit code where the machine refuses something; None: it is no such exception.

    1: there is no memory left, or standard output takes nothing more (a full disk). 2: a path with
    a name that is too long, or in a folder that may not be entered.
    """
    if isinstance(e, (RuntimeError, MemoryError)) and (said := out_of_memory(e)):
        return f"{said}; take a smaller model or fewer and shorter answers", 1
    if not isinstance(e, OSError):
        return None
    if e.filename is not None:
        if e.errno not in (errno.ENAMETOOLONG, errno.EACCES):
            return None
        return f"{printable(str(e.filename))}: cannot be opened ({e.strerror}); choose another", 2
    if e.errno not in (errno.ENOSPC, errno.EIO, errno.EBADF):
        return None
    if not _may_be_full():
        return None if e.errno == errno.EBADF else (f"a file cannot be written ({e.strerror})", 1)
    drop_stdout()
    return f"standard output cannot be written ({e.strerror})", 1


def _may_be_full() -> bool:
    """Whether standard output is a file or a device, and no pipe, which no disk keeps from being written."""
    kind = os.fstat(1).st_mode
    return stat.S_ISREG(kind) or stat.S_ISCHR(kind)


def out_of_memory(e: BaseException) -> str | None:
    """One line on an exception that says so; None of any other. Torch is not imported for it: of a GPU its kind is
    torch.OutOfMemoryError, of a CPU RuntimeError."""
    said = one_line(e)
    on_gpu = type(e).__name__ == "OutOfMemoryError"
    if not (on_gpu or isinstance(e, MemoryError) or "DefaultCPUAllocator: can't allocate" in said):
        return None
    size = re.search(r"allocate ([\d.]+ [KMG]iB|\d+ bytes)", said)
    return f"out of memory on {'the GPU' if on_gpu else 'the host'}{f': {size[1]} more were needed' if size else ''}"


def not_installed(package: str, extra: str = "") -> Refused:
    """The refusal where an extra of the installation is needed."""
    return Refused(
        f"{package} is not installed: `uv sync --extra {extra or package}` or `pip install {package}`"
    )


def cannot_import(package: str, error: ImportError, extra: str = "") -> Refused:
    """The refusal where importing an extra of the installation has failed: it is missing, or broken."""
    missing = isinstance(error, ModuleNotFoundError) and error.name == package.replace("-", "_")
    if missing:
        return not_installed(package, extra)
    why = one_line(error, 160)
    return Refused(f"{package} is installed and cannot be imported ({why}): install it again")
