"""Presets, which are values, and the command line of `python -m vgrout.train` on top of them. Torch-free."""

import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, fields, make_dataclass, replace
from importlib.metadata import version
from typing import Annotated, Any

import tyro

from vgrout.cli import as_typed, parsed
from vgrout.config.checks import changed, flag, flags, legal_values, refuse, refuse_flags, rule_of, summary
from vgrout.config.loss import LossConfig
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
            eval=EvalConfig(final_n_prompts=119),  # every one that the evaluations on the way leave
        ),
    ),
}

# Settings that belong together, by one name: `--method NAME` stands for these flags; one that is given beside it
# replaces its own. What a study finds best is recorded here.
METHODS: dict[str, tuple[str, tuple[str, ...]]] = {
    "route2-block": (
        "route2 with a quarantine in a block of its own, samples from the deployed model alone, one decision a "
        "rollout, by modules where known hacks lie above the rest, and a direction that stays as it was extracted",
        (
            *("--intervention=route2", "--quarantine=block:3", "--rollout-ablate-frac=1", "--rebaseline"),
            *("--gate-modules=apart", "--gate-vote=rollout", "--vhack-refresh-every=0"),
        ),
    ),
    "quarantine": (
        "the quarantine reads, seeded by the weak detector alone, and what it flags is rewarded less",
        ("--intervention=penalty", "--monitor=quarantine", "--seed-monitor=detector", "--monitor-quantile=0.8"),
    ),
    "probe": (
        "a linear probe reads, seeded by the weak detector alone, and what it flags is rewarded less",
        ("--intervention=penalty", "--monitor=online_probe", "--seed-monitor=detector", "--monitor-quantile=0.8"),
    ),
    "twin": (
        "what is rewarded on an impossible twin of its problem, too, is rewarded less",
        ("--intervention=penalty", "--monitor=twin"),
    ),
}

# The flags of `--help`, each with a line; `--help-all` shows every flag with its whole help.
EVERYDAY: dict[str, str] = {
    "method": f"stands for several flags: {', '.join(METHODS)}",
    "intervention": "what is done about flagged rollouts",
    "monitor": "who is flagged; usual: the intervention's own",
    "control": "the same run under a control",
    "seed": "of every random stream",
    "steps": "optimiser steps",
    "model": "a hub id, a local folder, or organism",
    "problems": "a problem file, or organism",
    "reward": "module:function that rewards in place of the flawed checks",
    "teacher_pool_dir": "folder of demonstrations, organism, or '' for none",
    "mix_ratio": "share of a group that is demonstrations",
    "lr": "peak learning rate",
    "group": "rollouts of a prompt",
    "prompts_per_step": "prompts in a step",
    "max_new": "longest completion, in tokens",
    "guard": "what a verdict of the kill switch does",
    "out_tag": "suffix of the run's name",
    "resume": "a run's folder, or latest: go on with it",
    "track": "tensorboard, wandb, trackio",
    "ranks": "processes on this machine",
    "dry_run": "print the plan, start nothing",
}


def parse(argv: list[str] | None = None) -> Config:
    """The command line of `python -m vgrout.train`. A bad flag exits with code 2 and one line on stderr."""
    try:
        return resolve(argv)
    except ValueError as e:
        print(f"E {e}", file=sys.stderr)
        raise SystemExit(2) from None


def resolve(argv: list[str] | None) -> Config:
    """The configuration of a command line; `--help`, `--help-all` and `--version` exit. Raises ValueError, one line, at
    the first bad flag."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if "--version" in argv:
        print(f"vgrout {version('vgrout')}")
        raise SystemExit(0)
    if {"-h", "--help", "--help-all"} & {*argv}:
        show_help(argv[0] if argv[0] in PRESETS else "", "--help-all" in argv)
    typed = joined(as_typed(argv))
    argv = with_method(typed)
    refuse_flags(argv)
    refuse(
        not argv or argv[0] not in PRESETS,
        f"{' '.join(argv[:1])}: name a preset first: {', '.join(PRESETS)}; then flags, or --help".removeprefix(": "),
    )
    try:
        cfg = parsed(
            lambda: tyro.extras.overridable_config_cli(
                PRESETS, args=argv, prog="python -m vgrout.train", config=(tyro.conf.OmitArgPrefixes,)
            )
        )
    except ValueError as e:
        raise ValueError(contradicted(typed, argv, str(e))) from None
    if cfg.guard_mode == "off":
        idle = [name for name, _ in changed(cfg.guard) if name != "guard"]
        refuse(bool(idle), f"{flags(idle)}: not read with --guard off; leave it out")
    return cfg


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
            metavar="NAME" if legal else None,
            help_behavior_hint=None if defaults and default else "",
        )
        flags.append((name, annotated[kind, shown], default))
    return make_dataclass("Everyday", flags)


def with_method(argv: Sequence[str]) -> list[str]:
    """A command line with --method replaced by its flags; flags that are there already stay.

    Raises:
        ValueError: no method of that name.
    """
    words = [part for word in argv for part in (word.split("=", 1) if word.startswith("--method=") else [word])]
    if "--method" not in words:
        return list(argv)
    at = words.index("--method")
    name = words[at + 1] if at + 1 < len(words) else ""
    refuse(name not in METHODS, f"--method {name}: should be one of {', '.join(METHODS)}")
    rest = [*words[:at], *words[at + 2 :]]
    given = {_bare(word) for word in rest}
    return [*rest, *(word for word in METHODS[name][1] if _bare(word) not in given)]


def contradicted(typed: Sequence[str], argv: Sequence[str], message: str) -> str:
    """A refusal in words that were typed: where it begins with a flag that only --method brought, it is what stands
    beside --method that contradicts it."""
    given, brought = ({_bare(word) for word in words} for words in (typed, argv))
    if not {_bare(word.rstrip(",")) for word in message.partition(":")[0].split()} & (brought - given):
        return message
    at = next(i for i, word in enumerate(typed) if _bare(word) == "--method")
    name = typed[at].partition("=")[2] or typed[at + 1]
    own = [word for word in METHODS[name][1] if _bare(word) in given]
    return f"--method {name}: stands for {', '.join(own)}, and another was given; leave one of them out"


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
