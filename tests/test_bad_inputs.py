"""Bad input at every entry: refused in one line on stderr, exit code 2, nothing left behind.

Each entry is called in this process with every bad value that its flags invite; `-s` prints how many there were.
"""

import contextlib
import importlib
import inspect
import io
import itertools
import json
import shutil
import sys

import pytest

FILES = {
    "empty": b"",
    "binary": bytes(range(256)) * 8,
    "latin1": '{"id": 1, "prompt": "\xe9"}'.encode("latin-1"),
    "list": b"[1, 2, 3]",
    "truncated": b'{"id": 1, "prompt": [',
    "number": b"7\n8\n",
    "deep": b"[" * 20000,
}
ENTRIES = (
    *("train", "sweep", "report", "direction", "teacher"),
    *("distill", "iterative_dpo", "grade", "export", "evaluate"),
)
NUMBERS = ("-1", "nan", "1e400", "x", "", "0x10")


def names(folder):
    """Paths that no entry accepts."""
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    (folder / "folder").mkdir()
    (folder / "run").mkdir()
    (folder / "run" / "run.json").write_text("{}")
    (folder / "half").mkdir()
    (folder / "half" / "run.json").write_text(
        json.dumps({"config": {"preset": "mini"}, "hashes": {}})
    )
    return {name: str(folder / name) for name in (*FILES, "folder", "run", "half", "nowhere")}


def cases(at):
    """(module, arguments)"""
    out = at["nowhere"] + "/out"
    for module in ENTRIES:
        yield module, ["--no-such-flag"]
        yield module, ["--seed", "x", "--no-such-flag=1"]
    for number, name in itertools.product(
        NUMBERS,
        (
            "steps",
            "lr",
            "group",
            "seed",
            "max-new",
            "beta",
            "grad-clip",
            "final-samples",
            "threads",
        ),
    ):
        yield "train", ["smoke", f"--{name}={number}"]
    for value, name in itertools.product(
        ("x", "", "Route2"), ("intervention", "control", "loss", "env-mode", "guard")
    ):
        yield "train", ["smoke", f"--{name}={value}"]
    for path in at.values():
        yield "train", ["full", "--model", at["folder"], "--problems", path, "--env-mode", "own"]
        yield "train", ["smoke", "--resume", path]
        yield "train", ["mini", "--intervention", "erase", "--vhack-pairs-path", path]
        yield "train", ["mini", "--intervention", "erase", "--v-hack-path", path]
        yield "train", ["mini", "--organism", path]
        yield "sweep", [path]
        yield "report", [path]
        yield "export", [path, "--out", out]
        yield "export", [path, "--out", out, "--to", "peft", "--rank", "0"]
        yield "export", [path, "--out", out, "--to", "inspect"]
        yield "evaluate", [path]
        yield "grade", [path, "--problems", path, "--out", at["nowhere"] + ".jsonl"]
        yield "report", ["--judge", path]
        yield "distill", ["--teacher", path, "--student", "organism"]
        yield "iterative_dpo", ["--base-model", path, "--output-dir", out]
    for words in ("--track x", "--track ,x", "--out-tag a/b", "--mix-ratio 1"):
        yield "train", ["smoke", "--dry-run", *words.split()]


def outcome(module, argv):
    """Exit code and text on stderr; a traceback is an outcome too."""
    stderr = io.StringIO()
    package = importlib.import_module(f"vgrout.{module}")
    entry = (
        package.main
        if hasattr(package, "main")
        else importlib.import_module(f"vgrout.{module}.__main__").main
    )
    with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(io.StringIO()):
        sys.argv = [module, *argv]  # some entries take no argument
        try:
            code: object = entry(argv) if inspect.signature(entry).parameters else entry()
        except SystemExit as e:
            code = e.code
        except BaseException as e:
            code = f"{type(e).__name__}: {e}"
    return code, stderr.getvalue()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_bad_input_is_refused_in_one_line(tmp_path, monkeypatch):
    (inputs := tmp_path / "inputs").mkdir()
    at = names(inputs)
    (work := tmp_path / "work").mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setattr(sys, "argv", sys.argv)
    failed, tried = [], 0
    for module, argv in cases(at):
        code, message = outcome(module, argv)
        tried += 1
        lines = [line for line in message.splitlines() if line]
        if code != 2 or len(lines) != 1 or not lines[0].startswith("E "):
            shown = " ".join(a.replace(str(inputs), "IN") or "''" for a in argv)
            failed.append(
                f"{module} {shown} -> {code}: {len(lines)} lines: {' / '.join(lines)[:200]}"
            )
        left = [
            p
            for p in (*work.rglob("*"), *inputs.glob("nowhere*"))
            if p.is_file() or p.parent == inputs
        ]
        if left:
            failed.append(
                f"{module} {' '.join(argv)}: left {', '.join(str(p.relative_to(tmp_path)) for p in left)}"
            )
            shutil.rmtree(at["nowhere"], ignore_errors=True)
            for path in left:
                path.unlink(missing_ok=True)
    print(f"{tried} bad inputs, {len(failed)} not refused as they should be")
    assert not failed, "\n".join(failed)
    assert tried >= 200
