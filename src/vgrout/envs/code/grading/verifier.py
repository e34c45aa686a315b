"""The verifier: one process per worker that knows the expected values and never runs an answer.

It stands between the trainer and its fork server: it grades one rollout after another (`verdict`), and watches each
child's clock and messages (`watch`). The kernel limits its memory and its CPU time per grading, and it dies with the
trainer. It is a separate process because a session of a dozen short messages would wait for the trainer's interpreter
lock at each one.
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
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from vgrout.envs.code.grading import messages
from vgrout.envs.code.grading.isolation import cap_limit, die_with_parent
from vgrout.envs.code.grading.messages import WorkerSettings
from vgrout.envs.code.grading.probe import FATAL
from vgrout.envs.code.grading.verdict import Verifier
from vgrout.envs.code.grading.watch import ForkServerHandle, ForkServerLost, remove_empty
from vgrout.files import restore_inherited

# what the verifier itself may use: CPU for one rollout, address space
TRUSTED_CPU_S, TRUSTED_MEMORY = 20, 4 << 30


def probe(fork_server: ForkServerHandle) -> dict[str, bool]:
    """Attack a throw-away child's sandbox from inside. True: the attack succeeded."""
    found: dict[str, bool] = {}
    settings = fork_server.settings
    libc = ctypes.CDLL(None)
    name = f"vgrout-{os.getpid()}-{secrets.token_hex(4)}"
    with (
        tempfile.NamedTemporaryFile(prefix="vgrout-probe-") as secret,
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX) as local,
    ):
        os.fchmod(secret.fileno(), 0o644)
        secret.write(b"secret")
        secret.flush()
        address = f"\0{name}" if sys.platform == "linux" else os.path.join(settings.workdir, name)
        local.bind(address)
        local.listen()
        udp.bind(("127.0.0.1", 0))
        shm_key = 1 + secrets.randbelow(1 << 30)
        segment = libc.shmget(shm_key, 4096, 0o1666) if sys.platform == "linux" else -1
        job = {
            "kind": "probe",
            "secret": secret.name,
            "port": tcp.getsockname()[1],
            "udp_port": udp.getsockname()[1],
            "shm_key": shm_key,
            "abstract": address,
            "memory": (settings.memory_mb << 20) + (64 << 20),
            "file": settings.output_bytes + 1,
        }
        for first in (True, False):
            fork_server.run(job | {"first": first}, 2.0, found.update)
        if segment != -1:
            libc.shmctl(segment, 0, None)  # IPC_RMID
        if found.get("send over UDP"):
            found["send over UDP"] = bool(select.select([udp], [], [], 0.2)[0])
    if not found:
        raise ForkServerLost("no answer from the probe")
    return found


def main(trainer_fd: int, *settings_values: Any) -> None:
    """Entry of the exec'd process: hello, then one reply a request, until the trainer closes its end."""
    restore_inherited(messages.RESTORED)
    trainer = socket.socket(fileno=trainer_fd)
    settings = WorkerSettings(*settings_values)
    # From the end: the fork server ends, and the folder goes. The trainer removes it too, unless
    # killed, which may be before its workers are up. Its end is seen twice, as end of input and as
    # SIGTERM some microseconds later: an exception from the handler must not break off what the
    # first has begun, so the stack unwinds with the signal off.
    with ExitStack() as ends:
        ends.callback(remove_empty, settings.workdir)
        try:
            signal.signal(signal.SIGTERM, _leave)
            die_with_parent(signal.SIGTERM)
            cap_limit(resource.RLIMIT_AS, TRUSTED_MEMORY)
            with suppress(BrokenPipeError, ConnectionResetError):
                _greet_and_serve(trainer, settings, ends)
        finally:
            signal.signal(signal.SIGTERM, _stay)


def _greet_and_serve(trainer: socket.socket, settings: WorkerSettings, ends: ExitStack) -> None:
    def send(message: dict[str, Any]) -> None:
        messages.send(trainer, json.dumps(message).encode())

    fork_server = ForkServerHandle(settings)
    ends.callback(fork_server.close)
    fork_server.start()
    breaches = [name for name, succeeded in probe(fork_server).items() if succeeded]
    weak = any(name in FATAL for name in breaches)
    have = {"landlock", "seccomp"} <= set(fork_server.active)
    level = 0 if weak else 3 if have and "namespaces" in fork_server.active else 2 if have else 1
    send(
        {
            "level": level,
            "active": fork_server.active,
            "missing": fork_server.missing,
            "breaches": breaches,
            "as_root": os.getuid() == 0 and "uid" not in fork_server.active,
            "version": VERSION,
        }
    )
    _serve(trainer, Verifier(fork_server), send)


def _leave(*_: object) -> None:
    """Exit through the stack that removes the folder; each of the trainer's threads sends this signal as it dies."""
    signal.signal(signal.SIGTERM, _stay)
    sys.exit(0)


def _stay(*_: object) -> None:
    """Do nothing. Not SIG_IGN: for a signal that came a moment before it, Python prints a traceback."""


def _serve(
    trainer: socket.socket, verifier: Verifier, send: Callable[[dict[str, Any]], None]
) -> None:
    while (request := messages.receive(trainer)) is not None:
        signal.setitimer(signal.ITIMER_PROF, TRUSTED_CPU_S)  # its signal ends this process
        try:
            send({"grade": verifier.grade(json.loads(request))})
        except ValueError as e:
            send({"fault": str(e)})
        except ForkServerLost as e:
            send({"lost": str(e)})
            break


def _fingerprint() -> str:
    here = Path(__file__).parent
    files = [*sorted(here.glob("*.py")), here.parent / "modes.py"]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


VERSION = _fingerprint()
