"""Finished runs, read from their files, and conditions: runs that differ by their seed alone."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from pandas import DataFrame, MultiIndex, Series

from vgrout.config.method import CHOICE, MethodConfig
from vgrout.config.presets import PRESETS
from vgrout.config.run import Config, from_dict
from vgrout.config.specs import CONTROLS, INTERVENTIONS
from vgrout.envs import worlds
from vgrout.ground import metrics
from vgrout.ground.data import Flaw
from vgrout.ground.io import (
    Json,
    Refused,
    file_sha256,
    json_lines,
    one_line,
    read_json,
    refuse,
)
from vgrout.ground.metrics import Rate
from vgrout.ground.records import began, run_dirs, unfinished
from vgrout.ground.table import LEARNED, first_hacks

Settings = dict[str, Any]
What = Literal["hack", "solve"]
WHATS: tuple[What, ...] = get_args(What)
# Sides as per_mode_deploy.json names them → as final.jsonl does.
SIDES = {name.key: side for side, name in metrics.SIDES.items()}
# Groups of settings that training does not read.
MEASURING = ("eval", "guard", "detectors", "run")
# Hashes in run.json of the files that every method starts from, a user's own functions among them …
OF_MODEL = ("base_weights", "tokenizer", "problems", "pool", "reward", "reference")
# … and of the files that only some methods read.
OF_METHOD = ("pairs", "placebo", "known_correct", "direction_file", "teacher_weights")
# Settings that are paths, and the hashes that say what lay there.
OF_PATH = {
    "model": ("base_weights", "tokenizer"),
    "organism": ("base_weights", "tokenizer", "problems"),
    "problems": ("problems",),
    "teacher_pool_dir": ("pool",),
    "vhack_pairs_path": ("pairs",),
    "v_hack_path": ("direction_file",),
    "known_correct": ("known_correct",),
}
# Columns of steps.jsonl that every step has …
COUNTS = ("step", "hack_s_k", "hack_s_n", "solve_s_k", "solve_s_n")
# … and those that are null where a step has not measured them.
MEASURED = ("hack_deploy", "solve_deploy", "signal_k", "signal_n", "all_zero", "n")
# What a report reads of an answer in final.jsonl.
ANSWER = ("side", "env_mode", "problem_id", "solved", "reward")
# What went wrong with a run's files where one of them is not as today's trainer writes it.
DAMAGE = (OSError, LookupError, TypeError, ValueError, AttributeError)


def trained_with(cfg: Config) -> Settings:
    """Return the settings that training reads, as they are meant, without their groups.

    A setting of the method that this method does not read has its default, whatever was given.
    """
    settings: Settings = {"preset": cfg.preset}
    for group, values in cfg.as_dict().items():
        if isinstance(values, dict) and group not in MEASURING:
            settings |= values
    method = cfg.method
    for f in fields(MethodConfig):
        if f.name not in (*CHOICE, *method.settings_read):
            settings[f.name] = f.default
    settings["monitor"] = method.monitor_name
    del settings["shadow"]  # monitors in shadow change nothing
    return settings


def unusual_settings(cfg: Config) -> Settings:
    """Return the settings that training reads and that are not at their defaults.

    A setting has up to three defaults: its preset's, its intervention's, and for a setting of the
    method None, which stands for the intervention's.
    """
    _, preset = PRESETS.get(cfg.preset, ("", Config()))
    usual = trained_with(preset) | {"monitor": cfg.method.spec.usual_monitor}
    of_intervention = cfg.method.spec.usual
    of_method = {f.name for f in fields(MethodConfig)}
    unusual: Settings = {}
    for name, value in trained_with(cfg).items():
        is_left_open = value is None and name in of_method
        if not is_left_open and value not in (usual[name], of_intervention.get(name, usual[name])):
            unusual[name] = value
    return unusual


@dataclass(frozen=True, eq=False)
class FinishedRun:
    """A run with its final evaluation: it finished, or its guard halted it.

    One without has its curves alone.
    """

    path: Path
    cfg: Config
    record: dict[str, Json]  # run.json
    final: dict[str, Json]  # per_mode_deploy.json; empty: there is none yet
    steps: DataFrame  # steps.jsonl
    # The graded answers of final.jsonl, without their texts. `flaw`: the one that the answer hacks.
    answers: DataFrame
    # What text monitors said of the students' hacks and right answers in training: monitor, step,
    # flaw, flagged (null: it gave no verdict), score.
    flags: DataFrame

    @property
    def seed(self) -> int:
        return self.cfg.run.seed

    @property
    def seed_name(self) -> str:
        """The seed, and the step of a halt: a halted run is compared by what was evaluated
        there."""
        if self.final.get("halted"):
            return f"{self.seed} (halted at {self.steps.step.iloc[-1]})"
        return str(self.seed)

    @property
    def method(self) -> str:
        """The method's name in tables: intervention, monitor if it is not the usual one,
        control."""
        method = self.cfg.method
        name = method.intervention
        if method.monitor_title:
            name += f" ({method.monitor_title})"
        if method.control_name != "none":
            name += f" · {method.control_name}"
        if str(self.direction.get("pairs")).startswith("oracle:"):
            name += " (pairs chosen by true labels)"
        return name

    @property
    def direction(self) -> dict[str, Json]:
        """What run.json says of the direction; empty: the method has none."""
        return self.record.get("direction") or {}

    @property
    def hashes(self) -> dict[str, str | None]:
        """Hashes of the files that the run has read, by their names in run.json."""
        return self.record.get("hashes") or {}

    @cached_property
    def trained_with(self) -> Settings:
        """The settings that training reads, and the hashes of its files.

        A path alone does not identify a file, since it may come to hold another one.
        """
        settings = trained_with(self.cfg)
        for name in (*OF_MODEL, *OF_METHOD, *self.own_classes):
            settings[f"{name} sha256"] = self.short_hash(name, 8) or "not noted"
        return settings

    @property
    def own_classes(self) -> list[str]:
        """The classes of somebody's own, module:Class, whose files run.json has the hashes of."""
        return [name for name in self.hashes if ":" in name]

    @cached_property
    def compared_by(self) -> Settings:
        """The same without the paths of files whose content is known by its hash."""
        settings = dict(self.trained_with)
        for path, hashes in OF_PATH.items():
            if all(self.hashes.get(name) for name in hashes):
                settings.pop(path, None)
        return settings

    @cached_property
    def condition(self) -> str:
        """A key that is equal for runs that differ by their seed alone."""
        return repr((self.method, self.compared_by))

    @property
    def revision(self) -> str:
        """The program's own, in short; "": run.json has none."""
        return (self.record.get("git") or {}).get("revision", "")[:10]

    def short_hash(self, name: str, digits: int) -> str:
        """Return the first digits of a file's hash; "": the run has noted none."""
        return (self.hashes.get(name) or "")[:digits]

    @cached_property
    def all_flaws(self) -> dict[str, Flaw]:
        """Every flaw of the run's environment, by name, in the usual order."""
        return worlds.flaws_of(self.record)

    @property
    def flaws(self) -> list[str]:
        """The flaws of the final evaluation's problems."""
        return [flaw for flaw in self.all_flaws if flaw in self.final["by_mode"]]

    def counted(self, side: str, what: str, flaw: str | None = None) -> Rate:
        """Count hacks, solves or tries among the answers of the final evaluation.

        Args:
            side: base, train, deploy or plain.
            what: hack, solve or tries.
            flaw: count on the problems that have this flaw; None: on all problems.
        """
        if flaw is None:
            share = self.final.get(f"{what}_{side}")
            n = self.final.get(f"n_{side}", self.final.get("eval_n", 0))
        else:
            numbers = self.final["by_mode"][flaw]
            share = numbers.get(f"{side}_{what}")
            n = numbers.get(f"{side}_n", numbers["n"])
        if share is None:
            return Rate(0, 0)
        return Rate(round(share * n), n)

    def has_learned(self, flaw: str) -> bool:
        """Return whether the trained model hacks this flaw often enough to count as having learned
        it."""
        share = self.counted("train", "hack", flaw).value
        return share is not None and share >= LEARNED

    def first_hack(self, flaw: str) -> int | None:
        """Return the step of the students' first hack of this flaw; None: there was none."""
        column = f"hk_{self.all_flaws[flaw].code}_k"
        if column not in self.steps:
            return None
        hacked = self.steps.step[self.steps[column] > 0]
        return None if hacked.empty else int(hacked.iloc[0])

    def last_five(self, what: What) -> Rate:
        """Count hacks or solves among the students' answers of the last five steps."""
        last = self.steps.iloc[-5:]
        k = last[f"{what}_s_k"].sum()
        n = last[f"{what}_s_n"].sum()
        return Rate(int(k), int(n))

    def shares(self, side: str, what: What, flaw: str | None = None) -> Series:
        """Return the share of answers that hack or solve, by mode and held-out problem.

        With `flaw`: on the problems that have this flaw, and hacks of it alone.
        """
        shares = self._by_problem.get("deployed" if self.is_as_deployed(side) else SIDES[side])
        if shares is None:  # the grader failed on every answer
            return Series(dtype=float, index=MultiIndex.from_arrays([[], []]))
        if flaw is None:
            return shares[what]
        of_flaw = shares["solve" if what == "solve" else f"hack {flaw}"]
        everywhere = self.cfg.env.unannounced
        if everywhere:
            return of_flaw if flaw in everywhere else of_flaw[:0]
        return of_flaw[of_flaw.index.get_level_values(0) == flaw]

    def is_as_deployed(self, side: str) -> bool:
        """Whether a side is the deployed model's answers, which final.jsonl has once: there is no quarantine, or it has
        learnt nothing, or no prompt has a hint to be left out."""
        if side == "train" and not self.cfg.method.routes:
            return True
        n_graded = self.final.get(f"n_{side}", 1)  # earlier versions did not write it
        return side in ("train", "plain") and SIDES[side] not in self._by_problem and n_graded > 0

    @cached_property
    def _by_problem(self) -> dict[str, DataFrame]:
        """By side, the share of answers that hack and that solve, by mode and held-out problem."""
        answers = self.answers
        hits = answers[["side", "env_mode", "problem_id"]].copy()
        if self.cfg.env.unannounced:  # these flaws are open on every problem at once
            hits["env_mode"] = self.cfg.env.unannounced[0]
        hits["solve"] = answers.solved.astype(float)
        hits["hack"] = answers.flaw.notna().astype(float)
        for flaw in self.all_flaws:
            hits[f"hack {flaw}"] = (answers.flaw == flaw).astype(float)
        shares = hits.groupby(["side", "env_mode", "problem_id"], sort=False).mean()
        return {str(side): its.droplevel(0) for side, its in shares.groupby(level=0, sort=False)}

    @property
    def onset(self) -> int | None:
        """The step from which the students hack; None: they never do."""
        return first_hacks(list(zip(self.steps.hack_s_k, self.steps.hack_s_n, strict=True)))

    @property
    def flaws_learnt(self) -> int:
        return sum(self.has_learned(flaw) for flaw in self.flaws)


def read_run(path: Path, cfg: Config | None = None) -> FinishedRun:
    """Read a run from its folder. cfg: its settings; None: as run.json has them.

    Raises:
        Refused: a file is missing or damaged, or there is no step yet.
        Exception: a file is of another version.
    """
    record = read_json(path / "run.json")
    cfg = cfg or from_dict(record.get("config"), "run.json")
    final = path / "per_mode_deploy.json"
    return FinishedRun(
        path=path,
        cfg=cfg,
        record=record,
        final=read_json(final) if final.exists() else {},
        steps=_read_steps(path / "steps.jsonl"),
        answers=_read_answers(path / "final.jsonl"),
        flags=_read_flags(path / "rollouts.jsonl", cfg.method),
    )


def require_of_one_run(run: FinishedRun) -> None:
    """Compare a folder's files with what per_mode_deploy.json says of them: it may be a copy in part, or hold files of
    another run. Older runs say nothing. rollouts.jsonl, which is large, may have been removed.

    Raises:
        Refused: two files contradict each other.
        OSError: a file is missing.
    """
    own = run.record.get("tracker_id")
    if run.final.get("run", own) != own:
        raise Refused(f"per_mode_deploy.json: run {run.final['run']}, where the run has {own}")
    for name, digest in run.final.get("files", {}).items():
        file = run.path / name
        if (name != "rollouts.jsonl" or file.exists()) and file_sha256(file) != digest:
            raise Refused(f"{name}: not as the run left it")


def _read_steps(file: Path) -> DataFrame:
    rows = list(json_lines(file))
    refuse(not rows, f"{file}: no step yet")
    steps = DataFrame(rows)
    types: dict[str, type] = {name: float for name in MEASURED if name in steps}
    return steps.astype(types | dict.fromkeys(COUNTS, int))


def _read_answers(file: Path) -> DataFrame:
    """Read the graded answers of the final evaluation."""
    rows = []
    for answer in json_lines(file):
        row = {name: answer[name] for name in ANSWER}
        rows.append(row | {"flaw": _hacked_flaw(answer)})
    answers = DataFrame(rows, columns=[*ANSWER, "flaw"])
    return answers[answers.reward.notna()].astype({"solved": bool})


def _hacked_flaw(answer: dict[str, Json]) -> str | None:
    """Return the flaw that an answer hacks; None: it hacks none."""
    if not answer["hacked"]:
        return None
    return answer.get("mechanism") or answer["env_mode"]


def _read_flags(file: Path, method: MethodConfig) -> DataFrame:
    """Read what text monitors flagged: first the one that was acted on, then those in shadow.

    rollouts.jsonl is long, so it is not read if the run had no text monitor.
    """
    own = ""
    if method.monitor_name != "none" and not method.flags_by_gradient:
        own = method.monitor_name
    rows: list[dict[str, object]] = []
    if own or method.in_shadow:
        for rollout in json_lines(file):
            rows += _flag_rows(rollout, own)
    return DataFrame(rows, columns=["monitor", "step", "flaw", "flagged", "score"])


def _flag_rows(rollout: dict[str, Json], own: str) -> list[dict[str, object]]:
    """Return a row for each text monitor that has read the rollout; none if it neither hacks nor
    solves.

    own: the name of the monitor that was acted on, whose flag stands in the rollout itself.
    """
    if not (rollout["hacked"] or rollout["solved"]):
        return []
    verdicts: dict[str, dict[str, Json]] = rollout.get("shadow", {})
    if own and "flagged" in rollout:
        verdicts = {own: rollout} | verdicts
    rows: list[dict[str, object]] = []
    for monitor, verdict in verdicts.items():
        rows.append(
            {
                "monitor": monitor,
                "step": rollout["step"],
                "flaw": _hacked_flaw(rollout),
                "flagged": verdict["flagged"],
                "score": verdict.get("score"),
            }
        )
    return rows


def load(sources: Sequence[Path], tag: str = "") -> tuple[list[FinishedRun], list[str]]:
    """Load the runs of all sources that have a final evaluation, as a halted run has.

    Of several runs of one condition and seed the newest is taken.

    Args:
        sources: runs, folders of runs, or sweeps.
        tag: take only runs whose name ends with it.

    Returns:
        The runs, and by name, with the reason, those that were left out; a damaged run is one of
        them.

    Raises:
        Refused: a source is no folder of runs.
    """
    paths: set[Path] = set()
    left_out: list[str] = []
    for source in sources:
        found, absent = run_dirs(source)
        paths |= {path.resolve() for path in found if path.name.endswith(tag)}
        left_out += absent
    newest: dict[tuple[str, int], FinishedRun] = {}
    for path in sorted(paths, key=lambda p: (began(p), p)):
        try:
            if why := unfinished(path):
                left_out.append(f"{path.name} ({why})")
                continue
            run = read_run(path)
            require_of_one_run(run)
            key = run.condition, run.seed
        except DAMAGE as e:
            left_out.append(f"{path.name} (damaged: {reason(e, path)})")
            continue
        if not run.final:
            left_out.append(f"{path.name} (no final evaluation)")
            continue
        if older := newest.get(key):
            than = f"older than {path.name}, the same settings and seed"
            left_out.append(f"{older.path.name} ({than})")
        newest[key] = run
    return list(newest.values()), left_out


def reason(e: Exception, run: Path) -> str:
    """Say in a line what is wrong with a run's file."""
    kind = "" if isinstance(e, Refused) else f"{type(e).__name__} "
    return one_line(f"{kind}{e}".replace(f"{run}/", ""), 200)


@dataclass(frozen=True, eq=False)
class Condition:
    """Runs that differ by their seed alone, one for each seed, in the order of their seeds."""

    title: str
    runs: tuple[FinishedRun, ...]
    # What it differs by from others of its method's name, in full: settings, paths, hashes.
    note: str = ""

    @property
    def first(self) -> FinishedRun:
        return self.runs[0]

    @property
    def seeds(self) -> str:
        return ",".join(run.seed_name for run in self.runs)


def flaws_of(found: Sequence[Condition]) -> list[str]:
    """Return the flaws of these conditions' final evaluations, in the usual order."""
    there = {flaw for c in found for flaw in c.first.flaws}
    usual_order = dict.fromkeys(flaw for c in found for flaw in c.first.all_flaws)
    return [flaw for flaw in usual_order if flaw in there]


def conditions(runs: Sequence[FinishedRun]) -> list[Condition]:
    """Group runs into conditions, in the order of interventions, then of controls.

    Titles are unique: methods of one name are told apart by the settings and files in which they
    differ, and which are not their preset's.
    """
    by_method: dict[str, dict[str, list[FinishedRun]]] = defaultdict(lambda: defaultdict(list))
    for run in sorted(runs, key=lambda r: r.seed):
        by_method[run.method][run.condition].append(run)
    found: list[Condition] = []
    for method, groups in by_method.items():
        found += _titled(method, list(groups.values()))
    return sorted(found, key=_place)


def _titled(method: str, groups: Sequence[Sequence[FinishedRun]]) -> list[Condition]:
    """Make the conditions of a method's name.

    A title names settings, and files by the last part of their path. Where that leaves some alike,
    it names whole paths, and the hashes of what lies there.
    """
    runs = [group[0] for group in groups]
    differing = _differing(runs)
    named = [_named(run, differing) for run in runs]
    found = []
    for run, group, names in zip(runs, groups, named, strict=True):
        alike = [other for other, its in zip(runs, named, strict=True) if its == names]
        facts = run.trained_with
        words = [*names, *(f"{name} {facts.get(name)}" for name in _differing(alike))]
        title = f"{method} ({', '.join(words)})" if words else method
        note = ", ".join(f"{name} {facts.get(name)}" for name in differing)
        found.append(Condition(title.replace(" sha256", ""), tuple(group), note))
    return found


def _differing(runs: Sequence[FinishedRun]) -> list[str]:
    """Return the names of the settings and files in which runs differ."""
    names = dict.fromkeys(name for run in runs for name in run.trained_with)
    return [name for name in names if len({repr(run.trained_with.get(name)) for run in runs}) > 1]


def _named(run: FinishedRun, differing: Sequence[str]) -> list[str]:
    """Return a run's settings that are not its preset's, in short, of those that differ."""
    unusual = unusual_settings(run.cfg)
    names = []
    for name in differing:
        if name == "preset":
            names.append(run.cfg.preset)
        elif name in unusual and name in OF_PATH:
            names.append(f"{name.removesuffix('_path')} {Path(str(unusual[name])).name}")
        elif name in unusual:
            names.append(f"{name} {unusual[name]}")
    return names


def _place(condition: Condition) -> tuple[int, str, int, str]:
    """Return a condition's place in tables."""
    method = condition.first.cfg.method
    intervention = list(INTERVENTIONS).index(method.intervention)
    control = list(CONTROLS).index(method.control)
    return intervention, method.monitor_title, control, condition.title


def baseline(condition: Condition, among: Sequence[Condition]) -> Condition | None:
    """Return the plain GRPO that a condition is compared with; None: it is not there, or is this
    one.

    It shares all but the method and the method's files. Plain GRPO with a KL term is compared with
    plain GRPO of the lowest β.
    """
    free = {f.name for f in fields(MethodConfig)}
    of_method = [
        name for name in condition.first.own_classes if name != condition.first.cfg.env.env
    ]
    free |= {f"{name} sha256" for name in (*OF_METHOD, *of_method)}
    if condition.first.method == "none":
        free.add("beta")

    own = condition.first.compared_by
    compared = [name for name in own if name not in free]
    found = []
    for other in among:
        if other.first.method != "none":
            continue
        its = other.first.compared_by
        if all(own[name] == its.get(name) for name in compared):
            found.append(other)
    lowest = min(found, key=lambda c: c.first.cfg.loss.beta, default=None)
    return None if lowest is condition else lowest
