"""Notebooks of examples/: their cells, and how they are run in a Jupyter kernel.

    uv run just notebooks

executes each of them and stores what its cells show.
"""

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from files import loaded

if TYPE_CHECKING:
    pass

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def code_cells(notebook):
    """The sources of its cells of code, in order."""
    cells = loaded(notebook)["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def executed(notebook, folder):
    """The notebook with what its cells show when a Jupyter kernel runs them in this folder.

    Raises nbclient's CellExecutionError where a cell raises.
    """
    import nbformat
    from nbclient import NotebookClient

    cells = nbformat.read(notebook, as_version=4)
    client = NotebookClient(
        cells,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,  # it would change the file each time
        coalesce_streams=True,  # the last of a progress bar's pictures
    )
    return client.execute()


def main():
    # as the program is called by most who read it
    os.environ["UV"] = "uv"
    import nbformat

    for notebook in NOTEBOOKS:
        with tempfile.TemporaryDirectory() as folder:
            shown = executed(notebook, Path(folder))
        # no version of whoever stored it
        shown.metadata = {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}
        }
        nbformat.write(shown, notebook)
        print(f"{notebook.name}: {notebook.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main()
