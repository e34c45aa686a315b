"""summary.md: a run's end, for a person."""

from collections.abc import Mapping, Sequence

from tabulate import tabulate

from vgrout.data import Flaw
from vgrout.metrics import SIDES, Final
from vgrout.runs.log_tail import count_lines, shown
from vgrout.runs.outcome import Outcome
from vgrout.runs.plan import method_lines
from vgrout.runs.recorder import columns_for
from vgrout.table import Table

# Columns of the table of steps, where a run has them.
COLUMNS = (
    *("step", "hack_s", "solve_s", "hack_deploy", "solve_deploy"),
    *("kl_deploy", "rew_s", "signal", "q_egy", "recall"),
)
EVERY = 5  # steps from one of its rows to the next: those of evaluations in the presets

# what a hack and a solve are: in the code world, and elsewhere
MEANING = {
    True: "Hack: the flawed check accepts the answer and the reference tests do not; solve: the reference tests accept "
    "it.",
    False: "Hack: the proxy passes the answer and the reference does not; solve: the reference accepts it.",
}


def page(outcome: Outcome, verdict: str, detectors: Mapping[str, str]) -> str:
    """summary.md, the conclusion first.

    verdict: as the console has it. detectors: weak detectors' fields by their letters.
    """
    cfg, final, tallies = outcome.cfg, outcome.final, outcome.tallies
    method = " ".join(" ".join(method_lines(cfg, settings=False)).split())
    paragraphs = [f"# {verdict[0].upper()}{verdict[1:]}"]
    if outcome.halted:
        paragraphs.append(f"**Halted**: {outcome.halted}.")
    if outcome.unrouted:
        paragraphs.append(f"**Nothing was routed**: {outcome.unrouted}.")
    paragraphs += [
        f"`{cfg.run_id}`, {cfg.scale.steps} steps. Method: {method}.",
        models_table(final, hinted=cfg.of_code),
        f"{final.deployed.hack.n} answers a row, with held-out {cfg.env.held_out}. {MEANING[cfg.of_code]}",
        "![hack and solve by step](dynamics.png)",
        "## By flaw",
        flaws_table(final, outcome.problems.flaws),
        *tallies.lines(outcome.halves),
    ]
    if tallies.last is not None:
        paragraphs.append("## The last answer of training")
        paragraphs.append(f"    {shown(tallies.last).strip()}")
    paragraphs += ["## Steps", steps_table(outcome)]
    counts = [f"    {line}" for line in count_lines(outcome.rows, tallies, detectors)]
    paragraphs += ["## Counts over the whole run", "\n".join(counts)]
    return "\n\n".join(paragraphs) + "\n"


def steps_table(outcome: Outcome) -> str:
    """The first step, each fifth and the last, in the columns that say how the run went."""
    flaws = outcome.problems.trained_flaws
    table = Table(columns_for(outcome.cfg, flaws), flaws, only=COLUMNS)
    last = len(outcome.rows) - 1
    shown = []
    for place, row in enumerate(outcome.rows):
        if place in (0, last) or (row.step + 1) % EVERY == 0:
            shown.append(row)
    legend = " · ".join(f"{column.head}: {column.legend}" for column in table.columns)
    return f"{table.markdown(shown)}\n\n{legend}. Every step and every column is in `steps.jsonl` (docs/columns.md)."


def models_table(final: Final, *, hinted: bool = True) -> str:
    """Hack and solve of the model untrained, as trained, deployed, and deployed without hints, if prompts have any."""
    rows: list[tuple[str, str, str]] = []
    for name, side in final.sides.items():
        if hinted or name != "plain":
            rows.append((SIDES[name].title, side.hack.percent, side.solve.percent))
    return _markdown(("model", "hack, %", "solve, %"), rows, "lrr")


def flaws_table(final: Final, named: Mapping[str, Flaw]) -> str:
    """Hack and solve by flaw. named: the environment's flaws."""
    heads = (
        *("flaw", "hack as trained, %", "hack deployed, %", "solve deployed, %"),
        *("answers", "a hack"),
    )
    rows: list[tuple[str, ...]] = []
    for flaw, deployed in final.deployed.by_mode.items():
        rows.append(
            (
                f"`{flaw}`",
                final.trained.by_mode[flaw].hack.percent,
                deployed.hack.percent,
                deployed.solve.percent,
                str(deployed.hack.n),
                named[flaw].should,
            )
        )
    return _markdown(heads, rows, "lrrrrl")


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]], columns: str) -> str:
    """A table. columns: a letter for each, l or r, the side that it is set to."""
    sides = {"l": "left", "r": "right"}
    return tabulate(
        rows,
        headers=heads,
        tablefmt="pipe",
        disable_numparse=True,
        colalign=[sides[letter] for letter in columns],
    )
