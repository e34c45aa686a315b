"""Imports point down by folder, and light modules stay light."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from vgrout.__main__ import COMMANDS
from vgrout.__main__ import main as command

ROOT = Path(__file__).resolve().parents[1] / "src" / "vgrout"

# The package's rooms, from the top down: a room is a file or a folder beside train.py, and imports from its own floor
# and from lower ones. In a folder any file may import any other, as long as they do not go round.
FLOORS = [
    {"__main__"},
    {"api"},
    {"commands"},
    {"scorecard"},
    {"sweep", "imitation", "export"},
    {"train"},
    {"runs"},
    {"report"},
    {"teacher"},
    {"loop"},
    {"envs"},
    {"method"},
    {"guard", "direction"},
    {"model"},
    {"config"},
    {"ground"},
]
FLOOR = {room: i for i, rooms in enumerate(FLOORS) for room in rooms}
# What keeps the whole in a head. Take an import away before you raise one.
MOST_ARROWS, MOST_PAIRS = 90, 855
STDLIB_ONLY = (
    "vgrout.ground.io",
    "vgrout.ground.records",
    "vgrout.ground.data",
    "vgrout.ground.table",
    "vgrout.guard.kill_switch",
    "vgrout.guard.detectors",
    "vgrout.envs.code.grading.check",
    "vgrout.envs.code.grading.child",
    "vgrout.envs.code.grading.grade",
    "organisms.language.corpus",
    "organisms.language.problems",
    "organisms",
    "vgrout.report.rules",
)
# commands that refuse a wrong flag, or do their work, without torch
WITHOUT_TORCH = (
    "train",
    "sweep.__main__",
    "scorecard.__main__",
    "report.__main__",
    "export.__main__",
    "api",
    "direction.__main__",
    "teacher.__main__",
    "teacher.substrate",
    "commands.check",
    "commands.distill",
    "commands.doctor",
    "commands.download",
    "commands.evaluate",
    "commands.iterative_dpo",
)


def modules():
    return [
        (".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"), path)
        for path in sorted(ROOT.rglob("*.py"))
        if path != ROOT / "__init__.py"
    ]


def room(module):
    return module.split(".")[0]


@cache
def imports(path):
    """The modules of this package that a file imports, wherever in it, but for one that is a command's entry alone."""
    found = set()
    tree = ast.parse(path.read_text())
    tree.body = [
        node
        for node in tree.body
        if not (isinstance(node, ast.If) and "__main__" in ast.unparse(node.test))
    ]
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.split(".")[0] == "vgrout"
        ):
            base = node.module.removeprefix("vgrout").lstrip(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}".lstrip(".")
                place = ROOT / inner.replace(".", "/")
                found.add(
                    inner
                    if place.with_suffix(".py").exists() or (place / "__init__.py").exists()
                    else base
                )
        elif isinstance(node, ast.Import):
            found |= {
                a.name.removeprefix("vgrout.") for a in node.names if a.name.startswith("vgrout.")
            }
    return found - {""}


def pairs():
    """Two modules, of which the first imports the second."""
    return {
        (module, other) for module, path in modules() for other in imports(path) if other != module
    }


def test_every_room_has_a_floor():
    assert {room(module) for module, _ in modules()} == FLOOR.keys()


def test_imports_point_down():
    up = [
        f"{module} imports {other}"
        for module, other in sorted(pairs())
        if FLOOR[room(module)] > FLOOR[room(other)]
    ]
    assert not up


def test_few_arrows_and_pairs():
    arrows = {(room(a), room(b)) for a, b in pairs() if room(a) != room(b)}
    assert len(arrows) <= MOST_ARROWS, f"{len(arrows)} arrows between {len(FLOOR)} rooms"
    assert len(pairs()) <= MOST_PAIRS, f"{len(pairs())} pairs of modules"


def test_nobody_outside_envs_names_a_world():
    """The trainer, the methods, the guard and the reports know `envs.base`, and the rest by name (`envs.worlds`)."""
    worlds = ("envs.code", "envs.text", "envs.sums", "envs.verifiers")
    named = [
        f"{module} imports {other}"
        for module, other in sorted(pairs())
        if room(module) != "envs" and other.startswith(worlds)
    ]
    assert not named


def test_no_two_files_import_each_other():
    """There is an order inside a folder, too."""
    graph = {module: {o for o in imports(path) if o != module} for module, path in modules()}
    done = set()

    def visit(module, above):
        assert module not in above, " → ".join((*above[above.index(module) :], module))
        if module not in done:
            for other in graph.get(module, ()):
                visit(other, (*above, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def loaded_by(modules, heavy):
    """What of `heavy` an interpreter has loaded that imports all of these modules."""
    code = f"import sys, {', '.join(modules)}; print(sorted(set(sys.modules) & {heavy!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


def test_light_modules_load_nothing_heavy():
    assert loaded_by(STDLIB_ONLY, {"torch", "numpy", "transformers", "tyro"}) == "[]"


def test_a_wrong_flag_is_refused_without_torch():
    modules = [f"vgrout.{name}" for name in WITHOUT_TORCH]
    assert loaded_by(modules, {"torch", "transformers"}) == "[]"


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_does_something(name, monkeypatch):
    """`vgrout NAME --help` runs the command's module, which ends by its exit code."""
    monkeypatch.setattr(sys, "argv", ["vgrout", name, "--help"])
    with pytest.raises(SystemExit) as ended:
        command(None)
    assert not ended.value.code


def test_a_class_of_ones_own_imports_no_torch():
    """Its file is imported for a plan too, which takes a second without."""
    of_a_monitor = "from vgrout.method.base import Intervention, Monitor, flags_of, rewarded"
    code = f"import sys; {of_a_monitor}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
