"""Presets, which are values, and the command line of `vgrout train` on top of them. Torch-free."""

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import tyro

from vgrout.config.checks import changed, flag, listed, refuse_unread, rule_of, summary
from vgrout.config.cli import Helped, parsed, translated, typed
from vgrout.config.run import FREE, GROUPS, Config, merge_flags
from vgrout.config.settings import LOSSES, EnvConfig, EvalConfig, LossConfig, OptConfig, ScaleConfig
from vgrout.config.specs import CLASSES, INTERVENTIONS, MONITORS, register
from vgrout.config.world_names import ORGANISM, VERIFIERS, holds_text
from vgrout.ground import embedded
from vgrout.ground.io import Refused, command, did_you_mean, refuse
from vgrout.ground.scoring import forget_edited, import_function

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
        "a run from end to end, small: 30 steps on any machine in one to two minutes, no download",
        replace(
            _ORGANISM,
            preset="smoke",
            scale=replace(_ORGANISM.scale, steps=30, group=4, prompts_per_step=1),
            env=replace(_ORGANISM.env, mix_ratio=0.5),
            eval=EvalConfig(eval_n_prompts=6, final_n_prompts=12, final_samples=2),
        ),
    ),
    "mini": (
        "the whole experiment in miniature: 60 steps in one to two minutes on two CPU cores, no download",
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
    "reward": "module:function",
    "reference": "module:function",
    "env": "module:Class",
    "rm_ensemble_members": "module:function",
}

SETTINGS = [f for group in GROUPS for f in fields(getattr(Config(), group))]
LISTS = {flag(f.name) for f in SETTINGS if rule_of(f).words or rule_of(f).many}
# the switch that may also be None, which the parser takes with a value
SWITCH = {"--rebaseline": "--rebaseline=True", "--no-rebaseline": "--rebaseline=False"}

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
    "guard": "what a verdict of the kill switch does: off, log, halt",
    "out_tag": "suffix of the run's name",
    "resume": "a run's folder to go on with, or latest",
    "track": "trackers: tensorboard, wandb, trackio",
    "columns": "columns on the console: main, all",
    "dry_run": "print the plan, start nothing (--dry-run=config: every setting)",
}


def recorded(cfg: Config) -> bool:
    """Whether `embedded.PLAIN_GRPO` is the same setting without the method: mini, all but method, seed and watching."""
    mini, free = PRESETS["mini"][1], ("method", "run", "guard", "detectors")
    compared = {*GROUPS, "preset"} - {*free}
    alike = (getattr(cfg, name) == getattr(mini, name) for name in compared)
    return cfg.method.intervention != "none" and all(alike)


def parse(preset: str, words: Sequence[str]) -> Config:
    """A preset with flags on top of it, read by tyro. Raises Refused, one line, for the first bad flag."""
    cli = partial(
        tyro.cli,
        Config,
        default=PRESETS[preset][1],
        prog=f"{command('train')} {preset}",
        description=f"Interventions: {summary(INTERVENTIONS)}\nMonitors: {summary(MONITORS)}\n"
        f"Losses: {summary(LOSSES)}",
        config=(tyro.conf.OmitArgPrefixes,),
    )
    return parsed(cli, words)


def resolve(argv: Sequence[str], *, trusted: bool = True) -> Config:
    """The configuration of a command line. `--help` and `--help-all` print and exit.
    Raises Refused, one line, at the first bad flag.

    trusted: as for `import_named`.
    """
    preset = argv[0] if argv else ""
    if {"-h", "--help"} & {*argv}:
        print(short_help(preset))
        raise Helped(0)
    if "--help-all" in argv:
        parse(preset if preset in PRESETS else "fast", ["--help"])
    if preset not in PRESETS:
        said = f"name a preset first: {', '.join(PRESETS)}; then flags, or --help"
        raise Refused(f"{preset}: {said}{did_you_mean(preset, PRESETS)}" if preset else said)
    words = []
    for word, following in pairwise([*translated(argv[1:]), ""]):
        alone = following not in ("True", "False", "None")
        words.append(SWITCH.get(word, word) if alone else word)
    words = joined(words)
    given = typed(words)
    words = [word.replace("--dry-run=config", "--dry-run") for word in words]
    import_named(words, trusted=trusted)
    _require_world(preset, given)
    cfg = replace(parse(preset, words), typed=given)
    cfg.sampling.require_draws("--group", cfg.scale.group)
    _require_read(cfg)
    if cfg.guard_mode == "off":
        idle = [name for name, _ in changed(cfg.guard) if name != "guard"]
        refuse_unread(idle, "with --guard off; leave it out")
    return cfg


# settings of the code world's checks, which no other environment reads
OF_CODE = ("env_mode", "unannounced_modes", "marker_names", "compile_reward")
OF_CODE += ("allow_weak_sandbox", "report_detectors")


def _require_read(cfg: Config) -> None:
    """Raises Refused, one line, for a given setting that the chosen environment does not read."""
    if cfg.env.environment == "code":
        return
    preset = PRESETS[cfg.preset][1]
    idle = [n for n in OF_CODE if getattr(cfg.env, n) != getattr(preset.env, n)]
    refuse_unread(idle, f"with --env {cfg.env.environment}; leave it out")


def import_named(argv: Sequence[str], *, trusted: bool = True, where: str = "") -> None:
    """Import what flags name as module:Class or module:function.

    trusted: somebody typed these flags, or gave --trust-code for the file that holds them, which is `where`.

    Raises:
        Refused: one line: they are not trusted, or something cannot be imported.
    """
    named: list[tuple[str, str]] = []  # setting, and what it names
    for name, value in typed(argv).items():
        if name not in CLASSES and name not in OWN_CODE:
            continue
        for given in listed(value):
            refuse(
                ":" in given and not trusted,
                f"{where}names code, {flag(name)}={given}; if you trust it, add --trust-code",
            )
            if ":" in given:
                named.append((name, given))
    modules = [given.removeprefix(f"{VERIFIERS}:").partition(":")[0] for _, given in named]
    forget_edited(modules)
    for name, given in named:
        if not re.fullmatch(r"[\w.]+:\w+", given) or given.startswith(f"{VERIFIERS}:"):
            continue
        own = import_function(given, flag(name), OWN_CODE.get(name, "module:Class"))
        if name in CLASSES:
            register(CLASSES[name], own, given, flag(name))


def _require_world(preset: str, given: Mapping[str, str]) -> None:
    """Raises Refused where the code world is chosen beside --reference, and where rows of text are given without it:
    else the first refusal would be about some flag that does not fit the code world, which is the usual one."""
    reference = given.get("reference", "")
    refuse(
        bool(reference) and given.get("env") == "code",
        f"--env code with --reference {reference}: the problems' own tests say what is right there; leave one out",
    )
    usual = PRESETS[preset][1].env.env
    if reference or "resume" in given or given.get("env", usual) != "code":
        return
    model = given.get("model", PRESETS[preset][1].scale.model)
    for name in ("problems", "test_problems"):
        file = given.get(name, "")
        missing = file not in ("", ORGANISM) and not Path(file).exists()
        # with another model `--dry-run` lists what is missing
        refuse(missing and model == ORGANISM, f"{flag(name)} {file}: no such file")
        refuse(
            bool(file) and holds_text(Path(file)),
            f"{flag(name)} {file}: rows of text, which need --reference module:function, what is right, beside "
            "--reward",
        )


def short_help(preset: str) -> str:
    """The presets and the everyday flags, with a preset's values; "": none is chosen yet."""
    values: dict[str, object] = {}
    for group in GROUPS if preset in PRESETS else ():
        values |= vars(getattr(PRESETS[preset][1], group))
    presets = {name: what for name, (what, _) in PRESETS.items()}
    flags: dict[str, str] = {}
    for name, what in EVERYDAY.items():
        flags[flag(name)] = f"{what} (default: {values[name]})" if values.get(name) else what
    return "\n".join(
        [
            f"usage: {command('train')} {preset or 'PRESET'} [--flag value …]",
            "",
            "One GRPO run against a flawed grader. --help-all shows every flag. Presets:",
            *table(presets),
            "",
            *table(flags),
        ]
    )


def table(rows: Mapping[str, str]) -> list[str]:
    """Names with a text on each, for a terminal of 80 columns."""
    width = max(map(len, rows)) + 4
    lines: list[str] = []
    for name, text in rows.items():
        lines.append(
            textwrap.fill(f"  {name}".ljust(width) + text, 80, subsequent_indent=" " * width)
        )
    return lines


def joined(argv: Sequence[str]) -> list[str]:
    """A command line with a list's words joined: `--teacher-modes a b` becomes `--teacher-modes=a,b`."""
    out: list[str] = []
    in_list = False
    for word in argv:
        if word.startswith("-"):
            in_list = word.partition("=")[0] in LISTS
            out.append(word)
        elif in_list:
            out[-1] += f",{word}" if "=" in out[-1] else f"={word}"
        else:
            out.append(word)
    return out


def flag_names() -> list[str]:
    """Every flag, sorted: a test holds the committed list against it."""
    return sorted(flag(f.name) for f in SETTINGS)


def resumed(requested: Config, stored: Config) -> tuple[Config, list[str]]:
    """The stored configuration with the process settings typed now, and the flags that contradict it."""
    differing, groups = [], {}
    for group in GROUPS:
        merged, contradict = merge_flags(
            *(asdict(getattr(c, group)) for c in (requested, stored)), requested.typed, free=FREE
        )
        groups[group] = replace(getattr(stored, group), **merged)
        differing += contradict
    if requested.preset != stored.preset:
        differing.append(f"preset {requested.preset} (run: {stored.preset})")
    return Config(**groups, preset=stored.preset), differing
