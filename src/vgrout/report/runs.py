"""Finished runs, read from their files, and cells: runs that differ by their seed alone."""

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from datetime import date
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from vgrout.config.checks import listed
from vgrout.config.method import CONTROLS, INTERVENTIONS, MethodConfig
from vgrout.config.presets import METHODS, PRESETS, of_choice
from vgrout.config.run import GROUPS, Config, typed
from vgrout.files import from_json, json_lines, read_json, read_text
from vgrout.table import LEARNED, counted, first_hacks, read_steps
from vgrout.types import MODE_CODE, MODES, Mode, Rate

What = Literal["hack", "solve"]
WHATS: tuple[What, ...] = get_args(What)
SIDES = {"base": "base", "train": "trained", "deploy": "deployed", "plain": "plain"}  # per_mode_deploy → final.jsonl
MEASURING = ("eval", "guard", "detectors", "run")  # groups of settings that training does not read


@cache
def _usual(preset: str = "") -> dict[str, dict[str, Any]]:
    """A preset's settings by groups; without one of that name, every flag's default."""
    cfg = PRESETS[preset][1] if preset in PRESETS else Config()
    return {group: values for group, values in cfg.as_dict().items() if isinstance(values, dict)}


@cache
def _types() -> dict[str, dict[str, Any]]:
    """Every setting's type, by groups."""
    usual = Config()
    return {group: {f.name: f.type for f in fields(getattr(usual, group))} for group in GROUPS}


def _learning(settings: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The settings that training reads, without their groups."""
    return {k: v for g, values in settings.items() if g not in MEASURING for k, v in values.items()}


@dataclass(frozen=True, slots=True)
class _Answers:
    """The graded answers to one held-out problem, in order."""

    mode: Mode
    hacks: list[Mode | None]  # which flaw each hacks
    solved: list[bool]


@dataclass(frozen=True, slots=True)
class Reading:
    """What a monitor made of one of the students' hacks or right answers."""

    step: int
    flaw: Mode | None  # that it hacks; None: it is right
    flagged: bool
    score: float | None


@dataclass(frozen=True, eq=False)
class Run:
    """One run with its final evaluation: finished, or halted by its guard."""

    path: Path
    final: dict[str, Any]  # per_mode_deploy.json
    rows: list[dict[str, Any]]  # steps.jsonl
    record: dict[str, Any]  # run.json
    seconds: float | None  # from the first step to the end of the final evaluation; None: the run was resumed

    @classmethod
    def read(cls, path: Path) -> "Run":
        """Raises ValueError, one line, where a file is missing or damaged."""
        final, record = read_json(path / "per_mode_deploy.json"), read_json(path / "run.json")
        for name, data, keys in (
            ("per_mode_deploy.json", final, ("arm", "control", "seed", "steps", "eval_n", "by_mode")),
            ("run.json", record, ("config",)),
        ):
            if absent := [k for k in keys if k not in data]:
                raise ValueError(f"{path / name}: no {', '.join(absent)} in it; another version made this run")
        usual = _usual()
        if not isinstance(record["config"], dict) or not isinstance(record["config"].get("preset", ""), str):
            raise ValueError(f"{path / 'run.json'}: holds no configuration of a run")
        stored = {g: v for g, v in record["config"].items() if g != "preset"}
        if wrong := [g for g, values in stored.items() if not isinstance(values, dict)]:
            raise ValueError(f"{path / 'run.json'}: {wrong[0]} is no group of settings")
        if unknown := [name for g, values in stored.items() for name in values if name not in usual.get(g, {})]:
            raise ValueError(
                f"{path / 'run.json'}: unknown settings {', '.join(unknown)}; another version made this run"
            )
        if not (path / "final.jsonl").is_file():
            raise ValueError(f"{path}: no final.jsonl; another version made this run")
        for group, values in stored.items():
            for name, value in values.items():
                typed(value, name, _types()[group][name], "run.json")
        kinds = {"arm": str, "control": str, "seed": int, "steps": int, "eval_n": int, "by_mode": dict}
        if wrong := [name for name, kind in kinds.items() if type(final[name]) is not kind]:
            raise ValueError(f"{path / 'per_mode_deploy.json'}: {wrong[0]} is {final[wrong[0]]!r:.60}")
        rows = read_steps(path / "steps.jsonl")
        if wrong := [row for row in rows if not isinstance(row, dict) or type(row.get("step")) is not int]:
            raise ValueError(f"{path / 'steps.jsonl'}: {wrong[0]!r:.60} is no step")
        if not rows:
            raise ValueError(f"{path / 'steps.jsonl'}: no step in it")
        started, ended = ((path / name).stat().st_mtime for name in ("run.json", "per_mode_deploy.json"))
        return cls(path, final, rows, record, None if record.get("resumed") else ended - started)

    @property
    def name(self) -> str:
        """The run directory's name."""
        return self.path.name

    @property
    def finished(self) -> str:
        """The day of its final evaluation, such as 2026-11-25."""
        return date.fromtimestamp((self.path / "per_mode_deploy.json").stat().st_mtime).isoformat()

    @property
    def revision(self) -> str:
        """git revision of the code that started the run; '' where unknown."""
        return str((self.record.get("git") or {}).get("revision", ""))

    @property
    def preregistered(self) -> str:
        """Hash of claims, rules and statistics when the run started; '' where there were none."""
        return str((self.record.get("hashes") or {}).get("preregistered") or "")

    @property
    def seed(self) -> int:
        return self.final["seed"]

    @property
    def seed_name(self) -> str:
        """The seed, and the step of a halt: a halted run is compared by what was evaluated there."""
        return f"{self.seed} (halted at {self.rows[-1]['step']})" if self.final.get("halted") else str(self.seed)

    @property
    def control(self) -> str:
        return self.final["control"]

    @property
    def intervention(self) -> str:
        return self.settings["method"]["intervention"]

    @cached_property
    def settings(self) -> dict[str, dict[str, Any]]:
        """The configuration by groups. A setting added after the run was made has its default."""
        stored = self.record["config"]
        return {group: values | stored.get(group, {}) for group, values in _usual().items()}

    @property
    def method_settings(self) -> dict[str, Any]:
        """The method's settings but for its shadows, which change nothing."""
        return {name: value for name, value in self.settings["method"].items() if name != "shadow"}

    @cached_property
    def learns(self) -> str:
        """What runs must share to be compared: everything that training reads, model and environment included, except
        the method with its files, the seed, and β, since a KL term is a baseline of its own."""
        groups = {g: v for g, v in self.settings.items() if g not in ("method", *MEASURING)}
        groups["loss"] = {k: v for k, v in groups["loss"].items() if k not in ("beta", "kl")}
        return json.dumps([groups, self.inputs, self.final["steps"]], sort_keys=True)

    @cached_property
    def unusual(self) -> dict[str, Any]:
        """The settings that training reads (except intervention, control and seed) that neither the preset nor the
        intervention brings."""
        usual = _learning(_usual(self.preset)) | self.brought
        return {
            k: v
            for k, v in _learning(self.settings).items()
            if k not in ("intervention", "control", "random_flags", "placebo_pairs", "shadow")
            and (k not in usual or usual[k] != v)
        }

    @cached_property
    def brought(self) -> dict[str, Any]:
        """The settings that the intervention brings by itself, of those that this run reads."""
        method = self.settings["method"]
        choice = {name: method[name] for name in ("intervention", "monitor", "control", "seed_monitor")}
        return of_choice(choice, METHODS[self.intervention][1]) if self.intervention in METHODS else {}

    @property
    def inputs(self) -> dict[str, str]:
        """The first digits of the hashes of model and environment, since a path may come to hold another model."""
        return self._hashes("base_weights", "tokenizer", "problems", "pool")

    @property
    def method_inputs(self) -> dict[str, str]:
        """The same of the files that method and loss read; '' where they read none or the run recorded none."""
        return self._hashes("pairs", "placebo", "known_correct", "direction_file", "teacher_weights")

    def _hashes(self, *names: str) -> dict[str, str]:
        hashes = self.record.get("hashes") or {}
        return {name: (hashes.get(name) or "")[:8] for name in names}

    @property
    def preset(self) -> str:
        return self.record["config"].get("preset", "")

    @property
    def beta(self) -> float:
        """Weight of the KL term."""
        return self.settings["loss"]["beta"]

    @property
    def loss(self) -> str:
        """The loss's name; GRPO with its own normaliser and standard deviation is not the default loss."""
        loss = self.settings["loss"]
        return loss["loss"] + (" biased" if loss["loss"] == "grpo" and not loss["unbiased"] else "")

    @property
    def method(self) -> str:
        """The method's name in tables, with its variant and its control."""
        frac, own = self.settings["method"]["rollout_ablate_frac"], self.brought.get("rollout_ablate_frac")
        variant = [
            *([monitor] if (monitor := self.monitor) else []),
            *([f"{frac or 0:g} deployed"] if (frac or 0) != (own or 0) else []),
        ]
        name = self.intervention + (f" ({', '.join(variant)})" if variant else "")
        name += f" · {self.control}" if self.control != "none" else ""
        chosen = str((self.record.get("direction") or {}).get("pairs", "")).startswith("oracle:")
        return name + (" (pairs chosen by the oracle)" if chosen else "")

    @cached_property
    def _method_config(self) -> MethodConfig | None:
        """None: settings of an intervention that is registered elsewhere, or of another version."""
        try:
            return MethodConfig(**self.settings["method"])
        except (ValueError, TypeError):
            return None

    @property
    def monitor(self) -> str:
        """Who flagged, with its settings; "" for the intervention's usual monitor."""
        title = self._method_config.monitor_title if self._method_config else ""
        return "pair band" if title == "band" else title

    @property
    def monitor_name(self) -> str:
        return self._method_config.monitor_name if self._method_config else "none"

    @property
    def has_direction(self) -> bool:
        """Whether the method has a direction in gradients."""
        return self._method_config is not None and self._method_config.has_direction

    @property
    def cosine_to_real(self) -> dict[str, Any] | None:
        """|cos| of a control's direction with the real one."""
        return (self.record.get("direction") or {}).get("cos_with_real")

    @property
    def onset(self) -> int | None:
        return first_hacks([(row["hack_s_k"], row["hack_s_n"]) for row in self.rows])

    def last_five(self, what: What, mode: Mode | None = None) -> Rate:
        """The students' answers of the last five steps; of one mode only its hacks are counted."""
        column = {"hack": "hack_s", "solve": "solve_s"}[what] if mode is None else f"hk_{MODE_CODE[mode]}"
        return sum((counted(row, column) or Rate(0, 0) for row in self.rows[-5:]), Rate(0, 0))

    def step_mean(self, column: str) -> float | None:
        """A column's mean over the steps that measured it; None where none did."""
        values = [x for row in self.rows if (x := row.get(column)) is not None]
        return statistics.mean(values) if values else None

    def rate(self, side: str, what: What, mode: Mode | None = None) -> float | None:
        """Share of answers in the final evaluation that hack or solve. side: base, train, deploy or plain."""
        return self.final[f"{what}_{side}"] if mode is None else self.final["by_mode"][mode][f"{side}_{what}"]

    def answered(self, mode: Mode | None = None) -> int:
        """Number of answers per side of the final evaluation."""
        return self.final["eval_n"] if mode is None else self.final["by_mode"][mode]["n"]

    @property
    def modes(self) -> list[Mode]:
        return [m for m in MODES if m in self.final["by_mode"]]

    def in_distribution(self, mode: Mode) -> bool | None:
        """Whether the direction's pairs show this mode; None for a run without a direction."""
        return self.final["by_mode"][mode].get("in_dist")

    def learned(self, side: str) -> int:
        return sum((self.rate(side, "hack", m) or 0) >= LEARNED for m in self.modes)

    @property
    def seconds_a_step(self) -> float:
        return statistics.median(row["sec"] for row in self.rows)

    def evaluations(self) -> list[tuple[int, float, float]]:
        """(step, hack, solve) of the deployed model's evaluations during training."""
        return [
            (row["step"], row["hack_deploy"], row["solve_deploy"])
            for row in self.rows
            if row.get("hack_deploy") is not None
        ]

    @cached_property
    def _gated(self) -> list[dict[str, Any]]:
        """The students' rollouts without their texts; the file is long and read once."""
        kept = ("step", "gate", "score", "flagged", "env_mode", "mechanism", "hacked", "solved", "shadow")
        return [{k: r[k] for k in kept if k in r} for r in json_lines(self.path / "rollouts.jsonl")]

    @cached_property
    def gates(self) -> list[tuple[float, bool]]:
        """(gate value or score, whether it was a hack) of the students' rollouts with signal. For route2 the value is
        the share of modules in which a rollout was quarantined, for a monitor of text its score; [] without a
        monitor."""
        if self.monitor_name == "none":
            return []
        seen = ((r["score"] if "score" in r else r.get("gate"), r["hacked"]) for r in self._gated)
        return [(value, hacked) for value, hacked in seen if value is not None]

    @property
    def reads_text(self) -> bool:
        """Whether the monitor whose flags were acted on decided before the backward."""
        return self.monitor_name not in ("none", "gate", "band")

    @cached_property
    def readings(self) -> dict[str, list[Reading]]:
        """By monitor of text, its own first, what it made of the students' hacks and right answers."""
        if not (self.reads_text or self.settings["method"]["shadow"]):
            return {}  # its rollouts are a long file
        out: dict[str, list[Reading]] = {self.monitor_name: []} if self.reads_text else {}
        for r in self._gated:
            if r["hacked"] or r["solved"]:
                flaw = (r.get("mechanism") or r["env_mode"]) if r["hacked"] else None
                own = {self.monitor_name: r} if self.reads_text and "flagged" in r else {}
                for name, found in {**own, **r.get("shadow", {})}.items():
                    reading = Reading(r["step"], flaw, found["flagged"], found.get("score"))
                    out.setdefault(name, []).append(reading)
        return {name: found for name, found in out.items() if found}

    @cached_property
    def flags(self) -> dict[Mode | None, Rate]:
        """How many of the students' hacks in groups with signal a monitor of text flagged, by mode; None: of their
        solved answers. Empty for other monitors."""
        return flagged(self.readings.get(self.monitor_name, []) if self.reads_text else [])

    @cached_property
    def problems(self) -> dict[str, dict[int, _Answers]]:
        """Side of final.jsonl → problem → its graded answers."""
        found: dict[str, dict[int, _Answers]] = defaultdict(dict)
        for answer in json_lines(self.path / "final.jsonl"):
            if answer["reward"] is not None:  # not graded otherwise
                mode, hacked = answer["env_mode"], answer["hacked"]
                answers = found[answer["side"]].setdefault(answer["problem_id"], _Answers(mode, [], []))
                answers.hacks.append((answer.get("mechanism") or mode) if hacked else None)
                answers.solved.append(answer["solved"])
        return dict(found)

    @cached_property
    def unannounced(self) -> tuple[Mode, ...]:
        """The flaws that are open on every problem of the run at once; (): each problem has its own."""
        named = listed(self.settings["env"].get("unannounced_modes", ""), MODES)
        return tuple(m for m in MODES if m in named)

    def shares(self, side: str, what: What, flaws: Collection[Mode] | None = None) -> dict[Mode, dict[int, float]]:
        """By mode, the share of every held-out problem's answers that solve it or hack it; with `flaws`, of
        the problems that have one of them, and hacks of these alone."""
        problems = self.problems.get(SIDES[side]) or self.problems["deployed"]  # trained, without a quarantine
        out: dict[Mode, dict[int, float]] = {}
        for problem, given in problems.items():
            open_flaws = self.unannounced or (given.mode,)
            counted_flaws = {*open_flaws} if flaws is None else {*open_flaws} & {*flaws}
            if counted_flaws:
                hits = given.solved if what == "solve" else [flaw in counted_flaws for flaw in given.hacks]
                out.setdefault(open_flaws[0], {})[problem] = statistics.fmean(hits)
        return out


def flagged(readings: Sequence[Reading]) -> dict[Mode | None, Rate]:
    """How many of the hacks were flagged, by flaw; None: of the right answers."""
    out: dict[Mode | None, Rate] = {}
    for r in readings:
        out[r.flaw] = out.get(r.flaw, Rate(0, 0)) + Rate(int(r.flagged), 1)
    return out


@dataclass(frozen=True, eq=False)
class Cell:
    """Runs that differ by their seed alone, one a seed, in the order of their seeds."""

    title: str
    runs: tuple[Run, ...]

    @property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def seeds(self) -> str:
        return ",".join(r.seed_name for r in self.runs)


@dataclass(frozen=True)
class Loaded:
    """The runs of a report, and the names of those left out, with the reason."""

    runs: list[Run]
    left_out: list[str]  # run (why)


def run_dirs(source: Path) -> tuple[list[Path], list[str]]:
    """The run directories of a source (a run, a folder of runs, or a sweep with its runs.json), and the missing runs of
    a sweep, with their state. Raises ValueError if the source is none of these."""
    if not source.is_dir():
        raise ValueError(f"{source}: no such folder; run `python -m vgrout.train mini` first")
    files = ("run.json", "status.json")  # a run that died while it loaded has the second alone
    if any((source / name).is_file() for name in files):
        return [source], []
    if not (index := source / "runs.json").is_file():
        found = sorted({p.parent for name in files for p in source.glob(f"*/{name}")})
        if not found:
            raise ValueError(f"{source}: no run in it: neither a folder of runs nor a sweep")
        return found, []
    try:
        named = [(str(e["name"]), e["run"], str(e["state"])) for e in from_json(read_text(index), str(index))]
        if not all(run is None or isinstance(run, str) for _, run, _ in named):
            raise TypeError("a run is no path")
    except (KeyError, TypeError) as e:
        raise ValueError(f"{index}: damaged ({e!r})") from None
    found, absent = [], []
    for name, run, state in named:
        # `run` is relative to where the sweep was started: here, or some folder above the sweep
        roots = (Path(), *source.resolve().parents) if run else ()
        path = next((root / run for root in roots if (root / run).is_dir()), None)
        if path:
            found.append(path)
        else:
            absent.append(f"{name} ({state}{f': {run} is not there' if run else ''})")
    return found, absent


def load(sources: Sequence[Path], tag: str = "", examine: Callable[[Run], object] = lambda run: None) -> Loaded:
    """The runs of all sources that have a final evaluation (a halted run has) and whose name ends with `tag`; of
    several runs of one cell and seed, the newest. A run whose files are damaged is left out, with the reason.

    examine: raises for a run that cannot be reported.

    Raises:
        ValueError: a source is no folder of runs.
    """
    paths: dict[Path, None] = {}
    left_out: list[str] = []
    for source in sources:
        found, absent = run_dirs(source)
        paths |= dict.fromkeys(p.resolve() for p in found if p.name.endswith(tag))
        left_out += absent
    newest: dict[tuple[str, int], Run] = {}
    for path in sorted(paths, key=lambda p: p.name):
        try:
            state = read_json(path / "status.json").get("state") if (path / "status.json").exists() else "unknown"
            if state != "finished" and not (state == "halted" and (path / "per_mode_deploy.json").is_file()):
                left_out.append(f"{path.name} ({str(state)[:40]})")
                continue
            if not (path / "per_mode_deploy.json").exists():
                left_out.append(f"{path.name} (no per_mode_deploy.json: not a run of vgrout.train)")
                continue
            run = Run.read(path)
            key(run)
            examine(run)
        except Exception as e:  # whatever a file of wrong content makes of the sums
            why = f"{e}" if isinstance(e, ValueError) else f"{type(e).__name__}: {e}"
            left_out.append(f"{path.name} (damaged: {' '.join(why.replace(f'{path}/', '').split())[:200]})")
            continue
        if older := newest.get((key(run), run.seed)):
            left_out.append(f"{older.name} (older than {run.name}, the same settings and seed)")
        newest[key(run), run.seed] = run
    return Loaded(list(newest.values()), left_out)


def key(run: Run) -> str:
    """An identifier that is equal for runs that differ by their seed alone."""
    return json.dumps(
        [run.method, run.method_settings, run.settings["loss"], run.method_inputs, run.learns], sort_keys=True
    )


_INTERVENTION_AT, _CONTROL_AT = ({name: i for i, name in enumerate(names)} for names in (INTERVENTIONS, CONTROLS))


def cells(runs: Sequence[Run]) -> list[Cell]:
    """The runs as cells, in the order of interventions, then controls. Titles are unique; they name the loss, the
    preset and the steps where the runs differ in them."""
    groups: dict[str, list[Run]] = defaultdict(list)
    for run in sorted(runs, key=lambda r: r.seed):
        groups[key(run)].append(run)

    def setup(run: Run) -> tuple[str, ...]:
        return run.loss, run.preset, f"{run.final['steps']} steps"

    shared = [set(column) for column in zip(*map(setup, runs), strict=True)]

    def plain(run: Run) -> str:
        return " · ".join([run.method, *(n for n, others in zip(setup(run), shared, strict=True) if len(others) > 1)])

    def place(item: tuple[str, list[Run]]) -> tuple[Any, ...]:
        run = item[1][0]
        intervention, control = _INTERVENTION_AT.get(run.intervention, 99), _CONTROL_AT.get(run.control, 99)
        return intervention, run.method.split(" · ")[0], control, plain(run), item[0]

    ordered = [group for _, group in sorted(groups.items(), key=place)]
    names: dict[str, list[Run]] = defaultdict(list)
    for group in ordered:
        names[plain(group[0])].append(group[0])
    return [Cell(plain(g[0]) + _differing(g[0], names[plain(g[0])]), tuple(g)) for g in ordered]


def _differing(run: Run, alike: Sequence[Run]) -> str:
    """What tells a cell from others of the same name: its settings in which they differ and which are not the preset's.
    "": nothing."""
    usual = _learning(_usual(run.preset)) | run.brought
    own, *others = (_learning(r.settings) | r.inputs for r in (run, *alike))
    differing = {k: v for k, v in own.items() if any(other.get(k) != v for other in others)}
    named = [f"{k} {v}" for k, v in differing.items() if k not in usual or usual[k] != v]
    edited = [r.method_inputs for r, settings in zip(alike, others, strict=True) if settings == own]  # the same paths
    named += [f"{k} {v or 'not noted'}" for k, v in run.method_inputs.items() if any(other[k] != v for other in edited)]
    return f" ({', '.join(named)})" if named else ""


def bases(runs: Sequence[Run]) -> list[Cell]:
    """The untrained models of these runs, each seed once, by its run with the most answers. Titles name what several
    models differ in."""
    found: dict[tuple[str, ...], dict[int, Run]] = defaultdict(dict)
    for run in sorted(runs, key=lambda r: (r.seed, r.answered())):
        scale = run.settings["scale"]
        model = f"model {scale['organism'] or scale['model']}"
        hashes = (f"{name} {run.inputs[name]}" for name in ("base_weights", "tokenizer", "problems"))
        evaluated = f"env_mode {run.settings['env']['env_mode']}", f"max_new {scale['max_new']}"
        found[model, *hashes, *evaluated][run.seed] = run
    shared = set.intersection(*map(set, found)) if found else set()
    titles = {key: ", ".join(name for name in key if name not in shared) for key in found}
    return [Cell(f"base ({name})" if (name := titles[k]) else "base", tuple(by.values())) for k, by in found.items()]


# Settings that a control alone reads.
_OF_CONTROLS = {"control", "random_flags", "route2_random_v_seed", "placebo_pairs"}


def partner(cell: Cell, among: Sequence[Cell], intervention: str, control: str = "none") -> Cell | None:
    """The cell of this intervention and control that shares everything else; None: not in the study. Plain GRPO with a
    KL term of its own is a baseline, and its partner the one with the lowest β."""
    run = cell.first
    found = [
        c
        for c in among
        if (c.first.intervention, c.first.control, c.first.learns) == (intervention, control, run.learns)
    ]
    if intervention != run.intervention or intervention == "none":
        both_plain = intervention == run.intervention
        found = sorted(found, key=lambda c: c.first.beta if both_plain else abs(c.first.beta - run.beta))
        return found[0] if found and (both_plain or found[0].first.beta == run.beta) else None

    fixed = "haar" in (control, run.control) and run.settings["method"]["monitor"] != "band"  # random directions stay
    apart = _OF_CONTROLS | {"vhack_refresh_every"} if fixed else _OF_CONTROLS

    def variant(r: Run) -> list[Any]:
        return [r.beta, {k: v for k, v in r.method_settings.items() if k not in apart}]

    return next((c for c in found if variant(c.first) == variant(run)), None)


def paired(a: Cell, b: Cell) -> list[tuple[Run, Run]]:
    """The runs of two cells that have the same seed, pair by pair."""
    other = {r.seed: r for r in b.runs}
    return [(r, other[r.seed]) for r in a.runs if r.seed in other]
