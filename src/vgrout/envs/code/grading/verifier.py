"""The verifier: one process per worker that knows the expected values and never runs an answer.

It stands between the trainer and its fork server: it grades one rollout after another (`verdict`),
and watches each child's clock and messages (`watch`). The kernel limits its memory and its CPU time
per grading, and it dies with the trainer. It is a separate process because a session of a dozen
short messages would wait for the trainer's interpreter lock at each one.
"""

import ctypes
import hashlib
import json
import os
import resource
import secrets
import select
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Set
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from vgrout.envs.code.grading import messages
from vgrout.envs.code.grading.isolation import FILE_LAYERS, cap_limit
from vgrout.envs.code.grading.kernel import die_with_parent
from vgrout.envs.code.grading.messages import WorkerSettings
from vgrout.envs.code.grading.probe import (
    EVIDENCE,
    FATAL,
    IPC_CREAT,
    IPC_RMID,
    LEFT_BEHIND,
    Spec,
)
from vgrout.envs.code.grading.processes import remove_empty
from vgrout.envs.code.grading.verdict import Verifier
from vgrout.envs.code.grading.watch import (
    ForkServerHandle,
    ForkServerLost,
    memory_file,
)
from vgrout.ground.io import restore_inherited

# What the verifier itself may use.
TRUSTED_CPU_S = 20  # CPU seconds for one rollout
TRUSTED_MEMORY = 4 << 30  # bytes of address space

_PROBE_CPU_S = 2.0
_UDP_ARRIVES_S = 0.2


def probe(fork_server: ForkServerHandle) -> dict[str, bool]:
    """Attack the sandbox from inside two throw-away children: name → did the attack succeed?

    The targets are made here: a file, three sockets and a segment of shared memory. A socket that
    this process may not have is out of a child's reach too. What the children leave as evidence has
    to arrive. Raises ForkServerLost; OSError if there can be no file.
    """
    found: dict[str, object] = {}
    settings = fork_server.settings
    libc = ctypes.CDLL(None)
    name = f"vgrout-{os.getpid()}-{secrets.token_hex(4)}"
    with tempfile.NamedTemporaryFile(prefix="vgrout-probe-") as secret, ExitStack() as sockets:
        os.fchmod(secret.fileno(), 0o644)
        secret.write(b"secret")
        secret.flush()
        address = f"\0{name}"  # abstract: rules about files do not cover it
        _listening(sockets, socket.AF_UNIX, socket.SOCK_STREAM, address)
        tcp = _listening(sockets, socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0))
        udp = _listening(sockets, socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0))
        shm_key = 1 + secrets.randbelow(1 << 30)
        segment = libc.shmget(shm_key, 4096, IPC_CREAT | 0o666)
        targets: Spec = {
            "secret": secret.name,
            "port": tcp.getsockname()[1] if tcp else 0,
            "udp_port": udp.getsockname()[1] if udp else 0,
            "shm_key": shm_key,
            "abstract": address,
            "memory": (settings.memory_mb << 20) + (64 << 20),
            "file": settings.output_bytes + 1,
        }
        for first, result_name in ((True, LEFT_BEHIND), (False, "")):
            job = {"kind": "probe", **targets, "first": first}
            evidence_fd = memory_file()
            try:
                fork_server.run(
                    job,
                    _PROBE_CPU_S,
                    found.update,
                    evidence_fd=evidence_fd,
                    result_name=result_name,
                )
                if os.pread(evidence_fd, 1024, 0) != EVIDENCE:
                    what = "writes into a file" if result_name else "prints"
                    raise ForkServerLost(f"what an answer {what} cannot be read")
            finally:
                os.close(evidence_fd)
        if segment != -1:
            libc.shmctl(segment, IPC_RMID, None)
        if udp and found.get("send over UDP"):
            arrived, _, _ = select.select([udp], [], [], _UDP_ARRIVES_S)
            found["send over UDP"] = bool(arrived)
    if not found:
        raise ForkServerLost("no answer from the probe")
    return {name: bool(succeeded) for name, succeeded in found.items()}


def _listening(
    sockets: ExitStack, family: int, kind: int, address: str | tuple[str, int]
) -> socket.socket | None:
    """Return a socket at an address, closed with `sockets`; None if there can be none."""
    try:
        listener = sockets.enter_context(socket.socket(family, kind))
        listener.bind(address)
        if kind == socket.SOCK_STREAM:
            listener.listen()
    except OSError:
        return None
    return listener


def main(trainer_fd: int, *settings_values: Any) -> None:
    """Entry of the exec'd process: says hello, then replies to requests until the trainer ends."""
    restore_inherited(messages.RESTORED)
    trainer = socket.socket(fileno=trainer_fd)
    settings = WorkerSettings(*settings_values)
    # The stack unwinds from its end: the fork server ends, then the folder goes. The trainer
    # removes the folder too, unless it is killed, which may be before its workers are up. The
    # trainer's end is seen twice, as end of input and as SIGTERM some microseconds later. An
    # exception from the signal's handler must not break off what the first has begun, so the stack
    # unwinds with the signal off.
    with ExitStack() as ends:
        ends.callback(remove_empty, settings.workdir)
        try:
            signal.signal(signal.SIGTERM, _leave)
            with suppress(BrokenPipeError, ConnectionResetError):
                _greet_and_serve(trainer, settings, ends)
        finally:
            signal.signal(signal.SIGTERM, _stay)


def _level(active: Set[str], breaches: list[str]) -> int:
    """The level of protection, 3 best: see docs/grading.md."""
    if any(name in FATAL for name in breaches) or not FILE_LAYERS & active:
        return 0
    if "landlock" not in active or "seccomp" not in active:
        return 1
    return 3 if "namespaces" in active else 2


def _send(trainer: socket.socket, message: Mapping[str, object]) -> None:
    messages.send(trainer, json.dumps(message).encode())


def _greet_and_serve(trainer: socket.socket, settings: WorkerSettings, ends: ExitStack) -> None:
    """Start the fork server, probe it, say hello to the trainer, and grade until that ends."""
    fork_server = ForkServerHandle(settings)
    ends.callback(fork_server.close)
    try:
        die_with_parent(signal.SIGTERM)
        signal.setitimer(signal.ITIMER_PROF, TRUSTED_CPU_S)  # its signal ends this process
        cap_limit(resource.RLIMIT_AS, TRUSTED_MEMORY)
        fork_server.start()
        breaches = [name for name, succeeded in probe(fork_server).items() if succeeded]
    except (ForkServerLost, OSError) as e:
        _send(trainer, {"unusable": messages.refusal(e)})
        return
    hello = {
        "level": _level(fork_server.active.keys(), breaches),
        "active": fork_server.active,
        "missing": fork_server.missing,
        "breaches": breaches,
        "as_root": os.getuid() == 0 and "uid" not in fork_server.active,
        "version": VERSION,
    }
    _send(trainer, hello)
    _serve(trainer, Verifier(fork_server))


def _leave(*_: object) -> None:
    """Exit through the stack that removes the folder.

    The signal may come again, as each of the trainer's threads sends it when it dies.
    """
    signal.signal(signal.SIGTERM, _stay)
    sys.exit(0)


def _stay(*_: object) -> None:
    """Do nothing.

    Not SIG_IGN: for a signal that came a moment before that was set, Python prints a traceback.
    """


def _serve(trainer: socket.socket, verifier: Verifier) -> None:
    while (request := messages.receive(trainer)) is not None:
        signal.setitimer(signal.ITIMER_PROF, TRUSTED_CPU_S)  # anew for each rollout
        try:
            _send(trainer, {"grade": verifier.grade(json.loads(request))})
        except (ValueError, SyntaxError) as e:
            _send(trainer, {"fault": str(e)})
        except (ForkServerLost, OSError) as e:
            _send(trainer, {"lost": messages.refusal(e)})
            break


def _fingerprint() -> str:
    """Tells revisions of the grader's code apart."""
    here = Path(__file__).parent
    files = [*sorted(here.glob("*.py")), here.parent / "modes.py"]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


VERSION = _fingerprint()
