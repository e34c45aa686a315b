"""Presets, which are values, and the command line of `python -m vgrout.train` on top of them. Torch-free."""

import contextlib
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, make_dataclass, replace
from importlib.metadata import version
from itertools import pairwise
from typing import Annotated, Any

import tyro

from vgrout.cli import as_typed, parsed
from vgrout.config.checks import changed, flag, flags, legal_values, refuse, refuse_flags, rule_of, summary
from vgrout.config.loss import LossConfig
from vgrout.config.method import INTERVENTIONS, MethodConfig
from vgrout.config.run import (
    FREE,
    GROUPS,
    ORGANISM,
    Config,
    EnvConfig,
    EvalConfig,
    OptConfig,
    ScaleConfig,
    merge_flags,
)
from vgrout.data import organism
from vgrout.files import to_json

_ORGANISM = Config(
    scale=ScaleConfig(
        model=ORGANISM,
        problems=ORGANISM,
        steps=60,
        group=8,
        prompts_per_step=4,
        max_new=organism.MAX_NEW,
        n_problems=1000,
    ),
    opt=OptConfig(lr=3e-2, adam_beta1=0.5, adam_beta2=0.9, weight_decay=0.0),
    env=EnvConfig(
        env_mode="own",
        teacher_pool_dir=ORGANISM,
        compile_reward=organism.COMPILE_REWARD,
        pass_reward=organism.PASS_REWARD,
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
        replace(_ORGANISM, preset="mini", eval=EvalConfig(eval_n_prompts=12, final_n_prompts=192, final_samples=2)),
    ),
    "small": (
        "a real pretrained model of 135 million weights that `organism tune` taught to hack, nothing demonstrated: 40 "
        "steps on two CPU cores",
        replace(
            _ORGANISM,
            preset="small",
            scale=replace(_ORGANISM.scale, organism=organism.SMALL_DIR, steps=40, max_new=96),
            opt=replace(_ORGANISM.opt, lr=1e-2),
            env=replace(_ORGANISM.env, teacher_pool_dir="", mix_ratio=0.0),
            eval=EvalConfig(eval_n_prompts=12, final_n_prompts=48, final_samples=1),
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
            scale=ScaleConfig(steps=200, group=6, prompts_per_step=43, max_new=1024, n_problems=992),
            loss=LossConfig(beta=1e-3),
            env=EnvConfig(marker_names="published"),
            eval=EvalConfig(final_n_prompts=119),  # every one that the evaluations on the way leave
        ),
    ),
}

# Settings that belong together, by one name. An intervention of that name brings them where no --method is given;
# a flag that is given replaces its own, and what the chosen monitor or control does not read is left out. What a study
# finds best is recorded here.
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "route2": (
        "route2 with a quarantine in a block of its own, samples from the deployed model alone, one decision per "
        "rollout, by modules where known hacks lie above the rest, and a direction that stays as it was extracted",
        {
            "intervention": "route2",
            "quarantine": "block:-2",
            "rollout_ablate_frac": 1.0,
            "rebaseline": True,
            "gate_modules": "apart",
            "gate_vote": "rollout",
            "vhack_refresh_every": 0,
        },
    ),
    "route2-per-module": (
        "route2 with a quarantine in every module, each of which decides by itself; it costs most of the skill",
        {"intervention": "route2"},
    ),
    "quarantine": (
        "the quarantine reads, seeded by the weak detector alone, and what it flags is rewarded less",
        {
            "intervention": "penalty",
            "monitor": "quarantine",
            "seed_monitor": "detector",
            "monitor_quantile": 0.8,
        },
    ),
    "probe": (
        "a linear probe reads, seeded by the weak detector alone, and what it flags is rewarded less",
        {
            "intervention": "penalty",
            "monitor": "online_probe",
            "seed_monitor": "detector",
            "monitor_quantile": 0.8,
        },
    ),
    "twin": (
        "what is rewarded on an impossible twin of its problem, too, is rewarded less",
        {"intervention": "penalty", "monitor": "twin"},
    ),
}

# The flags of `--help`, each with a line; `--help-all` shows every flag with its whole help.
EVERYDAY: dict[str, str] = {
    "method": f"a whole method by one name: {', '.join(METHODS)}",
    "intervention": f"what is done about flagged answers: {', '.join(INTERVENTIONS)}",
    "monitor": "who flags them; usual: the intervention's own",
    "control": "what to replace in the method, as a control",
    "seed": "seed of every random stream",
    "steps": "optimiser steps",
    "model": "a hub id, a local folder, a GGUF file, or organism",
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
    "ranks": "processes that share the run",
    "columns": "columns on the console",
    "dry_run": "print the plan, start nothing (--dry-run=config: every setting)",
}


def parse(argv: list[str] | None = None) -> Config:
    """The command line of `python -m vgrout.train`. A bad flag exits with code 2 and one line on stderr."""
    try:
        return resolve(argv)
    except ValueError as e:
        print(f"E {e}", file=sys.stderr)
        raise SystemExit(2) from None


def resolve(argv: list[str] | None) -> Config:
    """The configuration of a command line. `--help`, `--help-all`, `--version` and `--dry-run=config` print and exit.
    Raises ValueError, one line, at the first bad flag."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if "--version" in argv:
        print(f"vgrout {version('vgrout')}")
        raise SystemExit(0)
    if {"-h", "--help", "--help-all"} & {*argv}:
        show_help(argv[0] if argv[0] in PRESETS else "", "--help-all" in argv)
    configuration = "--dry-run=config" in argv
    refuse_flags(typed := without_pool(joined(as_typed([word for word in argv if word != "--dry-run=config"]))))
    argv = with_method(typed)
    refuse(
        not argv or argv[0] not in PRESETS,
        f"{' '.join(argv[:1])}: name a preset first: {', '.join(PRESETS)}; then flags, or --help".removeprefix(": "),
    )
    cfg = _config(argv, typed)
    cfg.sampling.require_draws("--group", cfg.scale.group)
    if cfg.guard_mode == "off":
        idle = [name for name, _ in changed(cfg.guard) if name != "guard"]
        refuse(bool(idle), f"{flags(idle)}: not read with --guard off; leave it out")
    if configuration:
        print(to_json(cfg.as_dict()))
        raise SystemExit(0)
    return cfg


def _config(argv: Sequence[str], typed: Sequence[str]) -> Config:
    """The configuration of a command line, without those flags of a method that one of `typed` keeps from being read.
    Raises ValueError for any other flag."""
    try:
        return parsed(
            lambda: tyro.extras.overridable_config_cli(
                PRESETS, args=argv, prog="python -m vgrout.train", config=(tyro.conf.OmitArgPrefixes,)
            )
        )
    except ValueError as e:
        blamed = {_bare(word.rstrip(",")) for word in str(e).partition(":")[0].split()}
        unread = [word for word in argv if word not in typed and _bare(word) in blamed]
        if not unread:
            raise
        return _config([word for word in argv if word not in unread], typed)


def show_help(preset: str, everything: bool) -> None:
    """Print the flags with a preset's defaults ("": no preset is chosen yet), and exit."""
    cfg = PRESETS[preset][1] if preset else Config()
    presets = [textwrap.fill(f"  {n:<6} {what}", 80, subsequent_indent=" " * 9) for n, (what, _) in PRESETS.items()]
    methods = summary({name: what for name, (what, _) in METHODS.items()})
    more = f"--method NAME stands for several flags. {methods}" if everything else "--help-all shows every flag."
    tyro.cli(
        Config if everything else everyday(cfg, defaults=bool(preset)),
        default=cfg if everything else None,
        args=["--help"],
        prog=f"python -m vgrout.train {preset or 'PRESET'}",
        description="\n".join([f"One GRPO run against a flawed grader. {more} Presets:", *presets]),
        config=(tyro.conf.OmitArgPrefixes, *(() if everything else (tyro.conf.FlagCreatePairsOff,))),
    )


def everyday(cfg: Config, *, defaults: bool) -> type:
    """A class of the everyday flags alone, for help. defaults: whether it shows those of `cfg`."""
    groups = [getattr(cfg, group) for group in GROUPS]
    settings = {f.name: (f.type, getattr(group, f.name)) for group in groups for f in fields(group)}
    settings["method"] = (str, "")
    annotated: Any = Annotated  # of types that are values here
    flags = []
    for name, line in EVERYDAY.items():
        kind, default = settings[name]
        legal = legal_values(kind)
        shown = tyro.conf.arg(
            help=f"{line}: {', '.join(map(str, legal))}" if legal else line,
            metavar="NAME" if legal or name == "method" else None,
            help_behavior_hint=None if defaults and default else "",
        )
        flags.append((name, annotated[kind, shown], default))
    return make_dataclass("Everyday", flags)


def with_method(argv: Sequence[str]) -> list[str]:
    """A command line with --method replaced by its flags, or with those that its --intervention brings; flags that are
    there already stay.

    Raises:
        ValueError: no method of that name, two of them, or one of another intervention than the one that is given.
    """
    words = [part for word in argv for part in (word.split("=", 1) if word.startswith("--method=") else [word])]
    given = _given(words)
    intervention = given.get("intervention")
    name = intervention if intervention in METHODS else None
    if "--method" in words:
        at = words.index("--method")
        name = words[at + 1] if at + 1 < len(words) else ""
        refuse(words.count("--method") > 1, "--method: given twice; one is enough")
        refuse(name not in METHODS, f"--method {name}: should be one of {', '.join(METHODS)}")
        own = METHODS[name][1]["intervention"]
        refuse(
            intervention not in (None, own),
            f"--method {name} is --intervention {own}, and --intervention {intervention} is given too; leave one out",
        )
        words = [*words[:at], *words[at + 2 :]]
    if name is None:
        return words
    brought = METHODS[name][1]
    choice = {k: given.get(k, brought.get(k)) for k in ("intervention", "monitor", "control", "seed_monitor")}
    read = of_choice({k: v for k, v in choice.items() if v}, brought)
    return [*words, *(f"--{_flag(k, v)}" for k, v in read.items() if k not in given)]


def of_choice(choice: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `settings` that a method of this intervention, monitor and control reads."""
    read = {}
    for name, value in settings.items():
        with contextlib.suppress(ValueError):  # a setting that is not read is refused, and so is an illegal choice
            MethodConfig(**{**choice, name: choice.get(name, value)})
            read[name] = value
    return read


def _given(words: Sequence[str]) -> dict[str, str]:
    """The flags of a command line, by their fields, with the word that follows."""
    found = {}
    for word, following in pairwise([*words, ""]):
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            found[name.removeprefix("no-").replace("-", "_")] = value if equals else following
    return found


def _flag(name: str, value: Any) -> str:
    """A setting on the command line, without its dashes."""
    name = name.replace("_", "-")
    return name if value is True else f"no-{name}" if value is False else f"{name}={value}"


def _bare(word: str) -> str:
    """A flag without its value and without `no-`."""
    return word.partition("=")[0].replace("_", "-").replace("--no-", "--", 1)


def joined(argv: Sequence[str]) -> list[str]:
    """A command line with a list's words joined: `--teacher-modes a b` becomes `--teacher-modes a,b`."""
    lists = {flag(f.name) for group in GROUPS for f in fields(getattr(Config(), group)) if rule_of(f).words}
    out: list[str] = []
    of_list = False  # whether the word before belongs to a list's value
    for word in argv:
        starts = word.startswith("-")
        if of_list and not starts and out[-1] not in lists:
            out[-1] += f",{word}"
        else:
            out.append(word)
        of_list = word.partition("=")[0] in lists if starts else of_list
    return out


def without_pool(argv: Sequence[str]) -> list[str]:
    """A command line whose `--teacher-pool-dir none` says '', as a configuration has it."""
    out = list(argv)
    for i, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == "--teacher-pool-dir":
            if value == "none":
                out[i] = f"{name}="
            elif not equals and argv[i + 1 : i + 2] == ["none"]:
                out[i + 1] = ""
    return out


def flag_names() -> list[str]:
    """Every flag, sorted: a test holds the committed list against it."""
    return sorted(flag(f.name) for group in GROUPS for f in fields(getattr(Config(), group)))


def resumed(requested: Config, stored: Config) -> tuple[Config, list[str]]:
    """The stored configuration with the process settings given now, and the flags that contradict it.

    A flag at its preset's default counts as not given; one that was given and differs is a contradiction.
    """
    default = PRESETS[requested.preset][1]
    differing, groups = [], {}
    for group in GROUPS:
        merged, contradict = merge_flags(*(asdict(getattr(c, group)) for c in (requested, stored, default)), free=FREE)
        groups[group] = replace(getattr(stored, group), **merged)
        differing += contradict
    if requested.preset != stored.preset:
        differing.append(f"preset {requested.preset} (run: {stored.preset})")
    return Config(**groups, preset=stored.preset), differing
