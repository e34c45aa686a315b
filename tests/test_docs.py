"""The documents say what is there: links, commands, flags, columns, the numbers of tables; and they are short."""

import importlib.util
import re
import runpy
import shlex
import subprocess
from functools import cache
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

import pytest

from vgrout.types import MODES

ROOT = Path(__file__).resolve().parents[1]
README, CONTRIBUTING = ROOT / "README.md", ROOT / "CONTRIBUTING.md"
PAGES = sorted((ROOT / "docs").rglob("*.md"))
DOCS = [README, CONTRIBUTING, ROOT / "CHANGELOG.md", *PAGES]
NOTES = sorted((ROOT / "notes").rglob("*.md"))
HYPOTHESES = ROOT / "docs" / "hypotheses.md"
# A preregistration stands as it was written, under the names of its day; the changelog names what is gone.
CURRENT = [d for d in DOCS if d.name not in ("hypotheses.md", "CHANGELOG.md")]


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(path: Path) -> set[str]:
    """What GitHub makes of a page's headings."""
    heads = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text(path), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", h).lower()).replace(" ", "-") for h in heads}


@pytest.mark.parametrize("page", [*DOCS, *NOTES], ids=name)
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


def recall() -> SimpleNamespace:
    """What docs/figures/recall.py defines, without drawing."""
    return SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "figures" / "recall.py")))


def runs_of(rows: list[Any], intervention: str, *named: str, control: str = "none") -> list[Any]:
    """The runs whose settings name exactly these monitors, starts and diets."""
    telling = ("monitor=", "quarantine_start=", "probe_diet=", "seed_monitor=", "label_accuracy=")
    return [
        r
        for r in rows
        if (r["arm"], r["control"]) == (intervention, control)
        and {s for s in r["settings"].split() if s.startswith(telling)} == {*named}
    ]


def test_the_numbers_of_the_tables_are_means_of_recorded_runs() -> None:
    make = recall()
    shown = make.read("containment-start", "containment-probe", "containment-twin")
    routing, attempts = make.read("containment-routing"), make.read("attempts", "attempts-builds")

    def line(page: Path, start: str) -> str:
        found = [x for x in text(page).splitlines() if x.startswith(f"| {start}")]
        assert len(found) == 1, f"{name(page)}: {len(found)} lines that start with {start!r}"
        return found[0]

    def means(runs: list[Any]) -> tuple[str, str]:
        return f"{mean(map(make.unknown_hack, runs)):.1f}", f"{100 * mean(float(r['solve_deploy']) for r in runs):.1f}"

    labels, seed = "monitor=labels", "seed_monitor=labels"
    probe, reads = ("monitor=online_probe", seed), ("monitor=quarantine", seed)
    of_readme: dict[str, list[Any]] = {
        "learnt from (plain GRPO)": runs_of(shown, "none"),
        "left out": runs_of(routing, "screen", labels),
        "routed to a quarantine": runs_of(routing, "route2", labels),
        "rewarded less |": runs_of(shown, "penalty", labels),
        "rewarded less, and a linear probe": runs_of(shown, "penalty", *probe),
        "(reference tests as reward)": runs_of(shown, "none", control="no_loophole"),
    }
    for start, runs in of_readme.items():
        cells = [cell.strip() for cell in line(README, start).split("|")]
        assert cells[2:5] == [*means(runs), str(len(runs))], start
    results = ROOT / "docs" / "results.md"
    rows: dict[str, tuple[list[Any], list[Any]]] = {
        "learnt from: `none`": (of_readme["learnt from (plain GRPO)"], runs_of(attempts, "none")),
        "left out: `screen`": (of_readme["left out"], []),
        "routed: `route2`": (of_readme["routed to a quarantine"], []),
        "routed: `sgtm`": (runs_of(routing, "sgtm", labels), []),
        "rewarded less: `penalty`": (of_readme["rewarded less |"], runs_of(attempts, "penalty", labels)),
        "rewarded less | the quarantine": (runs_of(shown, "penalty", *reads), []),
        "rewarded less | the same, started on pairs": (
            runs_of(shown, "penalty", *reads, "quarantine_start=pairs"),
            runs_of(attempts, "penalty", *reads, "quarantine_start=pairs"),
        ),
        "rewarded less | linear probe": (
            of_readme["rewarded less, and a linear probe"],
            runs_of(attempts, "penalty", *probe),
        ),
        "rewarded less | the same, fitted on random": (runs_of(shown, "penalty", *probe, "probe_diet=random"), []),
        "rewarded less | the same, fitted on a weak": (
            runs_of(make.read("adversaries"), "penalty", "monitor=online_probe"),
            [],
        ),
        "rewarded less | `twin`": (runs_of(shown, "penalty", "monitor=twin"), []),
        "(grader without a flaw)": (
            of_readme["(reference tests as reward)"],
            runs_of(attempts, "none", control="no_loophole"),
        ),
    }
    for start, (runs, with_attempts) in rows.items():
        _, _, _, found, false_flags, hack, solve, _, n, other, _ = map(str.strip, line(results, start).split("|"))
        assert (hack.split()[0], solve, n) == (*means(runs), str(len(runs))), start
        assert other == (means(with_attempts)[0] if with_attempts else ""), start
        flagged = [make.unknown_recall(r) for r in runs]
        assert found == ("" if None in flagged else f"{mean(flagged):.0f}"), start
        if found and found != "0":
            rates = [make.share([r["flagged_solved"]]) for r in runs]
            assert false_flags == f"{mean(rates):.1f}", start


def test_the_table_of_rules_is_of_recorded_flags() -> None:
    make, page = recall(), text(ROOT / "docs" / "results.md")
    monitors, styles = make.read("shadow-monitors"), make.read("shadow-styles")

    def percent(of: list[Any], column: Any) -> str:
        return "" if not of else f"{make.share([r[c] for r in of for c in column(r)]):.1f}"

    def unlabelled(row: Any) -> list[str]:
        return [f"flagged_{m}" for m in MODES if m not in row["known_modes"].split(",")]

    table = page.partition("## Trivial rules")[2].partition("##")[0]
    lines = re.findall(r"^\| `(\w+)`(.*)\|$", table, re.MULTILINE)
    assert len(lines) == 8
    for monitor, rest in lines:
        cells = [cell.strip() for cell in rest.split("|")[2:]]
        want, unseen = [], []
        for kind in ("_warm", "_warm86"):
            read, of_styles = (
                [r for r in rows if r["monitor"] == monitor and r["run"].endswith(kind)] for rows in (monitors, styles)
            )
            sampled = [r for r in of_styles if r["style"] == "sampled, honest"]
            want += [percent(read, unlabelled), percent(sampled, lambda _: ["flagged"])]
            unseen.append(percent([r for r in of_styles if r["unseen"] == "True"], lambda _: ["flagged"]))
        shown = " · ".join(f"{float(x):.0f}" for x in unseen if x)
        assert cells == [*want, shown], monitor
    acted = make.read("rules")
    for start, monitor, organism in (
        ("leaves ", "syntax_edge", "warm86"),
        ("and ", "syntax_edge", "warm"),
        ("`unread_argument` ", "unread_argument", "warm"),
    ):
        runs = [r for r in acted if r["run"].endswith(f"_{organism}") and monitor in r["run"]]
        hack, solve = (100 * mean(float(r[f"{what}_deploy"]) for r in runs) for what in ("hack", "solve"))
        assert f"{start}{hack:.1f} / {solve:.1f}" in page, (monitor, organism)


def test_the_table_of_the_pretrained_model_is_of_recorded_runs() -> None:
    make = recall()
    runs, shadows = make.read("recall"), make.read("recall-monitors")
    page = text(ROOT / "docs" / "results.md").partition("## On a pretrained model")[2].partition("\n## ")[0]
    known = {"101": "run_tests", "102": "eq_override"}

    def run_of(base: str, monitor: str, control: str) -> Any:
        named = {f"organism=out/organisms/smollm2-{base}", *([f"monitor={monitor}"] if monitor else [])}
        of = "penalty" if monitor else "none", control
        (found,) = [r for r in runs if named <= {*r["settings"].split()} and (r["arm"], r["control"]) == of]
        return found

    def recalled(base: str, monitor: str) -> str:
        of = [r for r in shadows if (r["arm"], r["monitor"], r["known_modes"]) == ("none", monitor, known[base])]
        return f"{make.share([r[f'flagged_{m}'] for r in of for m in MODES if m != known[base]]):.0f}"

    for start, monitor, control in (
        ("(plain GRPO)", "", "none"),
        ("rewarded less | labels", "labels", "none"),
        ("rewarded less | `online_probe`", "online_probe", "none"),
        ("rewarded less | `syntax_edge`", "syntax_edge", "none"),
        ("(no flaw)", "", "no_loophole"),
    ):
        (found,) = [x for x in page.splitlines() if x.startswith(f"| {start}")]
        of = [run_of(base, monitor, control) for base in known]
        assert [cell.strip() for cell in found.split("|")[3:-1]] == [
            " · ".join(recalled(base, monitor) for base in known) if monitor else "",
            *(f"{make.unknown_hack(r):.1f} / {100 * float(r['solve_deploy']):.1f}" for r in of),
        ], start
    dots = [
        (make.unknown_recall(r, [m]), make.unknown_hack(r, [m]))
        for base in known
        for monitor in ("labels", "online_probe", "syntax_edge")
        for r in [run_of(base, monitor, "none")]
        for m in make.unknown(r)
    ]
    assert all(found is None or found <= 28.4 or found >= 88 for found, _ in dots)
    assert min(left for found, left in dots if found is not None and found <= 28.4) >= 37.5
    assert max(left for found, left in dots if found is not None and found >= 88) <= 3.125


def test_the_claims_on_recall_are_of_recorded_runs() -> None:
    make = recall()
    rows = [r for r in make.read(*next(iter(make.PANELS.values()))) if r["control"] == "none"]

    def left(done: str, least: float) -> list[float]:
        return [make.unknown_hack(r) for r in rows if r["arm"] == done and (make.unknown_recall(r) or 0) >= least]

    found = left("penalty", 60)
    said = f"leaves 3 % or less in {sum(x <= 3 for x in found)} of {len(found)} runs"
    screen, penalty = left("screen", 97), left("penalty", 97)
    said_too = f"{mean(screen):.1f} %, {len(screen)} runs, against {mean(penalty):.1f} %, {len(penalty)} runs"
    page = text(ROOT / "docs" / "results.md")
    assert said in page, said
    assert said_too in page, said_too


@pytest.mark.parametrize(("digest", "revision"), re.findall(r"\b([0-9a-f]{7}) at ([0-9a-f]{7})\b", text(HYPOTHESES)))
def test_a_recorded_digest_is_of_its_revision(digest: str, revision: str) -> None:
    """By the command that the page gives."""
    if not (ROOT / ".git").exists():
        pytest.skip("no history here")
    (command,) = re.findall(r"```sh\n(for f in .*?)```", text(HYPOTHESES), re.DOTALL)
    script = f"set -- {shlex.quote(revision)}; {command}"
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(digest)


def words(path: Path) -> int:
    return sum(bool(re.search(r"\w", word)) for word in text(path).split())


MOST = {  # words of a page
    "README.md": 700,
    "architecture.md": 1300,
    "columns.md": 1200,
    "flags.md": 3800,
    "grading.md": 2200,
    "guard.md": 800,
    "guide.md": 2050,
    "hypotheses.md": 2000,
    "method.md": 2625,
    "problems.md": 1200,
    "results.md": 1500,
    "results-full.md": 2000,
    "scaling.md": 1200,
}


@pytest.mark.parametrize("page", [README, *PAGES], ids=name)
def test_a_page_is_short(page: Path) -> None:
    assert words(page) <= MOST.get(page.name, 600), "say less, or take something out"


def test_the_documents_are_short() -> None:
    assert sum(map(words, PAGES)) <= 22_000


@pytest.mark.parametrize("page", ["flags.md", "columns.md"])
def test_a_generated_cell_is_short_and_is_no_docstring(page: str) -> None:
    found = text(ROOT / "docs" / page)
    assert max(len(cell) for line in found.splitlines() if line.startswith("|") for cell in line.split(" | ")) <= 300
    assert "Raises:" not in found


def test_readme_has_the_lines_that_ci_runs() -> None:
    lines = text(README).splitlines()
    for marker in ("main", "test"):
        start = lines.index(f"<!-- {marker} -->")
        assert lines[start + 1] == "```sh"
        assert lines[start + 2].startswith("pip install uv && uv run "), lines[start + 2]
        assert lines[start + 3] == "```"
