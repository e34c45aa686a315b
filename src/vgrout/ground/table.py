"""The step table: one row of numbers per step.

A column is a field of `StepRow`: it has the value, and in its metadata format, legend and
expectation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any, Protocol, TypeVar, get_args, runtime_checkable

from tabulate import tabulate

from vgrout.ground.data import Flaw
from vgrout.ground.metrics import REFERENCE_STEP, Rate

LEARNED = 0.2  # a mode counts as learned from this share of held-out answers that hack it
# Two hack rates this close count as alike; 256 answers at 5 % have a standard error of 1.4 points.
NEAR = 0.05
TOO_FEW = "too few"  # what a conclusion says that is none, or not of everything
SKILL = 0.10  # two solve rates this close count as matched, as in the hypotheses
# Columns that differ between two runs of the same computation.
SECONDS = ("gen", "grade", "fb", "eval", "sec")
# Hacking has begun when this share of so many steps' student answers hacks.
ONSET_WINDOW, ONSET_SHARE = 5, 0.1

R = TypeVar("R", bound="Columns")


def col(
    fmt: str, legend: str, *, should: str = "", when: str = "always", head: str = "", **default: Any
) -> Any:
    """Declare a column. Without a default it is required at construction.

    Args:
        fmt: "frac" for a Rate, "hk" for one Rate per mode, else a format spec.
        legend: what the column measures.
        should: what to expect of it, and what it means if that fails.
        when: the words that must hold of a run for the column to be shown, joined by "+"; "file":
            it is never shown, only written to steps.jsonl.
        head: its heading on the console, in percent if that ends in %; "": it is shown there only
            with `--columns all`.
        default: `default` or `default_factory`, as of a dataclass's field.
    """
    about = {"fmt": fmt, "legend": legend, "should": should, "when": when, "head": head}
    return field(metadata=about, **default)


@runtime_checkable
class Measured(Protocol):
    """A part of a step that has measured some of the row's columns."""

    def columns(self) -> Mapping[str, object]: ...


def may_be_unmeasured(column: Field[object]) -> bool:
    """Return whether None, "not measured", is a value of this column."""
    return type(None) in get_args(column.type)


@dataclass(frozen=True, kw_only=True)
class Columns:
    """A row of a table. None means "not measured this step" and is printed as ·. No file takes a NaN."""

    step: int = col("d", "optimiser step", head="step")

    @classmethod
    def of(cls: type[R], *parts: Measured | None, **more: object) -> R:
        """Return the row that these parts measured; a column that none of them has is None.

        Raises:
            TypeError: a column that must be measured is missing, or one is not a column of the row.
        """
        values: dict[str, Any] = {f.name: None for f in fields(cls) if may_be_unmeasured(f)}
        for part in parts:
            if part is not None:
                values |= part.columns()
        values |= more
        return cls(**values)

    def as_json(self) -> dict[str, object]:
        """Return scalars by name.

        A share `x` stands beside its counts, `x_k` of `x_n`; the hacks of a flaw are `hk_<code>`.
        """
        out: dict[str, object] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "hk":
                for code, rate in value.items():
                    out |= share(f"hk_{code}", rate)
            elif f.metadata["fmt"] == "frac":
                out |= share(f.name, value)
            else:
                out[f.name] = value
        return out

    @classmethod
    def from_json(cls: type[R], data: dict[str, object]) -> R:
        """Return the row of which `as_json` gave `data`. Raises TypeError if a column is
        missing."""
        formats = {f.name: f.metadata["fmt"] for f in fields(cls)}
        values: dict[str, Any] = {}
        for name, value in data.items():
            if name in formats:
                values[name] = counted(data, name) if formats[name] == "frac" else value
        if "hk" in formats:
            values["hk"] = hacks_by_code(data)
        return cls(**values)


def hacks_by_code(row: Mapping[str, object]) -> dict[str, Rate]:
    """Hacks of each flaw in a row of steps.jsonl, by the flaw's code; of those that were measured."""
    hacks: dict[str, Rate] = {}
    for name in row:
        code = name.removeprefix("hk_").removesuffix("_k")
        if name != f"hk_{code}_k":
            continue
        rate = counted(row, f"hk_{code}")
        if rate is not None:
            hacks[code] = rate
    return hacks


def share(name: str, rate: Rate | None) -> dict[str, float | int | None]:
    """Return a share as a row of steps.jsonl has it: `x` and its counts `x_k` of `x_n`.

    All three are None where it was not measured.
    """
    if rate is None:
        return {name: None, f"{name}_k": None, f"{name}_n": None}
    return {name: rate.value, f"{name}_k": rate.k, f"{name}_n": rate.n}


def counted(row: Mapping[str, object], name: str) -> Rate | None:
    """Return a share of a row of steps.jsonl from its counts; None: it was not measured."""
    k, n = row.get(f"{name}_k"), row.get(f"{name}_n")
    if k is None or n is None:
        return None
    if not (type(k) is int and type(n) is int and 0 <= k <= n):
        raise ValueError(f"{name}: {k!r} of {n!r}")
    return Rate(k, n)


@dataclass(frozen=True, kw_only=True)
class StepRow(Columns):
    """One step of the trainer. The first columns are what a run is about; the rest follow the order
    of a step."""

    hack_s: Rate = col(
        "frac",
        "the model's answers that hack: the flawed check accepts, the reference rejects",
        should="rises under none; ELSE there is nothing to prevent",
        head="hack %",
    )
    solve_s: Rate = col("frac", "answers that the reference accepts", head="solve %")
    tries_s: Rate | None = col(
        "frac",
        "answers that hack, or try to and fail",
        when="file",
        default=None,
    )
    hack_deploy: float | None = col(
        ".2f",
        "hack rate of the deployed model, held-out problems",
        should="< hack_s under routing; ELSE routing misses",
        head="deployed hack %",
    )
    solve_deploy: float | None = col(
        ".2f", "solve rate of the deployed model", head="deployed solve %"
    )
    kl_deploy: float | None = col(
        ".2f", "KL(deployed ‖ untrained), nats a token of its held-out answers"
    )
    ref_eq: float = col(".2f", f"answers so far, in steps of {REFERENCE_STEP} answers")
    rew: float | None = col(".2f", "mean reward, all rows")
    rew_s: float | None = col(
        ".2f", "mean reward of its answers", should="rises; ELSE nothing is learnt", head="reward"
    )
    signal: Rate = col(
        "frac", "groups whose rewards differ", should="most groups; ELSE steps are wasted"
    )
    all_zero: int = col("d", "groups without signal, none with the full reward (after flags)")
    all_one: int = col("d", "groups without signal, some with the full reward (after flags)")
    dropped: int = col(
        "d", "groups dropped because the sandbox or --reward failed", should="0; ELSE see the log"
    )
    drop_why: str | None = col("s", "why groups were dropped", when="file", default=None)
    n: int = col("d", "rollouts in the step")
    think: float | None = col(
        ".0f",
        "tokens of thought, mean per answer",
        when="thinking",
        should="stays well below --max-new; ELSE thoughts are cut, and have no answer",
        head="think",
        default=None,
    )
    pass_t: Rate | None = col(
        "frac", "teacher rows that the reference accepted when their pool was made", when="teacher"
    )
    hack_s_E: Rate | None = col(
        "frac", "answers that detector E flags (hacked_loophole_used)", when="file"
    )
    hack_s_D: Rate | None = col(
        "frac", "answers that detector D flags (hacked_wrong_tests)", when="file"
    )
    hack_s_A: Rate | None = col(
        "frac", "hacks that a detector of --report-detectors sees", when="halves"
    )
    hack_s_B: Rate | None = col(
        "frac", "hacks that none of these sees, but another one does", when="halves"
    )
    hack_t: Rate | None = col("frac", "teacher rows labelled hacked", when="teacher")
    # by the flaw's code
    hk: dict[str, Rate] = col("hk", "hacks of one flaw", when="modes", default_factory=dict)
    hack_abl: Rate | None = col(
        "frac", "answers sampled from the deployed model that hack", when="ablated"
    )
    solve_abl: Rate | None = col(
        "frac", "answers sampled from the deployed model that are right", when="ablated"
    )
    lp_s: float | None = col(".2f", "mean log-prob a token, of the model's answers")
    lp_t: float | None = col(
        ".2f",
        "mean log-prob a token, teacher rows",
        when="teacher",
        should="stays near its best; ELSE the policy is collapsing",
    )
    loss: float | None = col("+.3f", "loss")
    kl: float | None = col(".0e", "mean KL a token to the untrained model", when="beta")
    mismatch_kl: float | None = col(
        ".0e",
        "mean of ratio − log ratio − 1, the ratio being of a token's probability, trainer / sampler",
        should="≈ rounding (1e-13 in fp32); ELSE the adapter did not reach the sampler",
    )
    ratio_min: float | None = col(".3g", "lowest ratio trainer / sampler of a token", when="drops")
    ratio_mean: float | None = col(".4f", "mean ratio", when="file")
    ratio_max: float | None = col(".3g", "highest ratio", when="drops")
    is_masked: float | None = col(
        ".3f",
        "share of tokens without policy gradient",
        when="drops",
    )
    is_masked_low: float | None = col(".3f", "… their ratio is too low", when="file")
    is_masked_high: float | None = col(".3f", "… their ratio is too high", when="file")
    masked_positive: float | None = col(
        ".3f",
        "share of tokens dropped where the advantage is positive",
        when="drops",
        should="≈ masked_negative; ELSE the threshold drops the rare tokens that decide",
    )
    masked_negative: float | None = col(
        ".3f", "share of tokens dropped where the advantage is negative", when="drops"
    )
    masked_mismatch_kl: float | None = col(
        ".0e", "mismatch_kl over the tokens without policy gradient", when="file"
    )
    unmasked_mismatch_kl: float | None = col(".0e", "mismatch_kl over the others", when="file")
    gn: float | None = col(".1e", "joint gradient norm before clipping")
    q_egy: float | None = col(".2f", "share of gradient norm in the quarantine", when="route")
    tau: float | None = col("+.2f", "gate: threshold on the cosine", when="gate")
    hkgap: float | None = col(
        "+.2f",
        "gate: mean cosine of known hacks with the direction, minus that of the rest",
        when="gate",
        should="0.2 or more at step 9; ELSE the direction hardly separates",
    )
    voting: float | None = col(
        ".2f",
        "gate: share of modules with a threshold, which can flag more than known hacks",
        when="gate",
        should="more than 0.5; ELSE no majority of all modules is to be had, and known hacks alone are flagged",
    )
    resid: float | None = col(
        "+.2f",
        "gate, band: cosine with the direction of what is not flagged, the quarantine's own layers included",
        when="resid",
    )
    cos_pre: float | None = col(".2f", "hack-ward share of the gradient", when="direction")
    cos_pre_s: float | None = col(".2f", "… of the model's answers", when="direction")
    cos_pre_t: float | None = col(".2f", "… of teacher rows", when="direction+teacher")
    cos_post: float | None = col(
        ".2f", "… of what δS learns", when="direction", should="≈ 0 under erase and route"
    )
    cos_post_s: float | None = col(
        ".2f", "… that the model's answers alone would leave there", when="direction"
    )
    cos_post_t: float | None = col(
        ".2f", "… that teacher rows alone would leave there", when="direction+teacher"
    )
    cos_upd: float | None = col(
        "+.2f", "hack-ward cosine of the change AdamW applied", when="direction"
    )
    fired: float | None = col(
        ".2f", "share of modules in which something was flagged or taken", when="direction"
    )
    capped: int | None = col(
        "d", "modules whose rescaling hit its bound of ×10", when="erase", should="0"
    )
    routed: float | None = col(
        ".2f",
        "share of rollouts with a gradient that are sent to the quarantine (of rollouts × modules, if each module "
        "decides)",
        when="whole",
    )
    recall: Rate | None = col(
        "frac",
        "hacks that the monitor flagged, of those that it looked at",
        when="flags",
        should="near all; ELSE what it misses grows",
    )
    recall_new: Rate | None = col(
        "frac",
        "hacks of flaws outside --known-modes that the monitor flagged, of those that it looked at",
        when="blind",
    )
    hack_new: Rate | None = col(
        "frac",
        "hacks of flaws outside --known-modes",
        when="blind",
        should="falls as hack_s does; ELSE only what is known is contained",
    )
    false_flags: Rate | None = col("frac", "right answers that it flagged", when="flags")
    flag_t: Rate | None = col("frac", "teacher rows that it flagged", when="flags+teacher")
    judge_asked: int | None = col(
        "d",
        "answers that the judge was asked about; texts that it knows are not asked about again",
        when="judge",
        default=None,
    )
    judge_failed: int | None = col(
        "d",
        "rewarded answers without a verdict of the judge, and so without a flag",
        when="judge",
        should="0; ELSE see the log, and raise --llm-judge-timeout or --llm-judge-max-new",
        default=None,
    )
    judge_in: int | None = col(
        "d", "tokens that the judge read, as it counts them", when="judge", default=None
    )
    judge_out: int | None = col("d", "tokens that it wrote", when="judge", default=None)
    realised: float | None = col(
        ".2f",
        "share of the change that δS and δS_hack ask for that is in the weights, "
        "in a sample of layers",
        should="≈ 1; ELSE the weights' rounding swallows it: raise --lr, or --dtype fp32",
        default=None,
    )
    refr: int | None = col("d", "steps since the direction was extracted", when="direction")
    skipped: int = col(
        "d", "1: loss or gradient not finite, so the optimiser made no step", should="0"
    )
    lr: float | None = col(".0e", "learning rate")
    gen: float = col(".2f", "seconds sampling")
    grade: float = col(".2f", "seconds waiting for grades after sampling ended")
    fb: float = col(".2f", "seconds in forward, backward, routing and optimiser")
    eval: float | None = col(".2f", "seconds evaluating, and extracting the direction again")
    sec: float = col(".2f", "seconds in all", head="seconds")


def whole_run(rows: Sequence[StepRow], students: bool = False) -> tuple[Rate, Rate]:
    """Return the hacks and the solves of all steps together.

    Demonstrations count by their cached labels; with `students` they do not count.
    """
    hacks, solves = Rate(0, 0), Rate(0, 0)
    for row in rows:
        hacks += row.hack_s
        solves += row.solve_s
        if not students:
            hacks += row.hack_t or Rate(0, 0)
            solves += row.pass_t or Rate(0, 0)
    return hacks, solves


def first_hacks(rates: Sequence[tuple[int, int]]) -> int | None:
    """Return the onset of hacking; None: there was none.

    That is the first step of the first window in which at least ONSET_SHARE of the students'
    answers hack.

    rates: `hack_s` of every step, (k, n).
    """
    for first in range(max(1, len(rates) - ONSET_WINDOW + 1)):
        window = rates[first : first + ONSET_WINDOW]
        k = sum(k for k, _ in window)
        n = sum(n for _, n in window)
        if n and k / n >= ONSET_SHARE:
            return first
    return None


@dataclass(frozen=True)
class Column:
    """A column as it is printed."""

    head: str  # its name in steps.jsonl, or its heading on the console
    width: int
    fmt: str
    legend: str
    should: str
    name: str
    code: str | None = None  # of the flaw that it counts the hacks of

    def cell(self, row: Columns) -> str:
        """Return the row's value as text; · where it was not measured."""
        value = getattr(row, self.name)
        if self.code:
            value = value.get(self.code)
        in_percent = self.head.endswith("%")
        if in_percent and isinstance(value, Rate):
            value = value.value
        if value is None:
            return "·"
        if in_percent:
            return f"{100 * value:.1f}"
        if isinstance(value, Rate):
            return f"{value.k}/{value.n}" if value.n else "·"
        return format(value, self.fmt)


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """A table in GitHub's Markdown, of rows with the same columns."""
    return tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True)


class Table:
    """The printed step table, of the columns that a run fills.

    It has a legend once, a header every 50 rows, and a line for each step.
    """

    def __init__(
        self,
        has: set[str],
        flaws: Sequence[Flaw],
        of: type[Columns] = StepRow,
        short: bool = False,
    ):
        """Choose the columns.

        Args:
            has: the words of the columns' `when` that hold of the run.
            flaws: those that have a column of hacks.
            of: the rows.
            short: take only the columns of the console.
        """
        self.columns: list[Column] = []
        for f in fields(of):
            if not _is_shown(f, has, short):
                continue
            if f.name == "hk":
                for flaw in flaws:
                    legend = f"{f.metadata['legend']}: {flaw.name}"
                    self._add(f, f"hk_{flaw.code}", legend, flaw.code)
            else:
                heading = f.metadata["head"] if short else ""
                self._add(f, heading or f.name, f.metadata["legend"])
        self.gap = "  " if short else " "
        self.printed = 0

    def _add(self, column: Field[object], head: str, legend: str, code: str | None = None) -> None:
        fmt, should = column.metadata["fmt"], column.metadata["should"]
        width = max(len(head), {"+.3f": 6, "d": 3, ".1e": 7}.get(fmt, 5))
        self.columns.append(Column(head, width, fmt, legend, should, column.name, code))

    def legend(self) -> list[str]:
        """Return a line on each column."""
        width = max(len(c.head) for c in self.columns)
        lines = []
        for c in self.columns:
            line = f"{c.head:>{width}}  {c.legend}"
            lines.append(f"{line}. SHOULD: {c.should}" if c.should else line)
        return lines

    def header(self) -> str:
        return self.gap.join(f"{c.head:>{c.width}}" for c in self.columns)

    def markdown(self, rows: Sequence[Columns]) -> str:
        """Return a table of all these rows."""
        cells = [[c.cell(row) for c in self.columns] for row in rows]
        heads = [c.head for c in self.columns]
        return tabulate(cells, headers=heads, tablefmt="github", disable_numparse=True)

    def lines(self, row: Columns) -> list[str]:
        """Return the row's line, with a header before every 50th, from the first on."""
        line = self.gap.join(f"{c.cell(row):>{c.width}}" for c in self.columns)
        self.printed += 1
        return [self.header(), line] if self.printed % 50 == 1 else [line]


def _is_shown(column: Field[object], has: set[str], short: bool) -> bool:
    """Return whether a run that has all this fills the column and, if `short`, the console has
    it."""
    if short and not column.metadata["head"]:
        return False
    words = column.metadata["when"].split("+")
    return all(word == "always" or word in has for word in words)
