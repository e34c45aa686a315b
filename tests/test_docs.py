"""The documents say what is there: links, commands, flags, columns, and the numbers of README's table."""

import importlib.util
import re
import runpy
from functools import cache
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
README, CONTRIBUTING = ROOT / "README.md", ROOT / "CONTRIBUTING.md"
DOCS = [README, CONTRIBUTING, *sorted((ROOT / "docs").rglob("*.md"))]
# A preregistration stands as it was written, under the names of its day.
CURRENT = [d for d in DOCS if d.name != "hypotheses.md"]


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(path: Path) -> set[str]:
    """What GitHub makes of a page's headings."""
    heads = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text(path), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", h).lower()).replace(" ", "-") for h in heads}


@pytest.mark.parametrize("page", DOCS, ids=name)
def test_relative_links_resolve(page: Path) -> None:
    found = re.findall(r"\]\(([^)\s]+)\)", text(page)) + re.findall(r'(?:src|href)="([^"]+)"', text(page))
    for link in found:
        if re.match(r"[a-z]+:", link):
            continue
        target, _, fragment = link.partition("#")
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{name(page)}: {link}: no such file"
        if fragment and file.suffix == ".md":
            assert fragment in anchors(file), f"{name(page)}: {link}: {name(file)} has no such heading"


@pytest.mark.parametrize("page", CURRENT, ids=name)
def test_every_command_can_be_run(page: Path) -> None:
    for module in sorted(set(re.findall(r"python -m ((?:vgrout|benchmarks)(?:\.[a-z]\w*)*)", text(page)))):
        spec = importlib.util.find_spec(module)
        assert spec is not None, f"{name(page)}: python -m {module}: no such module"
        if spec.submodule_search_locations is not None:
            assert importlib.util.find_spec(f"{module}.__main__"), f"{name(page)}: {module} has no __main__"
        else:
            assert "__main__" in Path(spec.origin or "").read_text(encoding="utf-8"), module


@cache
def fields_and_parameters() -> set[str]:
    """Every annotated name of the sources, spelt as a flag: some entry's command line is made of them."""
    found = (re.findall(r"\b([a-z]\w*): ", text(p)) for p in (ROOT / "src").rglob("*.py"))
    return {"--" + name.replace("_", "-") for names in found for name in names}


def code_spans(page: Path) -> list[str]:
    """Inline code, and the lines of fenced shell blocks."""
    fenced = re.findall(r"```sh\n(.*?)```", text(page), re.DOTALL)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text(page), flags=re.DOTALL))
    return [*inline, *(line for block in fenced for line in block.splitlines())]


@pytest.mark.parametrize("page", [README, ROOT / "docs" / "guide.md", ROOT / "docs" / "method.md"], ids=name)
def test_every_flag_exists(page: Path) -> None:
    known = {*text(ROOT / "tests" / "flags.txt").split(), "--help", "--help-all", "--method"}
    for span in code_spans(page):
        if span.startswith(("uv sync", "tensorboard ", "wandb ", "trackio ", "inspect ")):  # other programs' flags
            continue
        for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", span):
            named = {flag, flag.replace("--no-", "--")}
            assert named & (known | fields_and_parameters()), f"{name(page)}: {span!r}: no entry has {flag}"


@pytest.mark.parametrize("page", runpy.run_path(str(ROOT / "docs" / "reference.py"))["PAGES"])
def test_generated_pages_are_current(page: str) -> None:
    make = runpy.run_path(str(ROOT / "docs" / "reference.py"))
    assert text(ROOT / "docs" / page) == make["HEAD"] + make["PAGES"][page](), "run: uv run python docs/reference.py"


def figures() -> SimpleNamespace:
    """What docs/figures/make.py defines, without running it."""
    return SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "figures" / "make.py")))


def test_the_numbers_of_readme_are_means_of_recorded_runs() -> None:
    make = figures()
    axes, older, earlier = make.read("axes"), make.read("arms-baselines"), make.read("containment")
    shown = [*make.read("containment-start"), *make.read("containment-probe")]
    routing = make.read("containment-routing")
    block = (
        "gate_modules=apart gate_vote=rollout quarantine=block:3 rebaseline=True rollout_ablate_frac=1.0 "
        "vhack_refresh_every=0"
    )

    def rates(n: int, *runs: Any) -> str:
        found = make.of(*runs)
        assert len(found) == n, len(found)
        return f"{mean(r.hack for r in found):.1f} / {mean(r.solve for r in found):.1f}"

    def contained(n: int, arm: str, *settings: str, control: str = "none", shown: Any = shown) -> str:
        """Of the runs from policies that hack: on the flaws that are not known."""
        names = ("monitor=", "quarantine_start=", "probe_diet=", "seed_monitor=")
        found = [
            r
            for r in shown
            if (r.arm, r.control) == (arm, control) and {s for s in r.settings if s.startswith(names)} == {*settings}
        ]
        assert len(found) == n, len(found)
        return f"{mean(map(make.unknown, found)):.1f} / {mean(r.solve for r in found):.1f}"

    pmi, labels = "monitor=pmi", "monitor=labels"
    reads = ("monitor=quarantine", "seed_monitor=labels")
    expected = {
        "`none` |": [
            rates(10, axes, "none"),
            rates(10, axes, "none", "no_loophole"),
            contained(10, "none"),
            contained(10, "none", control="no_loophole"),
        ],
        "`erase` |": [rates(5, older, "erase")],
        "`route` |": [
            *(rates(10, axes, "route", c) for c in ("none", "no_loophole")),
            contained(10, "route", shown=earlier),
        ],
        "`route2` |": [
            *(rates(10, axes, "route2", c) for c in ("none", "no_loophole")),
            contained(20, "route2", labels, shown=routing),
        ],
        "`--method route2-block` |": [rates(10, axes, "route2", c, block) for c in ("none", "no_loophole")],
        "`screen --monitor pmi` |": [
            *(rates(10, axes, "screen", c, pmi) for c in ("none", "no_loophole")),
            contained(10, "screen", pmi, shown=earlier),
        ],
        "`screen`, labels |": [
            *(rates(10, axes, "screen", c, labels) for c in ("none", "no_loophole")),
            contained(20, "screen", labels, shown=routing),
        ],
        "`penalty --monitor twin` |": [contained(10, "penalty", "monitor=twin", shown=make.read("containment-twin"))],
        "`penalty`, labels |": [
            *(rates(10, axes, "penalty", c, labels) for c in ("none", "no_loophole")),
            contained(60, "penalty", labels),
        ],
        "`penalty`, quarantine |": [contained(60, "penalty", *reads)],
        "`--quarantine-start pairs` |": [contained(59, "penalty", *reads, "quarantine_start=pairs")],  # one collapsed
        "`penalty`, linear probe |": [contained(60, "penalty", "monitor=online_probe", "seed_monitor=labels")],
    }
    lines = text(README).splitlines()
    for row, numbers in expected.items():
        line = next((x for x in lines if row in x), None)
        assert line, f"README.md: no line with {row!r}"
        for number in numbers:
            assert number in line, f"README.md: {row} should say {number}: {line}"


def test_readme_is_short_and_has_the_lines_that_ci_runs() -> None:
    lines = text(README).splitlines()
    assert len(lines) <= 150
    for marker in ("main", "test"):
        start = lines.index(f"<!-- {marker} -->")
        assert lines[start + 1] == "```sh"
        assert lines[start + 2].startswith("pip install uv && uv run "), lines[start + 2]
        assert lines[start + 3] == "```"
