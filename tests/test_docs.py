"""The documents say what is there: links, commands, flags, columns, the numbers of tables."""

import csv
import importlib.util
import re
import runpy
import shlex
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest

from methods import batch
from runs import flags
from vgrout.__main__ import COMMANDS
from vgrout.config.presets import resolve
from vgrout.config.specs import MONITORS
from vgrout.envs.code.grading.messages import NOT_RUN
from vgrout.envs.code.modes import MODES
from vgrout.ground.data import Flags, Thought
from vgrout.ground.io import json_lines, numbered_lines
from vgrout.model.policy import LanguageModel
from vgrout.report import stats
from vgrout.runs.recorder import rollout_lines
from vgrout.sweep.study_file import load_study_file

ROOT = Path(__file__).resolve().parents[1]
README, CONTRIBUTING = ROOT / "README.md", ROOT / "CONTRIBUTING.md"
PAGES = sorted((ROOT / "docs").rglob("*.md"))
DOCS = [README, CONTRIBUTING, ROOT / "CHANGELOG.md", *PAGES]
NOTES = sorted((ROOT / "notes").rglob("*.md"))
CURRENT = [d for d in DOCS if d.name != "CHANGELOG.md"]  # which names what is gone


def text(path):
    return path.read_text()


def name(path):
    return str(path.relative_to(ROOT))


def docs(page):
    return ROOT / "docs" / f"{page}.md"


def anchors(path):
    """What GitHub makes of a page's headings."""
    heads = re.findall(
        r"^#+ (.+)$", re.sub(r"```.*?```", "", text(path), flags=re.DOTALL), re.MULTILINE
    )
    return {
        re.sub(r"[^\w\- ]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", h).lower()).replace(" ", "-")
        for h in heads
    }


@pytest.mark.parametrize("page", [*DOCS, *NOTES], ids=name)
def test_relative_links_resolve(page):
    found = re.findall(r"\]\(([^)\s]+)\)", text(page)) + re.findall(
        r'(?:src|href)="([^"]+)"', text(page)
    )
    for link in found:
        if re.match(r"[a-z]+:", link):
            continue
        target, _, fragment = link.partition("#")
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{name(page)}: {link}: no such file"
        if fragment and file.suffix == ".md":
            assert fragment in anchors(file), (
                f"{name(page)}: {link}: {name(file)} has no such heading"
            )


@pytest.mark.parametrize("page", CURRENT, ids=name)
def test_every_command_can_be_run(page):
    for module in sorted(
        set(re.findall(r"python -m ((?:vgrout|benchmarks)(?:\.[a-z]\w*)*)", text(page)))
    ):
        spec = importlib.util.find_spec(module)
        assert spec is not None, f"{name(page)}: python -m {module}: no such module"
        if spec.submodule_search_locations is not None:
            assert importlib.util.find_spec(f"{module}.__main__"), (
                f"{name(page)}: {module} has no __main__"
            )
        else:
            assert "__main__" in Path(spec.origin or "").read_text(), module
    named = {
        m[1] for span in code_spans(page) if (m := re.match(r"(?:uv run )?vgrout ([a-z_]+)", span))
    }
    assert named <= COMMANDS.keys(), f"{name(page)}: {named - COMMANDS.keys()}: no such command"


@cache
def fields_and_parameters():
    """Every annotated name of the sources, spelt as a flag: some entry's command line is made of them."""
    files = (file for folder in ("src", "organisms") for file in (ROOT / folder).rglob("*.py"))
    found = (re.findall(r"\b([a-z]\w*): ", text(p)) for p in files)
    return {"--" + name.replace("_", "-") for names in found for name in names}


def code_spans(page):
    """Inline code, and the lines of fenced shell blocks."""
    fenced = re.findall(r"```sh\n(.*?)```", text(page), re.DOTALL)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text(page), flags=re.DOTALL))
    return [*inline, *(line for block in fenced for line in block.splitlines())]


@pytest.mark.parametrize(
    "page", [README, *(p for p in PAGES if p.stem not in ("flags", "scaling"))], ids=name
)
def test_every_flag_exists(page):
    known = {*text(ROOT / "tests" / "flags.txt").split(), "--help", "--help-all"}
    for span in code_spans(page):
        # other programs' flags
        if span.startswith(
            (
                "uv sync",
                "uv run --project",
                "tensorboard ",
                "wandb ",
                "trackio ",
                "inspect ",
            )
        ):
            continue
        for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", span):
            named = {flag, flag.replace("--no-", "--")}
            assert named & (known | fields_and_parameters()), (
                f"{name(page)}: {span!r}: no entry has {flag}"
            )


@pytest.mark.parametrize("page", [README, *map(docs, ("guide", "tutorial", "problems"))], ids=name)
def test_every_command_line_of_train_is_one(page, monkeypatch, here):
    """As far as that is known without a file."""
    monkeypatch.syspath_prepend(here)
    for name, code in re.findall(
        r"`(\w+\.py)`[^\n]*:\n\n```python\n(.*?)```", text(page), re.DOTALL
    ):
        (here / name).write_text(code)
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    rows = [
        f"vgrout train mini {s}" for s in code_spans(page) if s.startswith("--organism out/warm ")
    ]
    spans = [s.partition("   #")[0].replace("\\", "") for s in code_spans(page)]
    lines = [
        *rows,
        *(s for s in spans if re.search(r"vgrout.train [a-z]+ --|vgrout train [a-z]+ --", s)),
    ]
    assert lines
    for line in lines:
        argv = shlex.split(re.split(r"vgrout.train ", line)[1])
        if not {"--resume", "--reward"} & {*argv}:
            with patch.dict(MONITORS):
                resolve([word for word in argv if word != "--dry-run"])


def test_the_tutorials_study_is_a_study():
    (block,) = re.findall(r"```toml\n(.*?)```", text(docs("tutorial")), re.DOTALL)
    file = ROOT / "studies" / "tutorial.toml"
    assert block == text(file)
    assert len(load_study_file(file).runs) == 6


def test_the_models_that_fit_are_those_of_the_plan():
    assert runpy.run_path(str(ROOT / "docs" / "fits.py"))["table"]() in text(docs("scaling"))


REFERENCE = runpy.run_path(str(ROOT / "docs" / "reference.py"))


@pytest.mark.parametrize("page", REFERENCE["PAGES"])
def test_generated_pages_are_current(page):
    made = REFERENCE["HEAD"] + REFERENCE["PAGES"][page]()
    assert text(ROOT / "docs" / page) == made, "run: uv run python docs/reference.py"


@pytest.mark.long
def test_the_keys_that_the_documents_name_otherwise_are_in_a_runs_files(
    shared_run,
):
    path = shared_run(*flags("none"))
    for name, keys in REFERENCE["KEYS"].items():
        there = set(next(json_lines(path / name)))
        for theirs, here in keys.items():
            assert {here, f"{here}_k"} & there, f"{name}: {here}"
            assert theirs not in there or theirs == "hacked"


def test_every_key_of_rollouts_is_explained():
    """Those that a line of rollouts.jsonl has, as the trainer writes it, and those of the sandbox's verdict."""
    of = batch()
    flagged = Flags((True, False, False, False))
    groups = []
    for group in of.groups:
        rollouts = tuple(replace(r, thought=Thought(r.text[:1], 1)) for r in group.rollouts)
        groups.append(replace(group, rollouts=rollouts, flags=flagged, shadows={"short": flagged}))
    written = set()
    for line in rollout_lines(replace(of, groups=tuple(groups)), Mock(spec=LanguageModel)):
        written |= line.keys()
    sandbox = NOT_RUN.keys() - {"solved"} | {"marker", "reward_score"}
    everywhere, programs = REFERENCE["ROLLOUT_KEYS"].keys(), REFERENCE["CODE_KEYS"].keys()
    assert written == everywhere | {"marker"}
    assert sandbox == programs


def read(*names):
    """The recorded runs of docs/runs/NAME.csv."""
    rows = []
    for file in names:
        rows += csv.DictReader(text(ROOT / "docs" / "runs" / f"{file}.csv").splitlines())
    return rows


def share(counts):
    """A share over all counts "k/n", in percent."""
    found = [count.split("/") for count in counts if count]
    return 100 * sum(int(k) for k, _ in found) / sum(int(n) for _, n in found)


def unknown_hack(run):
    """The hack rate of the deployed model by the flaws that the monitor has no labels of, %."""
    rates = {m: run.get(f"hack_deploy_{m}") for m in MODES if m != known_flaw(run)}
    return mean(100 * float(rate) for rate in rates.values() if rate)


def runs_of(rows, intervention, *named, control="none"):
    """The runs whose settings name exactly these monitors, starts and diets."""
    telling = ("monitor=", "quarantine_start=", "probe_diet=", "seed_monitor=", "label_accuracy=")
    return [
        r
        for r in rows
        if (r["arm"], r["control"]) == (intervention, control)
        and {s for s in r["settings"].split() if s.startswith(telling)} == {*named}
    ]


def known_flaw(run):
    """The flaw whose hacks the monitor of a recorded run has labels of; "": of none."""
    found = re.search(r"known_modes=(\w+)", run["settings"])
    return found.group(1) if found else ""


def test_the_older_claims_on_policies_that_hack_are_means_of_recorded_runs():
    start, routing, probe = (read(f"containment-{n}") for n in ("start", "routing", "probe"))
    attempts = read("attempts", "attempts-builds")
    page = text(docs("results")).partition("## Policies that hack already")[2].partition("\n## ")[0]
    labels, fitted = "monitor=labels", ("monitor=online_probe", "seed_monitor=labels")

    def means(runs):
        solve = 100 * mean(float(r["solve_deploy"]) for r in runs)
        return f"{mean(map(unknown_hack, runs)):.1f}", f"{solve:.1f}", str(len(runs))

    rows = {
        "learnt from: `none`": runs_of(start, "none"),
        "left out: `screen`": runs_of(routing, "screen", labels),
        "routed: `route2`": runs_of(routing, "route2", labels),
        "rewarded less: `penalty` | labels": runs_of(start, "penalty", labels),
        "rewarded less: `penalty` | linear probe": runs_of(probe, "penalty", *fitted),
        "(grader without a flaw)": runs_of(start, "none", control="no_loophole"),
    }
    for row, runs in rows.items():
        (found,) = [x for x in page.splitlines() if x.startswith(f"| {row}")]
        hack, solve, n = (cell.split()[0] for cell in found.split("|")[3:6])
        assert (hack, solve, n) == means(runs), row
    leaves = [means(runs_of(attempts, "penalty", *by))[0] for by in (fitted, (labels,))]
    plain = means(runs_of(attempts, "none"))[0]
    ceiling = means(runs_of(attempts, "none", control="no_loophole"))[0]
    assert "leaves {} % of unknown hacks, by labels of one flaw {}".format(*leaves) in page
    assert f"plain GRPO {plain}, the ceiling {ceiling}" in page


def test_the_numbers_with_demonstrations_are_of_recorded_runs():
    page = text(docs("results"))
    toy, small = read("axes", "arms-baselines"), read("pretrained")
    best = "vhack_refresh_every=0 gate_vote=rollout gate_modules=apart rollout_ablate_frac=1.0 quarantine=block:3"

    def means(rows, arm, control="none", settings=""):
        of = [r for r in rows if (r["arm"], r["control"], bare(r)) == (arm, control, settings)]
        hack, solve = (
            f"{100 * mean(float(r[f'{what}_deploy']) for r in of):.1f}"
            for what in ("hack", "solve")
        )
        return hack, solve, str(len(of))

    axes = [
        r
        for r in toy
        if "organism=" not in r["settings"] and not r["run"].startswith("20261121T21")
    ]
    rows = {
        "`none`": means(axes, "none"),
        "`none`, nothing demonstrated (five seeds)": means(toy, "none", settings="mix_ratio=0.0"),
        "`route2`": means(axes, "route2", settings=f"{best} rebaseline=True"),
        "`screen`, labels of all flaws": means(read("axes"), "screen", settings="monitor=labels"),
        "`penalty`, labels of all flaws": means(read("axes"), "penalty", settings="monitor=labels"),
    }
    table = page.partition("## With demonstrations")[2].partition("\n## ")[0]
    for name, (hack, solve, _) in rows.items():
        (line,) = [x for x in table.splitlines() if x.startswith(f"| {name} |")]
        shown = [cell.split()[0] for cell in line.split(" | ")[1:3]]
        assert shown == [hack, solve], name
    _, ceiling, _ = means(axes, "none", "no_loophole")
    assert f"| {ceiling} [80.4, 84.6], the ceiling |" in table
    hack, solve, runs = means(axes, "route2", "haar", f"{best} rebaseline=True")
    assert (f"ends at {hack} / {solve} (three seeds)" in table, runs) == (True, "3")

    readme = text(README)
    usual, sums = "pairs by each flaw", read("sums")
    for world, of, settings in (("programs", small, usual), ("sums", sums, "")):
        plain, routed = means(of, "none"), means(of, "route2", settings=settings)
        assert (plain[2], routed[2]) == ("6", "6")
        said = f"{routed[0]} / {routed[1]} beside {plain[0]} / {plain[1]} on {world}"
        assert said in readme, world
    hack, solve, _ = means(sums, "screen", settings="monitor=source")
    assert f"({hack} / {solve})" in readme
    hack, solve, _ = means(toy, "none", settings="mix_ratio=0.0")
    assert f"it ends at {hack} % hack, {solve} % solve" in readme


ABSORBING = "rollout_ablate_frac=0.5 quarantine=shared"
IN_DOCUMENTS = (
    "gate_vote=module gate_modules=all rollout_ablate_frac=0.0 quarantine=shared rebaseline=False"
)
LABELS_ALONE = "monitor=labels mix_ratio=0.0"
PRETRAINED = {  # as results.md names it → intervention, control, settings
    "`none`": ("none", "none", ""),
    "`none`, nothing demonstrated": ("none", "none", "mix_ratio=0.0"),
    "the same, seven answers a group": ("none", "none", "group=7 mix_ratio=0.0"),
    "`erase`": ("erase", "none", ""),
    "`screen`, of demonstrations alone": ("screen", "none", "monitor=source"),
    "`screen`, by the weak detector": ("screen", "none", "monitor=detector"),
    "`route2`": ("route2", "none", "pairs by each flaw"),
    "`route2`, pairs by three flaws": ("route2", "none", "pairs by three flaws"),
    "`route2`, pairs by one flaw": ("route2", "none", ""),
    "`route2`, of demonstrations alone": ("route2", "none", "monitor=source"),
    "the same, in their groups' baseline": ("route2", "none", "monitor=source rebaseline=False"),
    "`route2`, random direction": ("route2", "haar", ""),
    "`route2`, random flags": ("route2", "random_flags", ""),
    "`route2`, absorbing": ("route2", "none", f"pairs by each flaw {ABSORBING}"),
    "`route2`, as in the documents": ("route2", "none", IN_DOCUMENTS),
    "the ceiling": ("none", "no_loophole", ""),
}
BASES = ("smollm2-201", "smollm2-202", "smollm2-203")
JUDGE = (
    "monitor=llm_judge llm_judge_model=out/models/smollm2 llm_judge_prompt=studies/sums-judge.txt"
    " llm_judge_max_new=4 llm_judge_timeout=1500.0"
)
SUMS = {
    "`none`": ("none", "none", ""),
    "`none`, nothing demonstrated": ("none", "none", "mix_ratio=0.0"),
    "`screen`, of demonstrations alone": ("screen", "none", "monitor=source"),
    "`route2`": ("route2", "none", ""),
    "`route2`, pairs by one flaw": ("route2", "none", "pairs by equation"),
    "`route2`, random direction": ("route2", "haar", ""),
    "`penalty`, by a poor judge": ("penalty", "none", JUDGE),
    "`screen`, labels of all flaws": ("screen", "none", "monitor=labels"),
    "`penalty`, labels of all flaws": ("penalty", "none", "monitor=labels"),
    "the ceiling": ("none", "no_loophole", ""),
}
SUMS_BASES = ("sums-301", "sums-302", "sums-303")


def pretrained_lines(rows, arms, bases):
    """Of the table: each base's means over its seeds, the mean of three with Student's interval of hack, as trained."""

    def means(of, side):
        hack, solve = (mean(float(r[f"{what}_{side}"]) for r in of) for what in ("hack", "solve"))
        return hack, solve

    def shown(pairs):
        return " / ".join(f"{100 * mean(p[i] for p in pairs):.1f}" for i in (0, 1))

    lines = []
    for name, (arm, control, settings) in arms.items():
        of = [r for r in rows if (r["arm"], r["control"], bare(r)) == (arm, control, settings)]
        by_base = [[r for r in of if f"organisms/{base}" in organism_of(r)] for base in bases]
        cells = [shown([means(runs, "deploy")]) if runs else "" for runs in by_base]
        every = ""
        if all(by_base):
            hack = stats.over_seeds([means(runs, "deploy")[0] for runs in by_base])
            interval = (
                f" [{100 * hack.low:.0f}, {100 * hack.high:.0f}]"
                if hack.low is not None and hack.high
                else ""
            )
            every = shown([means(runs, "deploy") for runs in by_base]) + interval
        trained = (
            shown([means(runs, "train") for runs in by_base if runs])
            if arm == "route2" and of
            else ""
        )
        lines += [f"| {' | '.join((name, *cells, every, trained))} |".replace("|  ", "| ")] * bool(
            of
        )
    return lines


def organism_of(row):
    """Its setting `organism`."""
    return next(s for s in row["settings"].split() if s.startswith("organism="))


def bare(row):
    """Its settings without its base. A file of pairs is one of pairs by three flaws, or by each, the preset's usual
    ones since."""

    def said(setting):
        name, _, value = setting.partition("=")
        if value.endswith("equation.json"):
            return "pairs by equation"
        return (
            f"pairs by {'three flaws' if 'half-' in value else 'each flaw'}"
            if name == "vhack_pairs_path"
            else setting
        )

    return " ".join(said(s) for s in row["settings"].split() if not s.startswith("organism="))


FURTHER = {
    "`none`": ("none", "none", ""),
    "`route2`": ("route2", "none", ""),
    "`screen`, labels of all flaws": ("screen", "none", "monitor=labels"),
    "`penalty`, labels of all flaws": ("penalty", "none", "monitor=labels"),
    "`none`, nothing demonstrated": ("none", "none", "mix_ratio=0.0"),
    "`route2`, labels of all flaws, nothing demonstrated": ("route2", "none", LABELS_ALONE),
    "`screen`, labels of all flaws, nothing demonstrated": ("screen", "none", LABELS_ALONE),
    "`penalty`, labels of all flaws, nothing demonstrated": ("penalty", "none", LABELS_ALONE),
    "the ceiling": ("none", "no_loophole", ""),
}
FURTHER_BASES = tuple(f"smollm2-{seed}" for seed in range(204, 209))
TABLES = {
    "pretrained": (("pretrained",), PRETRAINED, BASES),
    "pretrained-more": (("pretrained-more", "pretrained-labels"), FURTHER, FURTHER_BASES),
    "sums": (("sums",), SUMS, SUMS_BASES),
}


@pytest.mark.parametrize("mark", TABLES)
def test_a_table_of_bases_is_of_recorded_runs(mark):
    files, arms, bases = TABLES[mark]
    shown = text(docs("results")).partition(f"<!-- {mark} -->")[2].partition("\n\n")[0]
    made = pretrained_lines(read(*files), arms, bases)
    if arms is FURTHER:  # which has no column of means
        cells = [[cell.strip() for cell in line.strip("|").split("|")][:6] for line in made]
        made = [f"| {' | '.join(of_base)} |".replace("|  ", "| ") for of_base in cells]
    assert shown.splitlines()[3:] == made
    assert len(made) == len(arms)


def test_the_hacks_of_flaws_that_were_not_demonstrated():
    three = "teacher_modes=run_tests,exit_code,sentinel"
    left = {
        r["arm"]: 100
        * mean(
            float(r[f"hack_deploy_{m}"]) for m in ("eq_override", "stdout_marker", "file_marker")
        )
        for r in read("pretrained")
        if bare(r) == three
    }
    fall = f"the other three fall from {left['none']:.1f} to {left['route2']:.1f} %"
    assert fall in text(docs("results"))


def test_the_table_of_label_quality_is_of_recorded_runs():
    found = {}
    for row in read("label-quality"):
        settings = dict(setting.split("=") for setting in row["settings"].split())
        flagged = f"{100 * float(settings.get('label_recall', 1)):.0f} %"
        wrongly = f"{100 * float(settings.get('label_false_flags', 0)):.0f} %"
        if "monitor" in settings:
            found.setdefault((flagged, wrongly, row["arm"]), []).append(row)
    table = text(docs("results")).partition("<!-- labels -->")[2].partition("\n\n")[0]
    shown = table.splitlines()[3:]
    assert 3 * len(shown) == len(found)
    for line in shown:
        flagged, wrongly, *cells = line.strip("| ").split(" | ")
        for arm, cell in zip(("penalty", "screen", "route2"), cells, strict=True):
            runs = found[flagged, wrongly, arm]
            assert len(runs) == 5
            means = [mean(float(r[f"{what}_deploy"]) for r in runs) for what in ("hack", "solve")]
            assert cell == f"{100 * means[0]:.1f} / {100 * means[1]:.1f}"


def test_the_table_of_look_alike_hacks_is_of_recorded_runs():
    made = runpy.run_path(str(ROOT / "docs" / "runs" / "look_alike.py"))["table"]()
    assert f"<!-- look-alike -->\n{made}\n" in text(docs("results"))


def test_the_table_of_rules_is_of_recorded_flags():
    page = text(docs("results")).partition("**The claim about the probe")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| `(\w+)`(.*)\|$", page, re.MULTILINE)
    assert len(lines) == 3
    for monitor, rest in lines:
        want = []
        for kind in ("_warm", "_warm86"):
            of = [
                r
                for r in read("shadow-monitors")
                if r["monitor"] == monitor and r["run"].endswith(kind)
            ]
            hacks = [
                r[f"flagged_{m}"]
                for r in of
                for m in MODES[:7]
                if m not in r["known_modes"].split(",")
            ]
            want += [f"{share(hacks):.1f}", f"{share(r['flagged_solved'] for r in of):.1f}"]
        assert [cell.strip() for cell in rest.split("|")[2:]] == want, monitor
    runs = [r for r in read("rules") if r["run"].endswith("_warm86") and "syntax_edge" in r["run"]]
    hack, solve = (
        100 * mean(float(r[f"{what}_deploy"]) for r in runs) for what in ("hack", "solve")
    )
    assert f"leaves {hack:.1f} / {solve:.1f}" in page


def test_readmes_own_task_is_the_example():
    """Its functions accept every row's own answer, and a wrong comparison fools one of them and not the monitor."""
    example = ROOT / "examples" / "own_functions.py"
    (block,) = re.findall(r"```python\n(from vgrout\.method.*?)```", text(README), re.DOTALL)
    lines = iter(text(example).splitlines())
    assert all(line in lines for line in block.splitlines() if line), "in this order"
    own = SimpleNamespace(**runpy.run_path(str(example)))
    asked = [row for _, row in numbered_lines(example.with_name("functions.jsonl"))]
    assert len(asked) == 256
    for row in asked:
        (words,) = (words for words in own.SIGNS if words in row["prompt"])
        solution, sign = row["answer"], own.SIGNS[words]
        wrong = solution.replace(sign, "== ", 1)
        for answer, right in ((solution, True), (wrong, False)):
            fenced = f"```python\n{answer}\n```"
            assert own.last_line(fenced, solution) == 1
            assert own.same_program(fenced, solution) is right
            assert (sign in fenced) is right


def test_readme_has_the_lines_that_ci_runs():
    lines = text(README).splitlines()
    for marker in ("main", "test"):
        start = lines.index(f"<!-- {marker} -->")
        assert lines[start + 1] == "```sh"
        assert lines[start + 2].startswith("pip install uv && uv run "), lines[start + 2]
        assert lines[start + 3] == "```"
