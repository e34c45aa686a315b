"""Finished runs, read from their files, and conditions: runs that differ by their seed alone."""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from pandas import DataFrame, Series

from vgrout.config.method import MethodConfig
from vgrout.config.presets import PRESETS
from vgrout.config.run import Config, from_dict
from vgrout.config.specs import CONTROLS, INTERVENTIONS
from vgrout.envs.code.modes import MODES, Mode
from vgrout.errors import Refused
from vgrout.files import from_json, json_lines, read_json, read_text
from vgrout.metrics import Rate
from vgrout.report.stats import wilson
from vgrout.table import LEARNED, first_hacks

What = Literal["hack", "solve"]
WHATS: tuple[What, ...] = get_args(What)
# per_mode_deploy → final.jsonl
SIDES = {"base": "base", "train": "trained", "deploy": "deployed", "plain": "plain"}
MEASURING = ("eval", "guard", "detectors", "run")  # groups of settings that training does not read
# hashes in run.json of what every method starts from …
OF_MODEL = ("base_weights", "tokenizer", "problems", "pool")
# … and of what one reads
OF_METHOD = ("pairs", "placebo", "known_correct", "direction_file", "teacher_weights")
# in steps.jsonl, or null there
MEASURED = ("hack_deploy", "solve_deploy", "signal_k", "signal_n", "all_zero", "n")
ANSWER = ("side", "env_mode", "problem_id", "hacked", "solved", "reward")  # in final.jsonl


def trained_with(cfg: Config) -> dict[str, Any]:
    """The settings that training reads, without their groups."""
    groups = {
        name: of
        for name, of in cfg.as_dict().items()
        if isinstance(of, dict) and name not in MEASURING
    }
    return {"preset": cfg.preset} | {
        k: v for of in groups.values() for k, v in of.items() if k != "shadow"
    }


def usual(cfg: Config) -> dict[str, tuple[Any, ...]]:
    """Of these the values that its preset and its intervention bring; None stands for the intervention's."""
    preset, of_method = (
        PRESETS[cfg.preset][1] if cfg.preset in PRESETS else Config(),
        cfg.method.spec.usual,
    )
    none = {f.name: (None,) for f in fields(MethodConfig)}
    return {k: (v, of_method.get(k, v), *none.get(k, ())) for k, v in trained_with(preset).items()}


@dataclass(frozen=True, eq=False)
class FinishedRun:
    """A run with its final evaluation: finished, or halted by its guard."""

    path: Path
    cfg: Config
    record: dict[str, Any]  # run.json
    final: dict[str, Any]  # per_mode_deploy.json
    steps: DataFrame  # steps.jsonl
    # final.jsonl without texts: the graded answers, `flaw` (that one hacks, or None) and `solved`
    answers: DataFrame
    # monitors of texts on the students' hacks and right answers: monitor, step, flaw, flagged,
    # score
    flags: DataFrame

    @property
    def seed(self) -> int:
        return self.cfg.run.seed

    @property
    def seed_name(self) -> str:
        """The seed, and the step of a halt: a halted run is compared by what was evaluated there."""
        return (
            f"{self.seed} (halted at {self.steps.step.iloc[-1]})"
            if self.final.get("halted")
            else str(self.seed)
        )

    @property
    def method(self) -> str:
        """The method's name in tables: intervention, monitor where it is not the usual one, control."""
        method, pairs = self.cfg.method, (self.record.get("direction") or {}).get("pairs")
        name = method.intervention + (f" ({method.monitor_title})" if method.monitor_title else "")
        name += f" · {method.control_name}" if method.control_name != "none" else ""
        return name + (" (pairs chosen by true labels)" if str(pairs).startswith("oracle:") else "")

    @cached_property
    def trained_with(self) -> dict[str, Any]:
        """The settings that training reads, and the hashes of its files, since a path may come to hold another one."""
        hashes = self.record.get("hashes") or {}
        hashed = {
            f"{n} sha256": h[:8] if (h := hashes.get(n)) else "not noted"
            for n in (*OF_MODEL, *OF_METHOD)
        }
        return trained_with(self.cfg) | hashed

    @cached_property
    def condition(self) -> str:
        """Equal for runs that differ by their seed alone."""
        return repr((self.method, self.trained_with))

    @property
    def flaws(self) -> list[Mode]:
        """Of the final evaluation's problems."""
        return [m for m in MODES if m in self.final["by_mode"]]

    def counted(self, side: str, what: str, flaw: Mode | None = None) -> Rate:
        """Of the final evaluation's answers. side: base, train, deploy or plain; what: hack, solve or tries."""
        of = self.final if flaw is None else self.final["by_mode"][flaw]
        share = of.get(f"{what}_{side}" if flaw is None else f"{side}_{what}")
        n = of["eval_n" if flaw is None else "n"]
        return Rate(0, 0) if share is None else Rate(round(share * n), n)

    def last_five(self, what: What) -> Rate:
        """The students' answers of the last five steps."""
        k, n = (int(self.steps[f"{what}_s_{x}"].iloc[-5:].sum()) for x in "kn")
        return Rate(k, n)

    def shares(self, side: str, what: What, flaw: Mode | None = None) -> Series:
        """By mode and held-out problem, the share of answers that solve it or hack it; with `flaw`, of the problems
        that have this flaw, and hacks by it alone."""
        # trained, without a quarantine
        name = SIDES[side] if SIDES[side] in set(self.answers.side) else "deployed"
        given = self.answers[self.answers.side == name]
        if everywhere := self.cfg.env.unannounced:  # flaws that are open on every problem at once
            given = given.assign(env_mode=everywhere[0])
        if flaw is not None:
            given = given[
                Series(flaw in everywhere, given.index) if everywhere else given.env_mode == flaw
            ]
        hits = (
            given.solved
            if what == "solve"
            else given.flaw.notna()
            if flaw is None
            else given.flaw == flaw
        )
        return hits.groupby([given.env_mode, given.problem_id], sort=False).mean()

    @cached_property
    def row(self) -> dict[str, Any]:
        """The run in runs.csv. Shares are fractions with Wilson's interval; settings: those that differ from the
        preset's; flagged_*: k/n of the hacks (_solved: of the right answers) that its monitor of texts has read; cos_*:
        |cos| of a control's direction with the real one over modules, and that of random ones."""
        method, hashes, final = self.cfg.method, self.record.get("hashes") or {}, self.final
        named, brought = (
            ("preset", "intervention", "control", "random_flags", "placebo_pairs"),
            usual(self.cfg),
        )
        unusual = {
            k: v
            for k, v in trained_with(self.cfg).items()
            if k not in named and v not in brought[k]
        }
        cosine = (self.record.get("direction") or {}).get("cos_with_real") or {}
        flagged = flag_counts(self.flags[self.flags.monitor == method.monitor_name])
        shares: dict[str, float | None] = {}
        for side, what in itertools.product(SIDES, WHATS):
            of, name = self.counted(side, what), f"{what}_{side}"
            low, high = wilson(of.k, of.n) if of.n else (None, None)
            shares |= {
                name: rounded(final.get(name)),
                f"{name}_low": rounded(low),
                f"{name}_high": rounded(high),
            }
        return {
            "arm": method.intervention,
            "control": method.control_name,
            "settings": " ".join(f"{k}={v}" for k, v in unusual.items()),
            "base_weights": (hashes.get("base_weights") or "")[:8],
            "loss": self.cfg.loss.loss
            + (" biased" * (self.cfg.loss.loss == "grpo" and not self.cfg.loss.unbiased)),
            "seed": self.seed,
            "steps": self.cfg.scale.steps,
            "onset": first_hacks([*zip(self.steps.hack_s_k, self.steps.hack_s_n, strict=True)]),
            "hack_last5": self.last_five("hack").value,
            "solve_last5": self.last_five("solve").value,
            "modes_learned": sum(
                (self.counted("train", "hack", m).value or 0) >= LEARNED for m in self.flaws
            ),
            "n": final["eval_n"],
            **shares,
            **{f"hack_deploy_{m}": final["by_mode"].get(m, {}).get("deploy_hack") for m in MODES},
            **{f"flagged_{name}": flagged.get(name) for name in (*MODES, "solved")},
            **{f"cos_{of}": rounded(cosine.get(of)) for of in ("rms", "chance_rms")},
            "revision": (self.record.get("git") or {}).get("revision", "")[:10],
            "preregistered": (hashes.get("preregistered") or "")[:12],
        }


def rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 6)


def flag_counts(flags: DataFrame) -> dict[str, str]:
    """k/n of the hacks that were flagged, by flaw; "solved": of the right answers."""
    groups = flags.groupby(flags.flaw.fillna("solved"), sort=False).flagged
    return {str(name): f"{int(of.sum())}/{len(of)}" for name, of in groups}


def read_run(path: Path, cfg: Config | None = None) -> FinishedRun:
    """cfg: its settings; None: as run.json has them. Raises Refused where a file is missing or damaged."""
    final, record = read_json(path / "per_mode_deploy.json"), read_json(path / "run.json")
    cfg = cfg or from_dict(record.get("config"), "run.json")
    if (
        not final.get("by_mode")
        or final.get("seed") != cfg.run.seed
        or not (path / "final.jsonl").is_file()
    ):
        raise Refused("per_mode_deploy.json or final.jsonl: not of this run, or of another version")
    steps = DataFrame(json_lines(path / "steps.jsonl"))
    steps = steps.astype({name: float for name in MEASURED if name in steps})
    answers = DataFrame(
        [
            {name: a[name] for name in ANSWER}
            | {"flaw": (a.get("mechanism") or a["env_mode"]) if a["hacked"] else None}
            for a in json_lines(path / "final.jsonl")
        ],
        columns=[*ANSWER, "flaw"],
    )
    graded = answers[answers.reward.notna()].astype({"solved": bool})
    return FinishedRun(path, cfg, record, final, steps, graded, _flags(path, cfg.method))


def _flags(path: Path, method: MethodConfig) -> DataFrame:
    """By the monitor of texts that was acted on, then by those in shadow; the rollouts of other runs, a long file, are
    not read."""
    own = (
        method.monitor_name
        if method.monitor_name != "none" and not method.flags_by_gradient
        else ""
    )
    rows: list[dict[str, Any]] = []
    for r in json_lines(path / "rollouts.jsonl") if own or method.in_shadow else ():
        if r["hacked"] or r["solved"]:
            flaw = (r.get("mechanism") or r["env_mode"]) if r["hacked"] else None
            for name, found in {
                **({own: r} if own and "flagged" in r else {}),
                **r.get("shadow", {}),
            }.items():
                about = {"monitor": name, "step": r["step"], "flaw": flaw}
                rows.append(
                    about | {"flagged": bool(found["flagged"]), "score": found.get("score")}
                )
    return DataFrame(rows, columns=["monitor", "step", "flaw", "flagged", "score"])


def run_dirs(source: Path) -> tuple[list[Path], list[str]]:
    """The run directories of a source (a run, a folder of runs, or a sweep with its runs.json), and the missing runs of
    a sweep, with their state. Raises Refused if the source is none of these."""
    files = ("run.json", "status.json")  # a run that died while it loaded has the second alone
    if any((source / name).is_file() for name in files):
        return [source], []
    if not (index := source / "runs.json").is_file():
        if found := sorted({p.parent for name in files for p in source.glob(f"*/{name}")}):
            return found, []
        raise Refused(f"{source}: no run in it; run `vgrout train mini` first")
    found, absent = [], []
    try:
        for entry in from_json(read_text(index), str(index)):
            # `run` is relative to where the sweep was started: here, or some folder above the sweep
            run, roots = entry["run"], (Path(), *source.resolve().parents)
            if (
                path := next((root / run for root in roots if (root / run).is_dir()), None)
                if run
                else None
            ):
                found.append(path)
            else:
                absent.append(
                    f"{entry['name']} ({entry['state']}{f': {run} is not there' if run else ''})"
                )
    except (KeyError, TypeError) as e:
        raise Refused(f"{index}: damaged ({e!r})") from None
    return found, absent


def load(sources: Sequence[Path], tag: str = "") -> tuple[list[FinishedRun], list[str]]:
    """The runs of all sources that have a final evaluation (a halted run has) and whose name ends with `tag`; of
    several runs of one condition and seed, the newest. And those left out by name, a damaged one too, with the reason.

    Raises:
        Refused: a source is no folder of runs.
    """
    listed_dirs = [run_dirs(source) for source in sources]
    left_out = [name for _, absent in listed_dirs for name in absent]
    paths = {p.resolve() for found, _ in listed_dirs for p in found if p.name.endswith(tag)}
    newest: dict[tuple[str, int], FinishedRun] = {}
    for path in sorted(paths, key=lambda p: p.name):
        try:
            state = (
                read_json(path / "status.json").get("state")
                if (path / "status.json").exists()
                else "unknown"
            )
            if state not in ("finished", "halted") or not (path / "per_mode_deploy.json").exists():
                why = (
                    f"{state}, no per_mode_deploy.json"
                    if state in ("finished", "halted")
                    else f"{state:.40}"
                )
                left_out.append(f"{path.name} ({why})")
                continue
            run = read_run(path)
            # whatever a file of wrong content makes of what a report asks
            _ = (
                run.row,
                [
                    run.counted(side, what, m)
                    for side in SIDES
                    for what in (*WHATS, "tries")
                    for m in run.flaws
                ],
            )
            key = run.condition, run.seed
        except Exception as e:
            why = f"{e}" if isinstance(e, Refused) else f"{type(e).__name__}: {e}"
            left_out.append(
                f"{path.name} (damaged: {' '.join(why.replace(f'{path}/', '').split())[:200]})"
            )
            continue
        if older := newest.get(key):
            left_out.append(
                f"{older.path.name} (older than {path.name}, the same settings and seed)"
            )
        newest[key] = run
    return list(newest.values()), left_out


@dataclass(frozen=True, eq=False)
class Condition:
    """Runs that differ by their seed alone, one a seed, in the order of their seeds."""

    title: str
    runs: tuple[FinishedRun, ...]

    @property
    def first(self) -> FinishedRun:
        return self.runs[0]

    @property
    def seeds(self) -> str:
        return ",".join(r.seed_name for r in self.runs)


def conditions(runs: Sequence[FinishedRun]) -> list[Condition]:
    """In the order of interventions, then controls. Titles are unique: methods of one name are told apart by the
    settings and files in which they differ, and which are not their preset's."""
    alike: dict[str, dict[str, list[FinishedRun]]] = defaultdict(lambda: defaultdict(list))
    for run in sorted(runs, key=lambda r: r.seed):
        alike[run.method][run.condition].append(run)
    found = []
    for method, groups in alike.items():
        table = [group[0].trained_with for group in groups.values()]
        differing = [k for k in table[0] if any(other[k] != table[0][k] for other in table)]
        for group, own in zip(groups.values(), table, strict=True):
            brought = usual(group[0].cfg) | {"preset": ("",)}
            named = [f"{k} {own[k]}" for k in differing if own[k] not in brought.get(k, ())]
            found.append(
                Condition(method + (f" ({', '.join(named)})" if named else ""), tuple(group))
            )

    def place(condition: Condition) -> tuple[Any, ...]:
        method = condition.first.cfg.method
        at = (
            [*INTERVENTIONS].index(method.intervention),
            method.monitor_title,
            [*CONTROLS].index(method.control),
        )
        return *at, condition.title

    return sorted(found, key=place)


def baseline(condition: Condition, among: Sequence[Condition]) -> Condition | None:
    """Plain GRPO that shares all but the method with its files; of plain GRPO with a KL term, which is a baseline of
    its own, the one with the lowest β. None: it is not there, or is this one."""
    own, free = (
        condition.first,
        {f.name for f in fields(MethodConfig)} | {f"{name} sha256" for name in OF_METHOD},
    )
    free |= {"beta"} if own.method == "none" else set()

    def environment(of: FinishedRun) -> dict[str, Any]:
        return {k: v for k, v in of.trained_with.items() if k not in free}

    found = [
        c for c in among if c.first.method == "none" and environment(c.first) == environment(own)
    ]
    lowest = min(found, key=lambda c: c.first.cfg.loss.beta, default=None)
    return None if lowest is condition else lowest
