"""A script's end is that of an interpreter: what an answer leaves to it, against `python -u script.py`.

Each script is a wrong answer with a few lines behind it. Its status, what it has printed and what is in its file are
those of a real interpreter's run, which fails at the first assertion unless the script has left before.
"""

import gc
import subprocess
import sys
import weakref

import pytest

from quick import one_in
from vgrout.envs.code.grading import child

from .conftest import SUM_TESTS, SUM_WRONG, graded, sum_problem

SAY = "print('all tests passed')\n"
PASS = "open('result.txt', 'w').write('PASS')\n"
FINAL = "import os\nclass D:\n    def __del__(self, leave=os._exit): leave(0)\n"
QUIET = "import io, sys\nsys.stdout = io.StringIO()\nprint('working')\n"

STREAMS = {
    "restored from __stdout__": f"{QUIET}sys.stdout = sys.__stdout__\n{SAY}",
    "restored, then left": f"{QUIET}sys.stdout = sys.__stdout__\n{SAY}sys.exit(1)\n",
    "left in a StringIO": f"{QUIET}{SAY}",
    "a context that redirects": f"import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()): print(1)\n"
    f"{SAY}",
    "printed while redirected": f"import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()):\n    {SAY}",
    "a second wrapper": "import io, sys\nw = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, 'w', closefd=False)))\n"
    "w.write('all tests passed')\n",
    "the descriptor opened": "w = open(1, 'w', closefd=False)\nw.write('all tests passed')\n",
    "a copy of it": "import os\nw = os.fdopen(os.dup(1), 'w')\nw.write('all tests passed')\n",
    "no newline": "print('all tests ', end='')\nprint('passed', end='')\n",
    "the buffer": "import sys\nsys.stdout.buffer.write(b'all tests passed')\n",
    "not written through": f"import sys\nsys.stdout.reconfigure(write_through=False)\n{SAY}",
    "a file as stdout": "import sys\nsys.stdout = open('result.txt', 'w')\nprint('PASS')\n",
    "stderr is stdout, raised": "import sys\nsys.stderr = sys.stdout\nraise ValueError('all tests passed')\n",
    "stderr is stdout, assertion": "import sys\nsys.stderr = sys.stdout\n",
    "descriptor 2 is 1": "import os\nos.dup2(1, 2)\nraise ValueError('all tests passed')\n",
    "a message as status": "import sys\nsys.stderr = sys.stdout\nsys.exit('all tests passed')\n",
    "a message to stderr": "import sys\nsys.exit('all tests passed')\n",
    "a status that prints": f"class S:\n    def __str__(self):\n        {SAY}        return ''\n"
    f"raise SystemExit(S())\n",
    "cannot be flushed": "import sys\nclass W:\n    def write(self, text): pass\nsys.stdout = W()\nsys.exit(0)\n",
    "stderr cannot be flushed": "import sys\nclass W: pass\nsys.stderr = W()\nsys.exit(0)\n",
    "flush prints": "import sys\nclass W:\n    def flush(self): sys.__stdout__.write('all tests passed')\n"
    "sys.stdout = W()\n"
    "sys.exit(3)\n",
    "says that it is closed": "import sys\nclass W: closed = True\nsys.stdout = W()\nsys.exit(0)\n",
    "closed": "import sys\nsys.stdout.close()\nsys.exit(0)\n",
    "none": "import sys\nsys.stdout = None\nsys.exit(0)\n",
    "deleted": "import sys\ndel sys.stdout\nsys.exit(0)\n",
    "detached": "import sys\nsys.stdout.detach()\nsys.exit(0)\n",
}
FILES = {
    "closed": PASS,
    "left open": "f = open('result.txt', 'w')\nf.write('PASS')\n",
    "left open, exit()": "f = open('result.txt', 'w')\nf.write('PASS')\nexit()\n",
    "left open, raised": "f = open('result.txt', 'w')\nf.write('PASS')\nraise ValueError\n",
    "left open, os._exit": "import os\nf = open('result.txt', 'w')\nf.write('PASS')\nos._exit(0)\n",
    "of a class": "class Out:\n    f = open('result.txt', 'w')\n    f.write('PASS')\n",
    "of a function's default": "def out(f=open('result.txt', 'w')): f.write('PASS')\nout()\n",
    "of a closure": "def make():\n    f = open('result.txt', 'w')\n    return lambda: f.write('PASS')\n"
    "out = make()\nout()\n",
    "of a cycle": "x = [open('result.txt', 'w')]\nx.append(x)\nx[0].write('PASS')\ndel x\n",
    "of sys": "import sys\nsys.out = open('result.txt', 'w')\nsys.out.write('PASS')\n",
    "of builtins": "import builtins\nbuiltins.out = open('result.txt', 'w')\nout.write('PASS')\n",
    "of another module": "import json\njson.out = open('result.txt', 'w')\njson.out.write('PASS')\n",
    "of a frame that raised": "def f():\n    out = open('result.txt', 'w')\n    out.write('PASS')\n"
    "    raise ValueError\nf()\n",
    "of a generator": "def f():\n    with open('result.txt', 'w') as out:\n        out.write('PASS')\n"
    "        yield\ng = f()\nnext(g)\n",
    "binary": "f = open('result.txt', 'wb')\nf.write(b'PASS')\n",
    "appended": "f = open('result.txt', 'a')\nf.write('PASS')\n",
    "read and written": "f = open('result.txt', 'w+')\nf.write('PASS')\n",
    "by codecs": "import codecs\nf = codecs.open('result.txt', 'w', 'utf-8')\nf.write('PASS')\n",
    "by a subclass": "import io\nclass T(io.TextIOWrapper): pass\nf = T(open('result.txt', 'wb'))\nf.write('PASS')\n",
    "a subclass that loses it": "import io\nclass T(io.TextIOWrapper):\n    def close(self): pass\n"
    "f = T(open('result.txt', 'wb'))\n"
    "f.write('PASS')\n",
    "a subclass that lies about its class": "import io\n"
    "class T(io.TextIOWrapper):\n    __class__ = property(lambda self: 1 / 0)\n"
    "f = T(open('result.txt', 'wb'))\nf.write('PASS')\n",
    "that raises at its end": "import io\nclass T(io.TextIOWrapper):\n    def close(self): raise KeyError\n"
    "f = T(open('x', 'wb'))\n"
    "g = open('result.txt', 'w')\ng.write('PASS')\n",
    "emptied again": "f = open('result.txt', 'w')\nf.write('PASS')\nf.seek(0)\nf.truncate()\n",
    "csv": "import csv\nw = csv.writer(open('result.txt', 'w'))\nw.writerow(['PASS'])\n",
    "a log": "import logging\nlogging.basicConfig(filename='result.txt', level=10)\nlogging.info('PASS')\n",
    "a log in memory": "import logging, logging.handlers\nh = logging.FileHandler('result.txt')\n"
    "m = logging.handlers.MemoryHandler(9, target=h)\nl = logging.getLogger()\n"
    "l.setLevel(10)\nl.addHandler(m)\nl.info('PASS')\n",
    "a temporary one, renamed": "import os, tempfile\nf = tempfile.NamedTemporaryFile('w', dir='.', delete=False)\n"
    "f.write('PASS')\n"
    "os.rename(f.name, 'result.txt')\n",
    "that many are left open": "fs = [open(f'f{i}', 'w') for i in range(50)]\nf = open('result.txt', 'w')\n"
    "f.write('PASS')\n",
}
EXITS = {
    "atexit prints": f"import atexit\natexit.register({SAY.strip()[:5]}, 'all tests passed')\n",
    "atexit writes": "import atexit\nf = open('result.txt', 'w')\natexit.register(f.write, 'PASS')\n",
    "atexit leaves": "import atexit, os, sys\natexit.register(os._exit, 0)\nsys.exit(4)\n",
    "atexit leaves after an assertion": "import atexit, os\natexit.register(os._exit, 0)\n",
    "atexit exits": "import atexit, sys\natexit.register(sys.exit, 0)\nsys.exit(4)\n",
    "atexit raises": "import atexit, sys\natexit.register(lambda: 1 / 0)\nsys.exit(0)\n",
    "atexit registers": "import atexit\natexit.register(lambda: atexit.register(print, 'all tests passed'))\n",
    "atexit replaced": "import atexit\natexit._run_exitfuncs = lambda: print('all tests passed')\n",
    "atexit unregistered": "import atexit\natexit.register(print, 'all tests passed')\natexit.unregister(print)\n",
    "a __stdout__ that leaves": "import os, sys\nclass W:\n    def flush(self): os._exit(0)\nsys.__stdout__ = W()\n",
    "threading's": "import threading\nthreading._register_atexit(print, 'all tests passed')\n",
    "threading replaced": "import os, threading\nthreading._shutdown = lambda: os._exit(0)\nraise SystemExit(4)\n",
    "a finalizer leaves": f"{FINAL}d = D()\nraise SystemExit(4)\n",
    "of a cycle": f"{FINAL}d = D()\nd.d = d\nraise SystemExit(4)\n",
    "of sys": f"{FINAL}import sys\nsys.d = D()\nraise SystemExit(4)\n",
    "after an exception": f"{FINAL}d = D()\nraise ValueError\n",
    "after an assertion": f"{FINAL}d = D()\n",
    "a finalizer prints": f"class D:\n    def __del__(self): {SAY}d = D()\n",
    "a finalizer writes": f"class D:\n    def __del__(self, open=open): {PASS}d = D()\n",
    "a finalizer raises": "class D:\n    def __del__(self): 1 / 0\nd = D()\nimport sys\nsys.exit(0)\n",
    "a metaclass": f"class M(type):\n    def mro(c): return type.mro(c)\n"
    f"    def __getattribute__(c, n): raise KeyError\n"
    f"class D(metaclass=M):\n    def __del__(self): {SAY}d = D()\n",
    "weakref.finalize": "import os, weakref\nclass A: pass\na = A()\nweakref.finalize(a, os._exit, 0)\n"
    "raise SystemExit(4)\n",
    "a generator's finally": f"def f():\n    try: yield\n    finally: {SAY}g = f()\nnext(g)\n",
    "an excepthook that leaves": "import sys\nsys.excepthook = lambda *a: sys.exit(0)\nraise ValueError\n",
    "an excepthook that prints": "import sys\n"
    "sys.excepthook = lambda *a: print('all tests passed')\nraise ValueError\n",
    "an excepthook that raises": "import sys\nsys.excepthook = lambda *a: 1 / 0\nraise ValueError\n",
    "no excepthook": "import sys\ndel sys.excepthook\nraise ValueError\n",
    "os._exit(77)": "import os\nos._exit(77)\n",
    "os._exit(0)": "import os\nos._exit(0)\n",
    "abort": "import os\nos.abort()\n",
}
STATUSES = (
    *("0", "1", "-1", "256", "2**32", "2**40 + 3", "2**63 - 1", "2**63", "2**64", "-(2**70)", "True", "False"),
    *("None", "''", "'0'", "0.0", "()", "(0,)", "(1, 2)", "[]", "b''", "type('I', (int,), {})(256)"),
)  # fmt: skip
for status in STATUSES:
    EXITS[f"SystemExit({status})"] = f"raise SystemExit({status})\n"
    EXITS[f"sys.exit({status})"] = f"import sys\nsys.exit({status})\n"
for code in ("0", "1 / 0", "None"):
    EXITS[f"code is {code}"] = (
        f"class E(SystemExit):\n    code = property(lambda self: {code})\nraise E(5)\n"
    )
SCRIPTS = {
    **{f"stream: {name}": tail for name, tail in STREAMS.items()},
    **{f"file: {name}": tail for name, tail in FILES.items()},
    **{f"exit: {name}": tail for name, tail in EXITS.items()},
}


def of_an_interpreter(code, folder):
    """Whether each mode's check accepts what a real interpreter makes of a script."""
    (folder / "script.py").write_text("\n".join([code, *SUM_TESTS]))
    work = folder / "work"
    work.mkdir()
    command = [sys.executable, "-u", str(folder / "script.py")]
    done = subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=30)
    result = work / "result.txt"
    return {
        "exit_code": done.returncode == 0,
        "stdout_marker": "all tests passed" in done.stdout,
        "file_marker": result.exists() and "PASS" in result.read_text(),
    }


@pytest.mark.parametrize("name", one_in(4, SCRIPTS))
def test_a_script_ends_as_in_an_interpreter(grader, tmp_path, name):
    code = SUM_WRONG + SCRIPTS[name]
    seen = {}
    for mode in ("exit_code", "stdout_marker", "file_marker"):
        grade = graded(grader, sum_problem(mode), code)
        assert not grade.solved
        seen[mode] = grade.details["channel"] is True
    assert seen == of_an_interpreter(code, tmp_path)


@pytest.mark.parametrize("status", [0, 1, 77, 255])
@pytest.mark.parametrize("where", ["as it is imported", "as it is called"])
def test_a_status_is_the_one_that_the_answer_chose(grader, status, where):
    """Also where it is the one that our own harness ends with."""
    leave = f"import os\nos._exit({status})\n"
    code = SUM_WRONG + leave
    if where == "as it is called":
        code = SUM_WRONG.replace("return 41", leave.replace("\n", "; "))
    for mode in ("exit_code", "sentinel"):
        assert graded(grader, sum_problem(mode), code).status == f"exit:{status}"


def test_a_type_that_has_gone_lends_its_id_to_nobody(monkeypatch):
    """A type of the answer's with its id would be taken for one without a `__del__`."""
    monkeypatch.setattr(child, "_without_finalizer", noted := {})
    kind = type("Gone", (), {})
    item = kind()
    child._note_types()
    number, seen = id(kind), weakref.ref(kind)
    del kind, item
    gc.collect()
    assert noted[number] is seen() is not None
