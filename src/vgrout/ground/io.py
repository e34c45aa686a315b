"""What goes in and out: files and JSON, the standard streams, a user's mistake in one line, a fault's traceback.

Files are written whole or not at all. Standard library only.
"""

import contextlib
import difflib
import errno
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import site
import stat
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import cache, wraps
from pathlib import Path
from typing import Any, BinaryIO, ParamSpec, TypeVar

# ── mistakes of the user's, and the ways in which a run may end


class Refused(ValueError):
    """A mistake of the user's: what was wrong, where, and what to do, in one line.

    Commands print it on stderr and exit with 2. Any other exception is a fault, of this program or of somebody's own
    class, and shows its traceback.
    """


def refuse(condition: bool, message: str) -> None:
    """Raises Refused with this message where the condition holds."""
    if condition:
        raise Refused(message)


def one_line(said: object, longest: int | None = None) -> str:
    """A text, or what an exception says, in one line of at most so many characters; None: however long it is."""
    text = " ".join(str(said).split())
    if longest is None or len(text) <= longest:
        return text
    return f"{text[: longest - 1]}…"


def nearest(given: str, legal: Iterable[str]) -> str:
    """The name that was probably meant by one that is unknown, whatever its case; "": none is like it."""
    names = {name.casefold(): name for name in legal}
    near = difflib.get_close_matches(given.casefold(), names, 1)
    return names[near[0]] if near else ""


def did_you_mean(given: str, legal: Iterable[str]) -> str:
    """The end of a refusal that names it: "; did you mean route2?", or ""."""
    meant = nearest(given, legal)
    return f"; did you mean {meant}?" if meant else ""


def none_fits(source: str, room: int) -> Refused:
    """The refusal of tasks none of whose prompts fits."""
    return Refused(
        f"{source}: none of its prompts fits the {room} tokens that the model's window leaves beside --max-new; "
        "shorten them, lower --max-new, or choose a model with a longer window"
    )


class Interrupted(Exception):
    """SIGINT, SIGTERM or SIGHUP: the current step was finished and saved."""


class Halted(Exception):
    """The guard or a detector stopped the run."""


class Diverged(Exception):
    """The update was not finite three steps in a row, or the policy lost tokens that it had."""


class NothingRouted(AssertionError):
    """A method with a quarantine has learnt, and its quarantine has learnt nothing."""


class NothingAligned(Exception):
    """A distillation by ULD had nothing to compare, or nothing at all to learn from. then: what to do."""

    def __init__(self, message: str, then: str) -> None:
        super().__init__(message)
        self.then = then


# ── what refusals say


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


def show_refusal(e: Refused) -> None:
    """Print a refusal on stderr: one line.

    Where somebody's own code raised what it was refused for, the traceback of that comes first.
    """
    if e.__cause__ is not None and raised_by_own(e.__cause__):
        show_fault(e.__cause__)
    print(f"E {spelled(printable(str(e)))}", file=sys.stderr)


def out_of_memory(e: BaseException) -> str | None:
    """One line on an exception that says so; None of any other. Torch is not imported for it: of a GPU its kind is
    torch.OutOfMemoryError, of a CPU RuntimeError."""
    said = one_line(e)
    on_gpu = type(e).__name__ == "OutOfMemoryError"
    if not (on_gpu or isinstance(e, MemoryError) or "DefaultCPUAllocator: can't allocate" in said):
        return None
    size = re.search(r"allocate ([\d.]+ [KMG]iB|\d+ bytes)", said)
    line = "out of memory on the GPU" if on_gpu else "out of memory on the host"
    if size:
        line += f": {size[1]} more were needed"
    return line


def not_installed(package: str, extra: str = "") -> Refused:
    """The refusal where an extra of the installation is needed."""
    return Refused(
        f"{package} is not installed: `uv sync --inexact --extra {extra or package}` or `pip install {package}`"
    )


def cannot_import(package: str, error: ImportError, extra: str = "") -> Refused:
    """The refusal where importing an extra of the installation has failed: it is missing, or broken."""
    missing = isinstance(error, ModuleNotFoundError) and error.name == package.replace("-", "_")
    if missing:
        return not_installed(package, extra)
    why = one_line(error, 160)
    return Refused(f"{package} is installed and cannot be imported ({why}): install it again")


# ── faults


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


def show_fault(e: BaseException) -> None:
    """Print the traceback on stderr, above a progress bar.

    A stderr that takes nothing is no second fault.
    """
    from tqdm import tqdm  # not where answers are graded

    with contextlib.suppress(OSError):
        text = "".join(traceback.format_exception(e))
        tqdm.write(printable(text), file=sys.stderr, end="")
        sys.stderr.flush()


# ── files


Json = Any  # the value of a JSON text, which its reader has to check

P = ParamSpec("P")

T = TypeVar("T")

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

ASKED_S = 0.5  # within which whoever only asks for a lock has given it back

# What a program leaves in a folder of its own: its lock, and what it was writing when it was
# killed.
LEFT = re.compile(r"\.lock|\..+\.\d+\.tmp")


@contextlib.contextmanager
def atomic_open(path: Path) -> Generator[BinaryIO]:
    """A binary file that replaces `path` when the block ends without an exception (temporary name, flush, sync,
    rename); after one `path` is as it was."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


def write_atomic(path: Path, data: str | bytes) -> None:
    """Write `data` to `path`; after a kill or an error the file holds all of it or is as it was."""
    with atomic_open(path) as f:
        f.write(data.encode(errors="backslashreplace") if isinstance(data, str) else data)


@contextlib.contextmanager
def atomic_folder(path: Path, replace: bool = False) -> Generator[Path]:
    """An empty folder that becomes `path` when the block ends without an exception, its files on disk; after one `path`
    is as it was.

    replace: take the place of a folder that is there, which is missing for a moment between two renames. Else that is
    an OSError.
    """
    make_folder(path.parent)
    fresh = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    old = path.with_name(f".{path.name}.old.{os.getpid()}.tmp")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    try:
        yield fresh
        for file in fresh.rglob("*"):
            if file.is_file():
                with open(file, "rb") as written:
                    os.fsync(written.fileno())
        if replace and path.exists():
            os.replace(path, old)
        os.replace(fresh, path)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        if old.exists() and not path.exists():  # ended between the two renames
            os.replace(old, path)
        shutil.rmtree(fresh, ignore_errors=True)


# Control characters except tab and newline, marks that change the writing direction, other line
# ends, lone surrogates.
_UNSEEN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def has_lone_surrogate(text: str) -> bool:
    """Whether a text holds half a character, which no tokenizer takes."""
    return re.search(r"[\ud800-\udfff]", text) is not None


def printable(text: str) -> str:
    """Text of unknown origin for a terminal or a log: invisible characters that would act become escapes like \\x1b."""
    return _UNSEEN.sub(lambda c: c[0].encode("unicode_escape").decode(), text)


def quoted(text: str) -> str:
    """The same with each line behind "| ", so that nothing in it looks like a line of the log."""
    return "\n".join(f"| {line}" for line in printable(text).split("\n"))


def to_json(data: object) -> str:
    """Strict JSON, indented.

    Raises ValueError on a NaN, which other readers cannot parse: a fault of the caller's.
    """
    return json.dumps(data, ensure_ascii=False, indent=1, allow_nan=False, default=str)


def existing(folder: Path) -> Path:
    """`folder`, or the nearest folder above it that exists. Raises Refused where the working folder was removed, or a
    link on the way leads nowhere."""
    try:
        there = folder.absolute()
    except FileNotFoundError:
        raise Refused("the working folder is gone; change to one that exists") from None
    while not there.exists():
        if there.is_symlink():
            raise Refused(
                f"{there}: a link to {os.readlink(there)}, which is not there; mount its disk, or remove the link"
            )
        there = there.parent
    return there


def make_folder(folder: Path) -> None:
    """Make a folder, unless it is there, and those above it. Raises Refused, one line, where a link on the way leads
    nowhere."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        existing(folder)
        raise


def probe_writable(folder: Path, flag: str = "") -> None:
    """Check that files can be created in `folder`, or where it would be created; nothing is left behind. Raises
    Refused, one line, if not."""
    there = existing(folder)
    try:
        probe = there / f".probe.{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as e:
        how = "choose another" if flag else "start from a folder where it can"
        raise Refused(
            f"{flag} {folder}: cannot be written ({e.strerror}); {how}".lstrip()
        ) from None


def require_new(path: Path | None, flag: str = "--out") -> None:
    """Nothing of a user's is overwritten: what a flag names to be written must not exist, and its folder must be
    writable; before any work. Raises Refused, one line; None: the flag was not given."""
    if path is None:
        return
    if path.exists() or path.is_symlink():
        raise Refused(f"{flag} {path}: exists; choose another name or delete it")
    probe_writable(path.parent, flag)


def require_own(folder: Path, flag: str, mark: str, what: str) -> None:
    """The same for a folder that a program goes on with: new, empty but for what a killed one has left, or one that
    holds the file `mark`."""
    found = [path.name for path in folder.iterdir()] if folder.is_dir() else [""] * folder.exists()
    inside = sorted(name for name in found if not LEFT.fullmatch(name))
    if inside and mark not in inside:
        holds = f", it holds {inside[0]}" if inside[0] else " (a file)"
        raise Refused(f"{flag} {folder}: is no {what}{holds}; name another folder")
    probe_writable(folder, flag)


def regular(path: str, flags: int) -> int:
    """The opener of every file that a user names. Raises OSError for a pipe or a device, which may never end."""
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "not a regular file; save it as one first", path)


def hold(folder: Path, what: str = "run") -> BinaryIO:
    """Lock the folder; the kernel unlocks it when the process ends, however it ends. Raises Refused, one line, while
    another process holds the lock."""
    lock = open(folder / ".lock", "a+b")  # noqa: SIM115
    asked_until = time.monotonic() + ASKED_S
    while not _locked(lock, fcntl.LOCK_EX):
        # somebody writes, or only asks in this moment whether somebody does
        if time.monotonic() > asked_until:
            lock.close()
            raise Refused(
                f"{folder}: another process is writing this {what}; wait for it, or stop it first"
            )
        time.sleep(0.01)
    return lock


def held(run: Path) -> bool:
    """Whether some process is writing this run. Any number of processes may ask at once."""
    try:
        with open(run / ".lock", "a+b") as lock:  # NFS wants it readable for a shared lock
            return not _locked(lock, fcntl.LOCK_SH)
    except OSError:  # an unwritable folder is refused elsewhere, by name
        return False


def _locked(lock: BinaryIO, how: int) -> bool:
    """Whether the file could be locked; True on a file system without locks. Raises OSError for another reason."""
    try:
        fcntl.flock(lock, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as e:
        if e.errno not in NO_LOCKS:
            raise
    return True


def read_text(path: Path) -> str:
    """A UTF-8 file, without a byte order mark. Raises Refused, one line with its name, where it is none or is not
    there."""
    try:
        with open(path, encoding="utf-8-sig", opener=regular) as f:
            return f.read()
    except (OSError, ValueError) as e:
        raise _unreadable(path, e) from None


def _unreadable(path: Path, e: Exception) -> Refused:
    return Refused(f"{path}: cannot be read ({getattr(e, 'strerror', e)})")


def from_json(text: str | bytes, where: str, *, nan: bool = False) -> Json:
    """The value of a JSON text. Raises Refused, one line that begins with `where`; for a NaN too, which this program
    never writes, and for a key that an object has twice: one of the values would be lost.

    nan: taken, where another program wrote the file and may have measured what is not read here.
    """

    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        for key, _ in pairs if len(found) < len(pairs) else ():
            if [k for k, _ in pairs].count(key) > 1:
                raise LookupError(f"key {key!r} is there twice")
        return found

    def no_constant(name: str) -> None:
        raise LookupError(f"it holds {name}")

    try:
        constant = None if nan else no_constant
        return json.loads(text, object_pairs_hook=once, parse_constant=constant)
    except LookupError as e:
        raise Refused(f"{where}: {e.args[0]}") from None
    except (ValueError, RecursionError) as e:
        raise Refused(f"{where}: not JSON ({str(e).replace('line 1 column', 'column')})") from None


def numbered_lines(path: Path) -> Iterator[tuple[str, Json]]:
    """("FILE, line N", its value) of every line of a JSONL file that is not blank. Only a newline ends a line: U+2028
    and its like may stand in a string. The file is read line by line. Raises as `read_text` and `from_json` do.
    """
    try:
        with open(path, encoding="utf-8-sig", opener=regular) as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    where = f"{path}, line {number}"
                    yield where, from_json(line, where)
    except Refused:
        raise
    except (OSError, ValueError) as e:
        raise _unreadable(path, e) from None


def whole_lines(log: Path) -> list[bytes]:
    """The lines of a log, none where there is no file. An incomplete last one, left by a kill, is cut off the file."""
    raw = log.read_bytes() if log.exists() else b""
    complete = raw[: raw.rfind(b"\n") + 1]
    if len(complete) < len(raw):
        os.truncate(log, len(complete))
    return complete.splitlines()


def read_json(path: Path) -> dict[str, Json]:
    """A JSON object from a run's file. Raises Refused, one line, if it is missing or damaged."""
    if not path.exists():
        raise Refused(f"{path}: not there; is {path.parent} a run directory?")
    data = from_json(read_text(path), str(path))
    if not isinstance(data, dict):
        raise Refused(f"{path}: not a JSON object")
    return data


# what functions marked `once` have returned within the `reading_once` that is open
_READ: ContextVar[dict[object, Any] | None] = ContextVar("_READ", default=None)


@contextlib.contextmanager
def reading_once() -> Generator[None]:
    """Within the block each function marked `once` is called once for the same arguments: a study of a thousand runs
    reads its problem file once. Outside, and after the block, nothing is kept."""
    token = _READ.set({})
    try:
        yield
    finally:
        _READ.reset(token)


def once(read: Callable[P, T]) -> Callable[P, T]:
    """Mark a function whose result depends on its arguments and on files alone, and is never changed by those who get
    it. What it raises is not kept. Arguments are compared by value where they are words, numbers, paths or tuples of
    these, and are the same objects otherwise."""

    @wraps(read)
    def reading(*args: P.args, **kwargs: P.kwargs) -> T:
        kept = _READ.get()
        if kept is None:
            return read(*args, **kwargs)
        given = (*args, *kwargs.values())
        key = (read, tuple(kwargs), *map(_compared, given))
        if key in kept:
            return kept[key][0]
        result = read(*args, **kwargs)
        # with the arguments, so that none of their identities is given to another object
        kept[key] = result, given
        return result

    return reading


def _compared(argument: object) -> object:
    """What two arguments have in common if they count as the same."""
    if isinstance(argument, tuple) and all(isinstance(part, (str, Path)) for part in argument):
        return argument
    if argument is None or isinstance(argument, (str, int, float, Path)):
        return type(argument), argument
    return id(argument)


def drop_stdout() -> None:
    """Send what is still buffered to /dev/null, where stdout takes no more: the interpreter's last flush would fail."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def restore_inherited(signals: Collection[int] = (signal.SIGCHLD,)) -> None:
    """Undo what a process inherits and would pass on: signals that are blocked, or, of these, ignored (of a child that
    ends while SIGCHLD is, the kernel keeps no exit status); standard streams that are closed (`>&-`), whose numbers the
    next files would get. A closed one takes everything."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    with contextlib.suppress(ValueError):  # in a thread
        for number in signals:
            if signal.getsignal(number) is signal.SIG_IGN:
                signal.signal(
                    number,
                    signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL,
                )
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, "w" if fd else "r", encoding="utf-8", closefd=False))  # noqa: SIM115 as long as the process


def json_lines(path: Path) -> Iterator[Json]:
    """The values alone, of a run's file; none if there is no such file."""
    if path.is_file():
        for _, value in numbered_lines(path):
            yield value


def write_json_lines(path: Path, records: Iterable[Mapping[str, object]]) -> None:
    """Write a file of JSON lines, complete or not at all. Raises ValueError on a NaN, as `to_json` does."""
    with atomic_open(path) as f:
        for record in records:
            line = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
            # a sampled answer may have a lone surrogate, which UTF-8 cannot encode
            f.write(line.encode(errors="backslashreplace"))


def file_sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    with open(path, "rb", opener=regular) as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def text_sha256(text: str) -> str:
    """Hex digest of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def write_json(path: Path, value: object) -> None:
    """Indented JSON; folders are made. Not atomic: for folders that are renamed as a whole."""
    make_folder(path.parent)
    path.write_text(
        json.dumps(value, ensure_ascii=False, indent=1) + "\n", "utf-8", "backslashreplace"
    )


def hash_of_files(paths: Iterable[Path]) -> str:
    """sha256 of these files' names and bytes, without their folders."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.name.encode() + b"\0")
        with open(path, "rb") as file:
            while block := file.read(2**20):
                digest.update(block)
    return digest.hexdigest()


@once
def hash_if_there(path: Path | None) -> str | None:
    """The same of one file; None: no file is named, or it is missing."""
    return hash_of_files([path]) if path and path.exists() else None


@once
def hash_of_folder(folder: Path) -> str:
    """The same of all files that lie in a folder, those in its folders left out."""
    return hash_of_files([path for path in folder.iterdir() if path.is_file()])
