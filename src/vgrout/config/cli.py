"""Command lines by tyro, with errors in one line, and flags by the names that others have for them. Torch-free.

A row of `NAMES` has what somebody types, a flag or a flag and a word of its value, and our answer: the flag that means
exactly the same and is taken in its place, or what the refusal says.
"""

import contextlib
import errno
import io
import os
import re
import select
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, wraps
from itertools import pairwise
from typing import Any, NoReturn, TypeVar

import tyro

from vgrout.config.checks import listed
from vgrout.ground import console
from vgrout.ground.io import (
    Refused,
    command,
    drop_stdout,
    one_line,
    out_of_memory,
    printable,
    raised_by_own,
    raised_here,
    refuse,
    restore_inherited,
    show_fault,
    show_refusal,
)

T = TypeVar("T")


class Helped(SystemExit):
    """`--help` was asked for, and is printed."""


def parse_args(
    what: Callable[..., T] | Mapping[str, Callable[..., T]],
    argv: list[str] | None,
    prog: str,
) -> T:
    """A settings class filled from a command line, or the result of a function called with its flags; of several
    functions, the one that the first word names. Flags may have the names of `OF_COMMANDS`. `--help` exits.

    Raises:
        Refused: one line, for the first bad flag; or whatever the class or the function raises.
    """
    argv = translated(sys.argv[1:] if argv is None else argv, OF_COMMANDS.get(prog.split()[-1], {}))
    settings: Any = {"prog": prog.replace("vgrout ", command(""))}
    if isinstance(what, Mapping):
        named = {name: _later(f) for name, f in what.items()}
        return parsed(partial(tyro.extras.subcommand_cli_from_dict, named, **settings), argv)()
    if isinstance(what, type):
        return parsed(partial(tyro.cli, what, **settings), argv)
    return parsed(partial(tyro.cli, _later(what), **settings), argv)()


def parsed(cli: Callable[..., T], argv: Sequence[str]) -> T:
    """What a parser of tyro's makes of a command line; `--help` exits.

    Raises:
        Refused: a settings class's own, or tyro's message in one line; or whatever else a settings class raises.
    """
    words = _words(argv)
    message, outer = io.StringIO(), sys.exception()
    try:
        with contextlib.redirect_stderr(message):
            return cli(args=words)
    except SystemExit as e:
        if not e.code:
            raise Helped(0) from None
        before = e.__context__
        while before is not None and before is not outer:
            if isinstance(before, Refused) or raised_here(before):
                raise before from before.__cause__
            before = before.__context__
        # without the frame, and the title in its first line
        text = message.getvalue().strip().partition("\n")[2]
        raise Refused(one_line(re.sub("[╭╮╰╯│─]|-{9,}", " ", text))) from None


def _words(argv: Sequence[str]) -> list[str]:
    """A command line with `--flag value` for `--flag=value`, so that tyro suggests another flag for an unknown one,
    and with the home folder for ~, which a shell puts at a word's beginning alone."""
    words: list[str] = []
    for word in argv:
        flag, equals, value = word.partition("=")
        if equals and flag.startswith("--") and value and not value.startswith("-"):
            words += [flag, os.path.expanduser(value)]
        elif words[-2:-1] == ["--reward"] and re.fullmatch(r"[\w.]+:\w+(=[^\s,=]*)?", word):
            words[-1] += f",{word}"  # several functions; what else stands there is another argument
        else:
            words.append(word)
    return words


def typed(argv: Sequence[str]) -> dict[str, str]:
    """The settings that a command line names, as fields (max_new for --max-new), each with the word of its value."""
    found: dict[str, str] = {}
    for word, following in pairwise([*argv, ""]):
        flag, equals, value = word.partition("=")
        if flag.startswith("--"):
            name = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
            found[name] = value if equals else following
    return found


def argv_of(flags: Mapping[str, object]) -> list[str]:
    """Settings as a command line: True and False are --flag and --no-flag, None is left out, a list is a comma list."""
    words: list[str] = []
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list | tuple):
            words.append(f"--{flag}={','.join(map(str, value))}")
        elif value is not None:
            words.append(f"--{flag}={value}")
    return words


def _later(call: Callable[..., T]) -> Callable[..., Callable[[], T]]:
    """The same flags; the call itself waits until the parser has released stderr."""

    @wraps(call)
    def bind(*args: object, **kwargs: object) -> Callable[[], T]:
        return partial(call, *args, **kwargs)

    return bind


def leave(code: int) -> NoReturn:
    """End the process with this exit code, and without a traceback where somebody interrupts that too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if code == 130:  # Python takes seconds to put torch's modules away, and waits for threads
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def cli_exit(run: Callable[[], int], interrupted: str = "interrupted") -> int:
    """A command's exit code, with what is to be said about how it ended.

    A refusal is the user's mistake: one line on stderr, 2. Ctrl-C prints `interrupted`: 130. A
    closed pipe (`| head`) exits silently, as other programs do: 141. `--help` exits by `Helped`.
    What the machine does not give is one line (`_machine`). Any other exception is a fault: its
    traceback on stderr, 1; so is whatever somebody's own code raises, an `exit()` in it included.

    What standard output cannot encode is escaped; a closed stream takes everything.
    """
    restore_inherited()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            return run()
        finally:
            sys.stdout.flush()
    except Refused as e:
        show_refusal(e)
        return 2
    except KeyboardInterrupt:
        print(f"E {interrupted}", file=sys.stderr)
        return 130
    except BaseException as e:
        if isinstance(e, BrokenPipeError) and _nobody_reads():
            drop_stdout()
            return 141
        if isinstance(e, Helped):
            raise
        if not raised_by_own(e) and (said := _machine(e)):
            line, code = said
            print(f"E {line}", file=sys.stderr)
            return code
        show_fault(e)
        return 1


def run_command(
    act: Callable[[T], object],
    settings: Callable[..., T] | Mapping[str, Callable[..., T]],
    argv: list[str] | None,
    prog: str,
    interrupted: str = "interrupted",
) -> int:
    """The exit code of a command: what `act` returns where that is a number, else 0; or as `cli_exit` says.

    settings: a class that the command line fills, for `act`; or by the words that name them.
    """

    def run() -> int:
        code = act(parse_args(settings, argv, prog))
        return code if isinstance(code, int) else 0

    console.setup(None)
    return cli_exit(run, interrupted)


def _nobody_reads() -> bool:
    """Whether nobody reads standard output, or the lines beside it, any more. Else another pipe broke: a fault."""
    poller = select.poll()
    for stream in (1, 2):
        poller.register(stream, 0)
    return bool(poller.poll(0))


def _machine(e: BaseException) -> tuple[str, int] | None:
    """One line and the exit code where the machine refuses something; None: it is no such exception.

    1: there is no memory left, or no space. 2: a path with a name that is too long, or in a folder that may not be
    entered.
    """
    if isinstance(e, (RuntimeError, MemoryError)) and (said := out_of_memory(e)):
        return f"{said}; take a smaller model or fewer and shorter answers", 1
    if not isinstance(e, OSError):
        return None
    if e.filename is not None and e.errno in (errno.ENAMETOOLONG, errno.EACCES):
        return f"{printable(str(e.filename))}: cannot be opened ({e.strerror}); choose another", 2
    if e.filename is not None or e.errno not in (errno.ENOSPC, errno.EIO):
        return None
    drop_stdout()
    return f"a file or standard output cannot be written ({e.strerror})", 1


# ── names that other programs, the documents and earlier versions have


NAMES: dict[str, dict[str, str]] = {
    "The documents": {
        "--half-a": "--report-detectors",
        "--gate-anchor-teacher-only": "--known-hacks-teacher-only",
        "--max-error-reschedule-attempts": "--max-error-retries",
        "--preserve-all-thinking": "--preserve-thinking",
        "--preserve-thinking-between-tool-calls": "no problem here has tool calls; leave it out",
        "--rl-checkpoint-save-every-steps": "--checkpoint-every",
        "--rl-checkpoint-keep-last": "--checkpoint-keep",
        "--rl-checkpoint-include-optimizer": "every checkpoint has it; leave it out",
        "--rl-checkpoint-include-ref-model": "the reference is the adapter at zero; leave it out",
        "--rl-checkpoint-include-rollout-buffer": "a step learns from its own rollouts; leave it out",
        "--dppo-mask-low": "say --dppo-diff-low, which bounds a fall of either sign of the advantage",
        "--dppo-mask-high": "say --dppo-diff-high, which bounds a rise of either sign of the advantage",
        "--kl-tau": "dppo_tv has no KL term; leave it out (under --loss grpo --beta weighs one)",
        "--icepop-low": "--loss icepop has these bounds, 0.2 and 5; leave it out",
        "--icepop-high": "--loss icepop has these bounds, 0.2 and 5; leave it out",
        "--clip": "with one update per batch no ratio is clipped; leave it out",
        "--cos-pre-split-every": "cos_pre_s and cos_pre_t are measured in every step; leave it out",
        "--route2-gate": "say --monitor gate or --monitor band",
        "--route2-quar-lr-scale": "both vectors learn at --lr; leave it out",
        "--placebo-pairs-path": "say --control placebo --placebo-pairs FILE",
        "--saturated-groups": "every group is looked at; leave it out",
        "--packing": "rows are packed by themselves where they can be; leave it out",
        "--ranks": "torchrun starts ranks: docs/scaling.md",
        "--base-model": "--model",
        "--task": "say --problems FILE, or --env for another environment",
        "--reward-model": "a reward is a function here: say --reward module:function",
        "--minillm-enabled": "distillation is a command of its own: vgrout distill --method minillm",
        "--uld-strategy": "distillation is a command of its own: vgrout distill --method uld",
        "--loss dr_grpo": "--loss grpo with --unbiased, its default, is Dr. GRPO",
        "--intervention vanilla": "say --intervention none",
        "--intervention projected": "say --intervention erase",
        "--intervention routing": "say --intervention route",
        "--intervention routing2": "say --intervention route2",
        "--intervention sgtm": "say --intervention examples.rivals.sgtm:SGTM",
        "--reward-hack-detector separation": "it needs four different rewards; leave it out",
        "--reward-hack-detector mop": "it missed 5 of 5 hacking runs; leave it out",
        "--reward-hack-detector ragen": "it missed 5 of 5 hacking runs; leave it out",
    },
    "TRL": {
        "--learning-rate": "--lr",
        "--num-generations": "--group",
        "--max-completion-length": "--max-new",
        "--max-steps": "--steps",
        "--max-grad-norm": "--grad-clip",
        "--save-steps": "--checkpoint-every",
        "--save-total-limit": "--checkpoint-keep",
        "--eval-steps": "--eval-ablate-every",
        "--model-name-or-path": "--model",
        "--reward-funcs": "say --reward module:function",
        "--dataset-name": "say --problems FILE; docs/problems.md makes one of a data set",
        "--per-device-train-batch-size": "say --prompts-per-step, problems with --group answers each",
        "--gradient-accumulation-steps": "micro-batches are chosen by themselves; leave it out",
        "--num-train-epochs": "say --steps, of --prompts-per-step problems each",
        "--num-iterations": "a batch has one update; leave it out",
        "--warmup-ratio": "--warmup-frac",
        "--loss-type": "say --loss, with --unbiased (Dr. GRPO, the default) or --no-unbiased",
        "--scale-rewards": "say --unbiased (no division by the group's std, the default) or --no-unbiased",
        "--report-to": "say --track tensorboard, wandb or trackio",
        "--run-name": "say --out-tag, the suffix of the run's name, or --output-dir, its folder",
        "--use-vllm": "the trainer samples by itself; leave it out",
    },
    # A flag that goes has its row here.
    "Earlier versions": {
        "--regrade-pool": "make the pool anew with `vgrout substrate` or `vgrout teacher`",
        "--resume-force": "say --resume RUN --guard log",
        "--updates-per-batch": "a batch has one update; leave it out",
        "--clip-low": "a batch has one update, in which no ratio is clipped; leave it out",
        "--clip-high": "a batch has one update, in which no ratio is clipped; leave it out",
        "--ratio-support": "ratios are of the full softmax at temperature 1; leave it out",
        "--kl-bias-correction": "the KL of --beta is k3, as published; leave it out",
        "--guard-rule": "held-out falls by more than its standard error; leave it out",
        "--guard-baseline": "two evaluations are the baseline; leave it out",
        "--label-recall": "--flags-kept",
        "--rise-eps": "an average that moves by no more than 1e-4 counts as flat; leave it out",
        "--llm-judge-name": "--llm-judge-model",
        "--llm-judge-device": "the judge is where the policy is; leave it out",
        "--llm-judge-concurrency": "an endpoint has 16 requests at once; leave it out",
        "--kl-calibrate-from": "say --kl-hard-stop, three times the mean of healthy runs",
        "--reward-hint": "prompts are as the file has them; leave it out",
        "--control oracle": "say --monitor labels",
    },
}

TRAIN = {name: answer for rows in NAMES.values() for name, answer in rows.items()}

# flags that name code; these commands take them from a run's or a study's files
OF_CODE = ("--reward", "--reference", "--env", "--rm-ensemble-members")

OF_CODE += ("--intervention", "--monitor", "--seed-monitor", "--shadow")

TRUST = "the files name it; say --trust-code"

CORES = {"--workers": "answers are graded on every core; leave it out"}

SCHEDULER = "say --commands: one line a run, for any scheduler"

# Names in other commands: the documents', and flags that are gone.
OF_COMMANDS: dict[str, dict[str, str]] = {
    "evaluate": CORES | {"--env": TRUST},
    "sample": dict.fromkeys(OF_CODE[:3], TRUST),
    "sweep": dict.fromkeys(OF_CODE, TRUST) | {"--via ray": SCHEDULER, "--ray-address": SCHEDULER},
    "teacher": CORES | {"--keep": "say --elicit, or vgrout substrate, for hacks alone"},
    "substrate": CORES,
    "problems": CORES,
    "grade": CORES,
    "report": {"--rollouts": "a page has about 50,000 of them; leave it out"},
    "distill": CORES
    | {
        "--minillm-enabled": "say --method minillm",
        "--base-model": "--student",
        "--model": "--student",
        "--reward-model": "answers are graded as they are by train; leave it out",
    },
    "iterative_dpo": CORES
    | {
        "--guard-rule": "a fall counts where it is beyond its standard error; leave it out",
        "--decline-patience": "it is 2 rounds; leave it out",
        "--max-proxy-real-gap": "it is 0.1; leave it out",
    },
    "direction": {
        "--controls": "a run under --control says how far its direction coincides; leave it out",
        "--drop-bottom-frac": "nothing here has a noise floor; leave it out",
        "--svd-cache": "decomposed weights lie in out/svd_cache; leave it out",
    },
    "download": {
        "--dry-run": "its first line says what it fetches; leave it out",
        "dataset": "a data set writes itself as a problem file: docs/problems.md",
    },
}

# The documents' defaults, which are what happens here.
NO_CHANGE = {
    "--clip 0.2",
    "--icepop-low 0.2",
    "--icepop-high 5",
    "--cos-pre-split-every 1",
    "--teacher-modes None",
}


def same(answer: str) -> bool:
    """Whether an answer is the flag that means exactly the same."""
    return answer.startswith("--") and " " not in answer


def translated(argv: Iterable[str], names: Mapping[str, str] = TRAIN) -> list[str]:
    """A command line in our flags, with - for _ in their names. Raises Refused, one line, at the first that is not
    here."""
    words = [*argv]
    out: list[str] = []
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            refuse(word in names, f"{word}: not here; {names.get(word)}")
            out.append(word)
            continue
        typed, equals, value = word.partition("=")
        name = typed.replace("_", "-")
        if not equals and words:
            value = words[0]
        if f"{name} {value}" in NO_CHANGE:
            if not equals:
                words.pop(0)
            continue
        for row in (name, *(f"{name} {one}" for one in listed(value))):
            if row in names and not same(names[row]):
                raise Refused(f"{row}: not here; {names[row]}")
        name = names.get(name, name)
        out.append(f"{name}={value}" if equals else name)
    return out
