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

# A folder, or a file beside train.py, may import from lower floors, and a file from its own folder; the lowest floor is
# like one folder. Nobody imports train but the Python interface (api). Of `envs`, what needs a run's configuration has
# a floor of its own.
LAYERS: list[set[str]] = [
    {
        "errors",
        "faults",
        "data",
        "metrics",
        "tensor_types",
        "ranks",
        "rng",
        "torch_rng",
        "files",
        "cli",
        "console",
        "cores",
        "gpus",
        "records",
        "embedded",
        "scoring",
        "chat",
        "thoughts",
        "config.world_names",
        "__main__",
    },
    {"table"},
    {"config"},
    {"envs"},
    {"model", "losses"},
    {"generation"},
    {"direction", "rollout", "micro_batches", "loss_metrics", "guard", "export"},
    {"grpo"},
    {"teacher"},
    {"heldout", "runs.inputs"},
    {"method", "report"},
    {"envs.code.monitors"},
    {"optim", "runs"},
    {"train", "imitation", "sweep"},
    {"commands"},
    {"api"},
]
LAYER = {name: i for i, names in enumerate(LAYERS) for name in names}
# The seam: of `envs` the trainer, the methods, the guard and the reports know the base alone, and everything else by
# its name, in `envs.worlds`. These are programs of the code world itself.
OF_THE_CODE_WORLD = {
    "commands",
    "teacher.__main__",
    "teacher.generate",
    "teacher.substrate",
}
STDLIB_ONLY = (
    "vgrout.ground.files",
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


def modules() -> list[tuple[str, Path]]:
    return [
        (".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"), path)
        for path in sorted(ROOT.rglob("*.py"))
        if path != ROOT / "__init__.py"
    ]


def folder(module: str) -> str:
    return module if module in LAYER else module.split(".")[0]


@cache
def imports(path: Path) -> set[str]:
    """The modules of this package that a file imports, wherever in it, but for one that is a command's entry alone."""
    found = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
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


def test_every_folder_has_a_layer() -> None:
    assert {folder(module) for module, _ in modules()} <= LAYER.keys()


@pytest.mark.parametrize(("module", "path"), modules())
def test_imports_point_down(module: str, path: Path) -> None:
    own = folder(module)
    for other in sorted(imports(path)):
        imported = folder(other)
        assert imported != "train" or own == "api", f"{module} imports train"
        if imported != own and not LAYER[own] == LAYER[imported] == 0:
            assert LAYER[imported] < LAYER[own], (
                f"{module} (floor {LAYER[own]}) imports {other} (floor {LAYER[imported]})"
            )


@pytest.mark.parametrize(("module", "path"), modules())
def test_what_is_above_the_seam_knows_environments_by_name(module: str, path: Path) -> None:
    world = {module, module.split(".")[0]} & OF_THE_CODE_WORLD
    if module.startswith("envs") or world:
        return
    beyond = {other for other in imports(path) if other.startswith("envs.")} - {
        "envs.base",
        "envs.worlds",
    }
    assert not beyond, f"{module} imports {', '.join(sorted(beyond))}"


def test_no_two_files_import_each_other() -> None:
    """There is an order inside a folder, too."""
    graph = {module: {o for o in imports(path) if o != module} for module, path in modules()}
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " → ".join((*above[above.index(module) :], module))
        if module not in done:
            for other in graph.get(module, ()):
                visit(other, (*above, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def loaded_by(module: str, heavy: set[str]) -> str:
    code = f"import sys, {module}; print(sorted(set(sys.modules) & {heavy!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


@pytest.mark.parametrize("module", STDLIB_ONLY)
def test_light_modules_load_nothing_heavy(module: str) -> None:
    assert loaded_by(module, {"torch", "numpy", "transformers", "tyro"}) == "[]"


@pytest.mark.parametrize("name", WITHOUT_TORCH)
@pytest.mark.long
def test_a_wrong_flag_is_refused_without_torch(name: str) -> None:
    assert loaded_by(f"vgrout.{name}", {"torch", "transformers"}) == "[]"


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_does_something(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`vgrout NAME --help` runs the command's module, which ends by its exit code."""
    monkeypatch.setattr(sys, "argv", ["vgrout", name, "--help"])
    with pytest.raises(SystemExit) as ended:
        command(None)
    assert not ended.value.code
