"""Imports point one way, and what must stay light does."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1] / "src" / "vgrout"

# Each room may import rooms of lower levels only; a package counts as one room. Entry modules stand on top.
LEVELS: list[set[str]] = [
    # nouns, streams, pure functions, data
    {"nouns", "rng", "loss_config", "signals", "console", "sampling", "packing", "gate", "pairs_leetcode"}
    | {"guard", "detectors", "budgets", "hub", "spelling", "cli"},
    {"flow", "grading", "step_row", "losses", "logprobs", "files"},
    # what reads and writes files, what moves weights
    {"organism.language", "organism", "pairs", "run_dir", "project", "decoder", "imitation"},
    {"config", "problems", "svd_adapter", "checkpoint", "pool", "memory", "launch"},
    {"plan", "policy", "optim", "source"},
    {"sampler", "saved", "mixture", "learner", "common_config"},
    {"grpo", "direction", "evaluate", "latents", "harvest", "distill_config", "dpo_config"},
    {"arm", "reader"},
    {"arms", "streams", "baselines", "measure", "teacher", "substrate", "distill_methods"},
    {"narrate", "nonfinite", "watch"},
    # the algorithm, and what surrounds it
    {"loop", "distilling", "dpo_rounds"},
    {"tail"},
    {"study"},
    {"analysis"},
    {"train", "sweep", "report", "distill", "iterative_dpo", "grade", "doctor", "export", "download", "replay"}
    | {"guardcheck", "probe_mixed"},
    {"bench"},
]
LEVEL = {room: i for i, rooms in enumerate(LEVELS) for room in rooms}
STDLIB_ONLY = (
    "vgrout.files",
    "vgrout.nouns",
    "vgrout.guard",
    "vgrout.detectors",
    "vgrout.grading.grade",
    "vgrout.organism.language",
    "vgrout.organism",
)


def modules() -> list[tuple[str, Path]]:
    return [
        (".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"), path)
        for path in sorted(ROOT.rglob("*.py"))
        if path != ROOT / "__init__.py"
    ]


def room(module: str) -> str:
    return module if module in LEVEL else module.split(".")[0]


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vgrout":
            base = node.module.removeprefix("vgrout").lstrip(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}".lstrip(".")
                is_module = (ROOT / inner.replace(".", "/")).with_suffix(".py").exists()
                found.add(inner if is_module else base)
        elif isinstance(node, ast.Import):
            found |= {a.name.removeprefix("vgrout.") for a in node.names if a.name.startswith("vgrout.")}
    return found - {""}


@pytest.mark.parametrize(("module", "path"), modules())
def test_imports_point_down(module: str, path: Path) -> None:
    if module.startswith("organism.") and module != "organism.language":
        pytest.skip("organism/ stands beside the river: its builder may use any room below the loop")
    mine = room(module)
    assert mine in LEVEL, f"{module}: no level; give the room a place in LEVELS"
    for other in sorted(imports(path)):
        theirs = room(other)
        assert theirs == mine or LEVEL[theirs] < LEVEL[mine], f"{module} (level {LEVEL[mine]}) imports {other}"


def test_no_cycle_hides_in_a_package() -> None:
    """The organism's builder imports the river, never the other way round, its paths and language apart."""
    for module, path in modules():
        if not module.startswith("organism"):
            for other in imports(path):
                assert not other.startswith("organism.") or other == "organism.language", f"{module} imports {other}"


@pytest.mark.parametrize("module", STDLIB_ONLY)
def test_light_rooms_load_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(sorted(set(sys.modules) & {{'torch', 'numpy', 'transformers', 'tyro'}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]", f"{module} loads {done.stdout}"


def test_a_wrong_flag_is_refused_without_torch() -> None:
    code = "import sys, vgrout.train; print('torch' in sys.modules or 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"
