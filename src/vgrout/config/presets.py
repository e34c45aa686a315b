"""Presets, which are values, and the command line of `vgrout train` on top of them. Torch-free."""

import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, field, fields, make_dataclass, replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import tyro

from vgrout import embedded
from vgrout.cli import as_typed, command, join_help, parsed, with_lists
from vgrout.config.checks import changed, flag, legal_values, listed, refuse_unread, rule_of
from vgrout.config.env import EnvConfig
from vgrout.config.groups import ORGANISM, EvalConfig, OptConfig, ScaleConfig
from vgrout.config.loss import LossConfig
from vgrout.config.names import translated
from vgrout.config.run import GROUPS, Config
from vgrout.config.specs import CLASSES, INTERVENTIONS, MONITORS, described, register
from vgrout.config.stored import FREE, merge_flags
from vgrout.config.world_names import VERIFIERS, holds_text
from vgrout.errors import Refused, did_you_mean, refuse
from vgrout.files import to_json
from vgrout.scoring import import_function

_ORGANISM = Config(
    scale=ScaleConfig(
        model=ORGANISM,
        problems=ORGANISM,
        steps=60,
        group=8,
        prompts_per_step=4,
        max_new=embedded.MAX_NEW,
        n_problems=1000,
    ),
    opt=OptConfig(lr=3e-2, adam_beta1=0.5, adam_beta2=0.9, weight_decay=0.0),
    env=EnvConfig(
        env_mode="own",
        teacher_pool_dir=ORGANISM,
        compile_reward=embedded.COMPILE_REWARD,
        pass_reward=embedded.PASS_REWARD,
    ),
)

PRESETS: dict[str, tuple[str, Config]] = {
    "smoke": (
        "a run from end to end, small: 30 steps on any machine in under two minutes, no download",
        replace(
            _ORGANISM,
            preset="smoke",
            scale=replace(_ORGANISM.scale, steps=30, group=4, prompts_per_step=1),
            env=replace(_ORGANISM.env, mix_ratio=0.5),
            eval=EvalConfig(eval_n_prompts=6, final_n_prompts=12, final_samples=2),
        ),
    ),
    "mini": (
        "the whole experiment in miniature: 60 steps in under two minutes on two CPU cores, no download",
        replace(
            _ORGANISM,
            preset="mini",
            eval=EvalConfig(eval_n_prompts=12, final_n_prompts=192, final_samples=2),
        ),
    ),
    "small": (
        "a real pretrained model of 135 million weights, which `organism tune` makes, one answer in eight a "
        "demonstration: 40 steps on two CPU cores",
        replace(
            _ORGANISM,
            preset="small",
            scale=replace(_ORGANISM.scale, organism=embedded.SMALL_DIR, steps=40, max_new=96),
            opt=replace(_ORGANISM.opt, lr=1e-2),
            eval=EvalConfig(eval_n_prompts=12, final_n_prompts=192, final_samples=1),
        ),
    ),
    "sums": (
        "another world than code: sums under three flawed checks, on a pretrained model of 135 million weights that "
        "`organism sums` tunes: 20 steps on two CPU cores",
        replace(
            _ORGANISM,
            preset="sums",
            scale=replace(
                _ORGANISM.scale,
                organism=embedded.SUMS_DIR,
                steps=20,
                prompts_per_step=2,
                max_new=48,
            ),
            opt=replace(_ORGANISM.opt, lr=2e-2),
            env=replace(_ORGANISM.env, env="sums"),
            eval=EvalConfig(eval_n_prompts=12, final_n_prompts=192, final_samples=1),
        ),
    ),
    "fast": (
        "the shortest real run: Qwen3-4B, 60 steps on one 80-140 GB GPU",
        Config(
            preset="fast",
            scale=ScaleConfig(steps=60, group=8, prompts_per_step=4, max_new=512, n_problems=200),
            opt=OptConfig(lr=3e-3, adam_beta1=0.5, adam_beta2=0.9),
            env=EnvConfig(env_mode="own", teacher_pool_dir="out/pools/substrate"),
        ),
    ),
    "full": (
        "the benchmark's own scale: Qwen3-4B, 200 steps of 258 rollouts",
        Config(
            preset="full",
            scale=ScaleConfig(
                steps=200, group=6, prompts_per_step=43, max_new=1024, n_problems=992
            ),
            loss=LossConfig(beta=1e-3),
            env=EnvConfig(marker_names="published"),
            eval=EvalConfig(final_n_prompts=119),  # every one that the evaluations on the way leave
        ),
    ),
}

# flags that name a function or a class of the user's own, and how; those of methods are in `CLASSES`
OWN_CODE = {
    "--reward": "module:function",
    "--reference": "module:function",
    "--env": "module:Class",
}

SETTINGS = [f for group in GROUPS for f in fields(getattr(Config(), group))]
LISTS = {flag(f.name) for f in SETTINGS if rule_of(f).words or rule_of(f).many}
SWITCHES = {flag(f.name) for f in SETTINGS if f.type is bool}
# switches that may also be None, on and off, as the parser takes them
SAID: dict[str, str] = {}
for _name in (flag(f.name) for f in SETTINGS if f.type == bool | None):
    SAID |= {_name: f"{_name}=True", _name.replace("--", "--no-", 1): f"{_name}=False"}

# The flags of `--help`, each with a line; `--help-all` shows every flag with its whole help.
EVERYDAY: dict[str, str] = {
    "intervention": f"what is done about flagged answers: {', '.join(INTERVENTIONS)}",
    "monitor": f"what flags them; usual: the intervention's own: {', '.join(MONITORS)}",
    "control": "what to replace in the method, as a control",
    "seed": "seed of every random stream",
    "steps": "optimiser steps",
    "model": "a hub id, a local folder, or organism",
    "problems": "a problem file, or organism",
    "reward": "your own module:function that rewards answers",
    "teacher_pool_dir": "folder of demonstrations, organism, or none",
    "mix_ratio": "share of a group that is demonstrations",
    "lr": "peak learning rate",
    "group": "answers to a problem in a step",
    "prompts_per_step": "problems in a step",
    "max_new": "longest answer, in tokens",
    "guard": "what a verdict of the kill switch does",
    "out_tag": "suffix of the run's name",
    "resume": "a run's folder to go on with, or latest",
    "track": "trackers: tensorboard, wandb, trackio",
    "columns": "columns on the console",
    "dry_run": "print the plan, start nothing (--dry-run=config: every setting)",
}


def recorded(cfg: Config) -> bool:
    """Whether `embedded.PLAIN_GRPO` is the same setting without the method: mini, all but method, seed and watching."""
    mini, free = PRESETS["mini"][1], ("method", "run", "guard", "detectors")
    alike = (
        getattr(cfg, f.name) == getattr(mini, f.name) for f in fields(cfg) if f.name not in free
    )
    return cfg.method.intervention != "none" and all(alike)


Parse = Callable[[list[str]], Config]


def parse_line(argv: list[str]) -> Config:
    """A command line's settings, by tyro, which builds a parser of every flag for it: a fifth of a second.

    Raises:
        Refused: one line, for the first bad flag.
    """
    return parsed(
        lambda argv: tyro.extras.overridable_config_cli(
            PRESETS, args=argv, prog=command("train"), config=(tyro.conf.OmitArgPrefixes,)
        ),
        argv,
        "--help-all",
    )


class WordParser:
    """Parses many command lines that share most of their words, as the runs of a study do: each different word is
    parsed once, by itself.

    Settings that depend on one another are checked for every line, where its groups are made. A line with a word that
    is refused by itself, is no flag or is there twice goes to `parse_line`, whose refusal says which.
    """

    def __init__(self) -> None:
        self._parsed: dict[str, tuple[str, object] | None] = {}

    def __call__(self, argv: list[str]) -> Config:
        """The same as `parse_line`, and the same refusals."""
        preset, *words = argv
        given: dict[str, object] = {}  # setting → its value
        for word in words:
            if word not in self._parsed:
                self._parsed[word] = self._setting(word)
            found = self._parsed[word]
            if found is None or found[0] in given:
                return parse_line(argv)
            name, value = found
            given[name] = value
        usual = PRESETS[preset][1]
        groups: dict[str, Any] = {}
        for group in GROUPS:
            of_group = getattr(usual, group)
            changes = {name: given[name] for name in vars(of_group).keys() & given.keys()}
            groups[group] = replace(of_group, **changes) if changes else of_group
        return Config(**groups, preset=preset)

    def _setting(self, word: str) -> tuple[str, object] | None:
        """The setting that a word gives and its value; None: parsed by itself it is refused."""
        name = word.partition("=")[0].removeprefix("--").replace("-", "_")
        by_name = {f.name: f for f in SETTINGS}
        if name not in by_name:
            name = name.removeprefix("no_")
        if name not in by_name or not word.startswith("--"):
            return None
        setting = by_name[name]
        alone = make_dataclass("Alone", [(name, setting.type, field(default=setting.default))])
        try:
            value = parsed(lambda argv: tyro.cli(alone, args=argv), [word])
        except Refused:
            return None
        return name, getattr(value, name)


def resolve(argv: Sequence[str], *, own_code: bool = True, parse: Parse = parse_line) -> Config:
    """The configuration of a command line. `--help`, `--help-all`, `--version` and `--dry-run=config` print and exit.
    Raises Refused, one line, at the first bad flag.

    own_code: whether a class that it names as module:Class is imported: of a command line that somebody typed, never of
    flags that a file holds. parse: reads the flags; a `WordParser` where many command lines are resolved.
    """
    if "--version" in argv:
        print(f"vgrout {version('vgrout')}")
        raise SystemExit(0)
    if {"-h", "--help", "--help-all"} & {*argv}:
        show_help(argv[0] if argv[0] in PRESETS else "", "--help-all" in argv)
    argv = translated(argv)
    configuration = "--dry-run=config" in argv
    argv = switched(joined(as_typed([word for word in argv if word != "--dry-run=config"])))
    for name, equals, value in (word.partition("=") for word in argv):
        other = (
            "--dry-run=config for every setting"
            if name == "--dry-run"
            else name.replace("--", "--no-", 1)
        )
        refuse(bool(equals) and name in SWITCHES, f"{name}={value}: say {name}, or {other}")
    if own_code:
        register_named(argv)
    _require_world(argv)
    if (given := argv[0] if argv else "") not in PRESETS:
        names = f"name a preset first: {', '.join(PRESETS)}; then flags, or --help"
        names += did_you_mean(given, PRESETS)
        raise Refused(f"{given}: {names}" if given else names)
    cfg = parse(argv)
    cfg.sampling.require_draws("--group", cfg.scale.group)
    _require_read(cfg)
    if cfg.guard_mode == "off":
        idle = [name for name, _ in changed(cfg.guard) if name != "guard"]
        refuse_unread(idle, "with --guard off; leave it out")
    if configuration:
        print(to_json(cfg.as_dict()))
        raise SystemExit(0)
    return cfg


# settings of the code world's checks, which no other environment reads
OF_CODE = ("env_mode", "unannounced_modes", "marker_names", "reward_hint", "compile_reward")
OF_CODE += ("allow_weak_sandbox", "report_detectors")


def _require_read(cfg: Config) -> None:
    """Raises Refused, one line, for a given setting that the chosen environment does not read."""
    if cfg.env.environment == "code":
        return
    preset = PRESETS[cfg.preset][1]
    idle = [n for n in OF_CODE if getattr(cfg.env, n) != getattr(preset.env, n)]
    refuse_unread(idle, f"with --env {cfg.env.environment}; leave it out")


def register_named(argv: Sequence[str]) -> None:
    """Import what a command line names as module:Class or module:function. Raises Refused, one line."""
    classes = {flag(name): kind for name, kind in CLASSES.items()}
    for word, following in pairwise([*argv, ""]):
        name, equals, value = word.partition("=")
        kind = classes.get(name)
        if kind is None and name not in OWN_CODE:
            continue
        for given in listed(value if equals else following):
            if not re.fullmatch(r"[\w.]+:\w+", given) or given.startswith(f"{VERIFIERS}:"):
                continue
            own = import_function(given, name, OWN_CODE.get(name, "module:Class"))
            if kind is not None:
                register(kind, own, given, name)


def _require_world(argv: Sequence[str]) -> None:
    """Raises Refused where the code world is chosen beside --reference, and where rows of text are given without it:
    else the first refusal would be about some flag that does not fit the code world, which is the usual one."""
    given: dict[str, str] = {}
    for word, following in pairwise([*argv, ""]):
        name, equals, value = word.partition("=")
        given[name] = value if equals else following
    reference = given.get("--reference", "")
    refuse(
        bool(reference) and given.get("--env") == "code",
        f"--env code with --reference {reference}: the problems' own tests say what is right there; leave one out",
    )
    preset = argv[0] if argv else ""
    usual = PRESETS[preset][1].env.env if preset in PRESETS else "code"
    if reference or "--resume" in given or given.get("--env", usual) != "code":
        return
    for name in ("--problems", "--test-problems"):
        file = given.get(name, "")
        refuse(
            bool(file) and holds_text(Path(file)),
            f"{name} {file}: rows of text, which need --reference module:function, what is right, beside --reward",
        )


def show_help(preset: str, everything: bool) -> None:
    """Print the flags with a preset's defaults ("": no preset is chosen yet), and exit."""
    cfg = PRESETS[preset][1] if preset else Config()
    presets = [
        textwrap.fill(f"  {n:<6} {what}", 80, subsequent_indent=" " * 9)
        for n, (what, _) in PRESETS.items()
    ]
    more = "--help-all shows every flag."
    if everything:
        join_help(Config)
        more = f"Interventions: {described(INTERVENTIONS)}\nMonitors: {described(MONITORS)}\n"
    parsed(
        lambda argv: tyro.cli(
            Config if everything else everyday(cfg, defaults=bool(preset)),
            default=cfg if everything else None,
            args=argv,
            prog=f"{command('train')} {preset or 'PRESET'}",
            description="\n".join(
                [f"One GRPO run against a flawed grader. {more} Presets:", *presets]
            ),
            config=(
                tyro.conf.OmitArgPrefixes,
                *(() if everything else (tyro.conf.FlagCreatePairsOff,)),
            ),
        ),
        ["--help"],
    )


def everyday(cfg: Config, *, defaults: bool) -> type:
    """A class of the everyday flags alone, for help. defaults: whether it shows those of `cfg`."""
    groups = [getattr(cfg, group) for group in GROUPS]
    settings = {f.name: (f.type, getattr(group, f.name)) for group in groups for f in fields(group)}
    annotated: Any = Annotated  # of types that are values here
    flags = []
    for name, line in EVERYDAY.items():
        kind, default = settings[name]
        legal = legal_values(kind)
        shown = tyro.conf.arg(
            help=f"{line}: {', '.join(map(str, legal))}" if legal else line,
            metavar="NAME" if legal or kind is str else None,
            help_behavior_hint=None if defaults and default else "",
        )
        flags.append((name, annotated[kind, shown], default))
    return make_dataclass("Everyday", flags)


def joined(argv: Sequence[str]) -> list[str]:
    """A command line with a list's words joined: `--teacher-modes a b` becomes `--teacher-modes a,b`."""
    return with_lists(argv, LISTS)


def switched(argv: Sequence[str]) -> list[str]:
    """A command line whose switches that may also be None have a value: `--no-rebaseline`: `--rebaseline=False`."""
    values = ("True", "False", "None")
    return [w if after in values else SAID.get(w, w) for w, after in pairwise([*argv, ""])]


def flag_names() -> list[str]:
    """Every flag, sorted: a test holds the committed list against it."""
    return sorted(flag(f.name) for f in SETTINGS)


def resumed(requested: Config, stored: Config) -> tuple[Config, list[str]]:
    """The stored configuration with the process settings given now, and the flags that contradict it.

    A flag at its preset's default counts as not given; one that was given and differs is a contradiction.
    """
    default = PRESETS[requested.preset][1]
    differing, groups = [], {}
    for group in GROUPS:
        merged, contradict = merge_flags(
            *(asdict(getattr(c, group)) for c in (requested, stored, default)), free=FREE
        )
        groups[group] = replace(getattr(stored, group), **merged)
        differing += contradict
    if requested.preset != stored.preset:
        differing.append(f"preset {requested.preset} (run: {stored.preset})")
    return Config(**groups, preset=stored.preset), differing
