"""Command lines by tyro, with errors in one line: what was wrong, which flag, what is legal."""

import contextlib
import dataclasses
import difflib
import errno
import io
import os
import re
import select
import shlex
import shutil
import stat
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial, wraps
from types import MappingProxyType
from typing import Any, TypeVar, get_type_hints

import docstring_parser
import tyro

from vgrout import faults
from vgrout.errors import Refused, did_you_mean, one_line
from vgrout.files import drop_stdout, printable, restore_inherited
from vgrout.interrupts import interruptible

T = TypeVar("T")

ARGUMENTS = 2  # that are no flags, of one command at most
NO_FLAG = "no such flag"
OWN_REWARD = r"[\w.]+:\w+(=[^\s,=]*)?"  # a function of a user's own, with its weight
NARROW = 20  # columns: tyro lays out a help of less than 6 for ever


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
    argv = as_typed(sys.argv[1:] if argv is None else argv)
    # what else stands behind a function's name is another argument, as a run's folder
    argv = with_lists(argv, ["--reward"], OWN_REWARD)
    prog = prog.replace("vgrout ", command(""))
    if {"-h", "--help"} & {*argv}:
        join_help(*(what.values() if isinstance(what, Mapping) else [what]))
    if isinstance(what, Mapping):
        named = {name: _later(f) for name, f in what.items()}
        return parsed(
            lambda argv: tyro.extras.subcommand_cli_from_dict(
                named, args=argv, prog=prog, **settings
            ),
            argv,
        )()
    if isinstance(what, type):
        return parsed(lambda argv: tyro.cli(what, args=argv, prog=prog, **settings), argv)
    return parsed(lambda argv: tyro.cli(_later(what), args=argv, prog=prog, **settings), argv)()


def join_help(*what: Callable[..., object]) -> None:
    """Give each field of these settings classes its docstring as help, in one line for tyro to wrap.

    tyro keeps the line ends of a docstring. What a function or a class takes is treated alike.
    """
    for one in what:
        inner = [kind for kind in get_type_hints(one).values() if dataclasses.is_dataclass(kind)]
        join_help(*(kind for kind in inner if isinstance(kind, type)))
        if not (isinstance(one, type) and dataclasses.is_dataclass(one)):
            continue
        texts: dict[str, str] = {}
        for of in reversed(one.__mro__[:-1]):
            for told in docstring_parser.parse_from_object(of).params:
                if told.description:
                    texts[told.arg_name] = " ".join(told.description.split())
        for f in dataclasses.fields(one):
            if f.name in texts:
                f.metadata = MappingProxyType({**f.metadata, "help": texts[f.name]})


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
            with interruptible():
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


def parsed(cli: Callable[[list[str]], T], argv: Sequence[str], help_flag: str = "--help") -> T:
    """The result of `cli` for a command line; `--help` exits. help_flag: lists all flags.

    Raises:
        Refused: a settings class's own, or tyro's error in one line.
        ValueError: a fault of a settings class, which tyro would call an error of the command line.
    """
    message, outer = io.StringIO(), sys.exception()
    if shutil.get_terminal_size().columns < NARROW:
        os.environ["COLUMNS"] = str(NARROW)
    try:
        with contextlib.redirect_stderr(message):
            return cli([*argv])
    except SystemExit as e:
        if not e.code:
            raise
        if (own := _of_settings(e, outer)) is not None:
            raise own from own.__cause__
        said = tyro_complaint(message.getvalue(), help_flag)
        # Of an argument that is no flag tyro says so where a flag is unknown besides: that comes first.
        for _ in range(ARGUMENTS):
            if not re.fullmatch(r"\w+: needs a value", said):
                break
            argv = _with_an_argument(argv)
            said = _said_of(cli, argv, help_flag) or said
        if NO_FLAG in said:
            said = _with_suggestion(said, cli, argv)
        raise Refused(said) from None


def _with_an_argument(argv: Sequence[str]) -> list[str]:
    """The command line with one more word before its flags."""
    words = list(argv)
    flags_from = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    words.insert(flags_from, "missing")
    return words


def _said_of(
    cli: Callable[[list[str]], object], argv: Sequence[str], help_flag: str = "--help"
) -> str | None:
    """What tyro says of a command line, in one line; None: it takes it."""
    message = io.StringIO()
    try:
        with contextlib.redirect_stderr(message), contextlib.redirect_stdout(io.StringIO()):
            cli([*argv])
    except (Refused, SystemExit):  # as `parsed` has it
        return tyro_complaint(message.getvalue(), help_flag)
    return None


def _with_suggestion(said: str, cli: Callable[[list[str]], object], argv: Sequence[str]) -> str:
    """A refusal of an unknown flag, with the flag that was probably meant.

    tyro suggests flags for a bare word alone. So `--stpes=3` and `-steps` are tried as `--stpes` and `--steps`.
    """
    given, found, _ = said.partition(f": {NO_FLAG}")
    if not found or "did you mean" in said or given not in argv:
        return said
    bare = f"--{given.partition('=')[0].lstrip('-')}"
    if bare in (given, "--"):
        return said
    if bare == "--help":
        return f"{given}: {NO_FLAG}; did you mean {bare}?"
    at = list(argv).index(given)
    again = _said_of(cli, [*argv[:at], bare, *argv[at + 1 :]]) or ""
    if not again.startswith(f"{bare}: {NO_FLAG}"):
        meant = bare
    elif suggested := re.search(r"did you mean (--[\w-]+)", again):
        meant = suggested[1]
    else:
        return said
    return f"{given}: {NO_FLAG}; did you mean {meant}?"


def _of_settings(e: BaseException, outer: BaseException | None) -> ValueError | None:
    """What a settings class raised, where tyro exits for it; None: it exits for what was typed.

    outer: what was being handled before.
    """
    before = e.__context__
    while before is not None and before is not outer:
        if isinstance(before, ValueError) and not faults.of_a_library(before):
            return before
        before = before.__context__
    return None


def as_typed(argv: Sequence[str]) -> list[str]:
    """A command line with ~ replaced by the home folder: a shell does so at the beginning of a word alone, not in
    --out=~/x."""
    return [
        re.sub(r"^(--[\w-]+=)?(~(?=/|$))", lambda m: (m[1] or "") + os.path.expanduser("~"), word)
        for word in argv
    ]


def with_lists(argv: Sequence[str], lists: Collection[str], word_form: str = ".*") -> list[str]:
    """A command line with a list's words joined by commas. lists: the flags that take lists. word_form: regular
    expression of all of a word that may be joined to the one before."""
    out: list[str] = []
    of_list = False  # whether the word before belongs to a list's value
    for word in argv:
        starts = word.startswith("-")
        if of_list and not starts and out[-1] not in lists and re.fullmatch(word_form, word):
            out[-1] += f",{word}"
        else:
            out.append(word)
        of_list = word.partition("=")[0] in lists if starts else of_list
    return out


def tyro_complaint(box: str, help_flag: str = "--help") -> str:
    """tyro's framed message as one line in plain words, without its frame, its inner names and its closing hint."""
    text = box.split("For full helptext")[0]
    # the second where stdout cannot draw frames
    text = re.sub(r"╭─[^\n]*─╮|\A[^\n]*\n\s*-{20,}\s*\n", "", text)
    text = " ".join(re.sub(r"[╭╮╰╯│─]+|-{20,}", " ", text).split())
    if bad := re.match(r"Error parsing \S+: (.*?) Argument helptext: (--[\w-]+) (\S+)", text):
        value, kind = re.search(r"(?:from \['|: ')(.*?)'\]?", bad[1]), bad[3]
        number = "a whole number" if "INT" in kind else "a number" if "FLOAT" in kind else kind
        words = [word for word in re.findall(r"[\w-]+", kind) if word not in ("INT", "FLOAT")]
        return f"{bad[2]} {(value and value[1]) or repr('')}: should be {' or '.join([number, *words])}"
    if bad := re.match(
        r"invalid choice '(.*)' for argument '(--[\w-]+)'. Expected one of \((.*)\)", text
    ):
        legal = sorted(set(re.findall(r"'([^']*)'", bad[3])) - {"None"})
        return (
            f"{bad[2]} {bad[1]}: should be one of {', '.join(legal)}{did_you_mean(bad[1], legal)}"
        )
    text = re.sub(r"^Error parsing \S+: ", "", text)
    text = re.sub(r"^Missing value for argument '(\S+)'.*", r"\1: needs a value", text)
    text = text[max(0, text.find("Unrecognized options: ")) :]  # said before what is missing
    if text.startswith("Missing from "):
        named = re.findall(r"(?:^|\(required\)) ((?:--[\w-]+ )?[\w|{}.]+)", text.partition(":")[2])
        return f"missing: {', '.join(named)}; --help says more"
    text = re.sub(
        r"^Unrecognized options: ?(.*?)( Perhaps.*? meant.*?(--[\w-]+).*| Available subcommands: (.*))?$",
        partial(_unknown, help_flag=help_flag),
        text,
    )
    return re.sub(r"^Expected one of {(.*)}\.?", r"name one of \1", text)


def _unknown(found: re.Match[str], help_flag: str) -> str:
    given, more, _, commands = found.groups()
    given = given.partition(",")[0] or "''"
    if given.startswith("-"):
        given = given.partition(" ")[0]  # without its value
    if commands:
        one = f"; did you mean `{commands} {given}`?" if commands.isalpha() else ""
        one = did_you_mean(given, commands.split(", ")) or one
        return f"{given}: should be one of {commands}{one}"
    near = difflib.get_close_matches(
        given.partition("=")[0], re.findall(r"--[\w-]+", more or ""), 1
    )
    what = NO_FLAG if given.startswith("-") else "nothing here takes it"
    return (
        f"{given}: {what}; {f'did you mean {near[0]}?' if near else f'{help_flag} lists the flags'}"
    )
