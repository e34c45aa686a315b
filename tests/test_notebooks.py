"""A run in a Jupyter notebook, and the notebooks of examples/."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from tqdm import tqdm

import vgrout
from files import loaded
from notebooks import NOTEBOOKS, code_cells
from runs import SMALL
from vgrout.ground import console
from vgrout.runs.recorder import Recorder

LIMIT = 150_000  # bytes of a stored notebook


class ZMQInteractiveShell:
    """Named as the shell of a Jupyter kernel."""

    config: dict[str, dict[str, str]] = {"IPKernelApp": {}}  # noqa: RUF012 as a kernel has it


class OfColab(ZMQInteractiveShell):
    pass


class TerminalInteractiveShell:
    pass


@pytest.fixture
def within(monkeypatch):
    """Call it with a shell: this process is then within that shell."""

    def enter(shell):
        ipython = SimpleNamespace(get_ipython=lambda: shell)
        monkeypatch.setitem(sys.modules, "IPython", ipython)

    return enter


@pytest.mark.parametrize(
    ("shell", "found"),
    [
        (ZMQInteractiveShell(), True),
        (OfColab(), True),
        (TerminalInteractiveShell(), False),
        (None, False),
    ],
    ids=["Jupyter", "Colab", "terminal", "library alone"],
)
def test_a_notebook_is_known_by_its_shell(shell, found, within):
    within(shell)
    assert (console.notebook_bars() is not None) is found


def test_ipython_is_not_imported_to_ask_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert console.notebook_bars() is None
    assert "IPython" not in sys.modules


@pytest.mark.long
def test_a_bar_is_in_place_of_the_rows(within, tmp_path, monkeypatch, capsys, shared_run):
    monkeypatch.chdir(shared_run.warm(tmp_path))
    flags = {"intervention": "none", "threads": 1}
    for name, value in zip(SMALL[::2], SMALL[1::2], strict=True):
        flags[name.removeprefix("--").replace("-", "_")] = int(value)
    flags["steps"] = 2
    within(ZMQInteractiveShell())

    run = vgrout.train_run("smoke", **flags)
    printed = capsys.readouterr()
    last = run.steps.iloc[-1]
    shares = f"hack {100 * last['hack_s']:.1f} %, solve {100 * last['solve_s']:.1f} %"
    bars = [line for line in printed.out.splitlines() if " steps |" in line]
    assert "2 of 2 steps" in bars[-1]
    assert shares in bars[-1]
    assert "seconds" not in printed.out  # the last of the columns
    for line in ("as trained ", "deployed ", "verdict: "):
        assert f"\n{line}" in printed.out
    assert printed.err == ""

    vgrout.train_run("smoke", **flags, quiet=True)
    assert capsys.readouterr() == ("", "")

    def fails(*_):
        raise ZeroDivisionError

    # a bar that outlived its run would be drawn again below every later line
    monkeypatch.setattr(Recorder, "keep", fails)
    with pytest.raises(vgrout.RunFailed):
        vgrout.train_run("smoke", **flags)
    assert "0 of 2 steps" in capsys.readouterr().out  # checkpoints are asked for in every step
    tqdm.write("later", file=sys.stdout)
    assert capsys.readouterr().out == "later\n"


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_stored_notebook_is_small_and_as_it_was_run(notebook):
    assert notebook.stat().st_size < LIMIT
    cells = loaded(notebook)["cells"]
    counts = [cell["execution_count"] for cell in cells if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))
    outputs = [out for cell in cells for out in cell.get("outputs", [])]
    assert any("image/png" in out.get("data", {}) for out in outputs)
    for out in outputs:
        assert out["output_type"] != "error"
        assert out.get("name") != "stderr"
    # no path of the machine where it was run
    assert "site-packages" not in json.dumps(outputs)


PLAIN = "import json, sys\nnames = {}\nfor cell in json.load(sys.stdin):\n    exec(cell, names)\n"


@pytest.mark.long
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_cells_run_in_a_plain_process(notebook, tmp_path, shared_run):
    done = subprocess.run(
        [sys.executable, "-c", PLAIN],
        input=json.dumps(code_cells(notebook)),
        cwd=shared_run.warm(tmp_path),
        # a notebook's backend, which is not installed here
        env=os.environ | {"MPLBACKEND": "module://absent.backend"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "verdict: " in done.stdout
    assert len(list(tmp_path.glob("out/runs/*/dynamics.png"))) == 2
