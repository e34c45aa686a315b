"""A program in the sandbox is an interpreter's program: what `python -I` has and does, an answer's child has and does
too, but for what is listed here and in docs/grading.md."""

import json
import os
import resource
import subprocess
import sys
from contextlib import suppress

import pytest

from vgrout.envs.code.grading.isolation import MAX_FILES
from vgrout.envs.code.grading.messages import WorkerSettings
from vgrout.envs.code.grading.watch import ForkServerHandle

from .test_secrets import run_one

MEMORY_MB = 512
LEVELS = ["", "namespaces"]


@pytest.fixture(scope="module", params=LEVELS, ids=["level 3", "level 2"])
def server(request, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("work"))
    settings = WorkerSettings(folder, 1.0, MEMORY_MB, 1 << 20, request.param)
    handle = ForkServerHandle(settings).start()
    yield handle
    handle.close()


def by_interpreter(code, folder):
    """What `python -I -u` prints of a script, under the limits of a child."""

    def limit():
        for which, value in (("AS", MEMORY_MB << 20), ("FSIZE", 1 << 20), ("NOFILE", MAX_FILES)):
            resource.setrlimit(getattr(resource, f"RLIMIT_{which}"), (value, value))
        hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
        resource.setrlimit(resource.RLIMIT_STACK, (64 << 20, hard))

    (folder / "script.py").write_text(code)
    (folder / "cwd").mkdir()
    done = subprocess.run(
        [sys.executable, "-I", "-u", "-X", "utf8", "../script.py"],
        cwd=folder / "cwd", stdin=subprocess.DEVNULL, capture_output=True, text=True, preexec_fn=limit,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


ATTRIBUTES = """
def attributes():
    import builtins, io, os, resource, select, shutil, sys, tempfile
    found = []
    for module in (sys, builtins, os, resource, tempfile, shutil, io, select):
        for name in dir(module):
            found.append(f"{module.__name__}.{name}: {type(getattr(module, name)).__name__}")
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        for part in (stream, stream.buffer):
            found += [f"{name}, {type(part).__name__}.{a}" for a in dir(part)]
        found.append(f"{name} {stream.name} {stream.mode} {stream.encoding} {stream.closed} {stream.isatty()}")
        found.append(f"{name} {stream.fileno()} {stream.readable()} {stream.writable()}")
    found.append(f"{len(sys.argv)} {bool(sys.argv[0])}")
    return found
"""
# A virtual environment's; functions of Python's in place of the interpreter's own.
DIFFERENT = ("sys._home", "sys.exit", "resource.getrusage")


def test_its_modules_have_what_an_interpreters_have(server, tmp_path):
    script = f"{ATTRIBUTES}\nimport json\nprint(json.dumps(attributes()))"
    real = json.loads(by_interpreter(script, tmp_path))
    code = f"(exec({ATTRIBUTES!r}, globals()), attributes())[1]"
    ours = eval(run_one(server, code))
    lost = [line for line in real if line not in ours and not line.startswith(DIFFERENT)]
    assert lost == [], "\n".join(lost)


WORKS = {
    "the template of fast input": "import os, sys\nfile = sys.stdin\n"
    "x = 'x' in file.mode or 'r' not in file.mode\nassert not x and file.name == '<stdin>'\n"
    "assert sys.stdout.mode == sys.stderr.mode == 'w' and sys.stdout.name == '<stdout>'",
    "names of an interactive session": "assert callable(help) and repr(license) and repr(copyright) and repr(credits)",
    "its own name": "import os, sys\nassert os.path.basename(sys.argv[0])",
    "the head of a deep recursion": "import resource, sys\nsys.setrecursionlimit(10**6)\n"
    "resource.setrlimit(resource.RLIMIT_STACK, (1 << 28, resource.getrlimit(resource.RLIMIT_STACK)[1]))\n"
    "def deep(n): return n and 1 + deep(n - 1)\nassert deep(10_000) == 10_000",
    "an unlimited stack": "import resource\nhard = resource.getrlimit(resource.RLIMIT_STACK)[1]\n"
    "resource.setrlimit(resource.RLIMIT_STACK, (hard, hard))",
    "a lower limit": "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
    "assert resource.getrlimit(resource.RLIMIT_NOFILE) == (64, 64)",
    "the same limit": "import resource\nfor which in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_DATA):\n"
    "    resource.setrlimit(which, resource.getrlimit(which))",
    "how much it has used": "import resource\nsum(range(10**6))\n"
    "used = resource.getrusage(resource.RUSAGE_SELF)\nassert used.ru_utime >= 0 and len(used) == 16",
    "the user's locale": "import locale\nlocale.setlocale(locale.LC_ALL, '')",
    "folders": "import os\nos.makedirs('a/b/c')\nopen('a/b/c/x', 'w').write('1')\nassert os.listdir('a/b') == ['c']\n"
    "os.rename('a/b/c/x', 'a/x')\nos.rmdir('a/b/c')\nassert open('a/x').read() == '1'",
    "a temporary folder": "import os, tempfile\nwith tempfile.TemporaryDirectory(dir='.') as d:\n"
    "    open(os.path.join(d, 'x'), 'w').write('1')\nassert not os.path.exists(d)",
    "a temporary folder where they usually are": "import os, tempfile\nwith tempfile.TemporaryDirectory() as d:\n"
    "    open(os.path.join(d, 'x'), 'w').write('1')\nassert not os.path.exists(d)",
    "another working directory": "import os\nhere = os.getcwd()\nos.chdir('.')\nos.mkdir('d')\nos.chdir('d')\n"
    "assert os.getcwd() == here + '/d'\nopen('x', 'w').write('1')\nos.chdir('..')\nassert os.path.exists('d/x')",
    "modes": "import os\nopen('x', 'w').close()\nos.chmod('x', 0o644)\nos.utime('x')",
    "copies": "import shutil\nopen('x', 'w').write('1')\nshutil.copy('x', 'y')\nshutil.copy2('x', 'z')\n"
    "shutil.copyfile('x', 'w')\nassert open('y').read() == open('z').read() == open('w').read() == '1'",
    "a tree that is copied, moved and removed": "import os, shutil\nos.makedirs('a/b')\nopen('a/b/x', 'w').write('1')\n"
    "shutil.copytree('a', 'c')\nshutil.move('c', 'd')\nshutil.rmtree('a')\nassert open('d/b/x').read() == '1'",
    "a link": "import os\nopen('x', 'w').write('1')\nos.symlink('x', 'y')\nassert open(os.readlink('y')).read() == '1'",
    "locks": "import fcntl\nwith open('x', 'w') as f:\n    fcntl.flock(f, fcntl.LOCK_EX)\n"
    "    fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
    "    fcntl.flock(f, fcntl.LOCK_UN)",
    "a database in a file": "import sqlite3\nfor i in (1, 2):\n    with sqlite3.connect('x.db') as db:\n"
    "        db.execute('create table if not exists t (a)')\n        db.execute('insert into t values (?)', (i,))\n"
    "    db.close()\n"
    "assert sqlite3.connect('x.db').execute('select sum(a) from t').fetchall() == [(3,)]",
    "a shelf": "import shelve\nwith shelve.open('x') as s: s['a'] = [1]\n"
    "with shelve.open('x') as s: assert s['a'] == [1]",
    "select": "import select, sys\nassert select.select([sys.stdin], [], [], 0) == ([sys.stdin], [], [])\n"
    "p = select.poll()\np.register(0)\nassert p.poll(0)",
    "a selector": "import selectors\nassert selectors.DefaultSelector().select(0) == []",
    "a file in memory": "import mmap\nwith open('x', 'w+b') as f:\n    f.write(b'ab')\n    f.flush()\n"
    "    m = mmap.mmap(f.fileno(), 0)\n    m[0:1] = b'c'\n    m.flush()\n    m.close()\n"
    "assert open('x').read() == 'cb'",
    "the template of fast output": "import os, sys\nfrom io import BytesIO, IOBase\nclass Fast(IOBase):\n"
    "    def __init__(self, file):\n        self.writable = 'x' in file.mode or 'r' not in file.mode\n"
    "        self.left = os.fstat(file.fileno()).st_size\n"
    "assert Fast(sys.stdout).writable and not Fast(sys.stdin).writable",
    "paths": "import pathlib\np = pathlib.Path('a/b')\np.mkdir(parents=True)\n(p / 'x').write_text('1')\n"
    "(p / 'x').rename(p / 'y')\nassert [*p.iterdir()] == [p / 'y']",
    "help on something": "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as o: help(len)\n"
    "assert 'len' in o.getvalue()",
    "a zip of a folder": "import os, shutil\nos.mkdir('a')\nopen('a/x', 'w').write('1')\n"
    "shutil.make_archive('b', 'zip', 'a')\n"
    "shutil.unpack_archive('b.zip', 'c')\nassert open('c/x').read() == '1'",
}  # fmt: skip
# Accepted by an interpreter, and refused here: each reaches beyond the answer's own folder.
REFUSED = {
    "a pipe": "import os\nos.pipe()",
    "a socket": "import socket\nsocket.socketpair()",
    "a process": "import os\nos.fork()",
    "a thread": "import threading\nthreading.Thread(target=print).start()",
    "a hard link": "import os\nopen('x', 'w').close()\nos.link('x', 'y')",
    "a named pipe": "import os\nos.mkfifo('x')",
    "a priority": "import os\nos.getpriority(os.PRIO_PROCESS, 0)",
    "another's limits": "import os, resource\nresource.prlimit(os.getppid() or 1, resource.RLIMIT_NOFILE)",
    "space on the machine": "import os\nos.statvfs('.')",
    "groups of processes": "import os\nos.getpgid(0)",
}


@pytest.mark.parametrize("name", WORKS)
def test_what_reaches_nothing_but_the_answers_own_folder_works(server, tmp_path, name):
    by_interpreter(WORKS[name], tmp_path)
    assert run_one(server, f"exec({WORKS[name]!r}, {{}})") == "None"


@pytest.mark.parametrize("name", REFUSED)
def test_what_reaches_further_is_refused(server, name):
    assert run_one(server, f"exec({REFUSED[name]!r}, {{}})") in (
        "PermissionError",
        "RuntimeError",
        "OSError",
    )


def test_no_file_of_this_machine_gets_another_mode_time_or_lock(server, tmp_path):
    """Also where only landlock bounds a child: it says nothing of these."""
    secret = tmp_path / "x"
    secret.write_text("1")
    os.chmod(tmp_path, 0o755)
    os.chmod(secret, 0o666)
    before = os.stat(secret)
    for call in (
        "chmod(X, 0)",
        "utime(X, (1, 1))",
        "mkdir(X + 'd')",
        "symlink('x', X + 'l')",
        "rename('y', X)",
    ):
        run_one(server, f"(open('y', 'w').close(), os.{call.replace('X', repr(str(secret)))})")
    after = os.stat(secret)
    assert (before.st_mode, before.st_mtime_ns, before.st_ino) == (
        after.st_mode,
        after.st_mtime_ns,
        after.st_ino,
    )
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize(
    "body",
    [
        "[os.makedirs(f'{i}/a') for i in range(400)]",
        "[(os.mkdir('d'), os.chdir('d')) for _ in range(5000)]",
        "(os.mkdir('d'), [open(f'd/{i}', 'w').close() for i in range(3000)], os.umask(0o777), os.mkdir('e'))",
    ],
)
def test_folders_are_counted_and_swept(server, body):
    """However many there are, and however deep: the next answer finds nothing of them."""
    with suppress(IndexError):  # it is ended, at level 2
        run_one(server, f"({body}, [0 for _ in range(10_000_000)])")
    assert run_one(server, "os.listdir('.')") == "[]"
