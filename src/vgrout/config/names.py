"""Flags by the names that other programs, the documents and earlier versions have for them. Torch-free.

A row of `NAMES` has what somebody types, a flag or a flag and a word of its value, and our answer: the flag that means
exactly the same and is taken in its place, or what the refusal says.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from vgrout.config.checks import listed
from vgrout.ground.cli import parse_args
from vgrout.ground.errors import Refused

T = TypeVar("T")

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
        "--intervention sgtm": "say --intervention route2 --monitor detector",
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
        "--dataset-name": "say --problems FILE; `vgrout download dataset` makes one",
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
# Names in other commands: the documents', and flags that are gone.
OF_COMMANDS: dict[str, dict[str, str]] = {
    "evaluate": {"--env": TRUST},
    "sample": dict.fromkeys(OF_CODE[:3], TRUST),
    "sweep": dict.fromkeys(OF_CODE, TRUST),
    "distill": {
        "--minillm-enabled": "say --method minillm",
        "--base-model": "--student",
        "--model": "--student",
        "--reward-model": "answers are graded as they are by train; leave it out",
    },
    "iterative_dpo": {
        "--guard-rule": "a fall counts where it is beyond its standard error; leave it out",
    },
    "direction": {
        "--controls": "a run under --control says how far its direction coincides; leave it out",
        "--drop-bottom-frac": "nothing here has a noise floor; leave it out",
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


def parse_command(
    what: Callable[..., T] | Mapping[str, Callable[..., T]],
    argv: list[str] | None,
    prog: str,
    **settings: object,
) -> T:
    """As `parse_args`, with the names that other programs have for this command's flags."""
    names = OF_COMMANDS.get(prog.split()[-1], {})
    argv = sys.argv[1:] if argv is None else argv
    return parse_args(what, translated(argv, names), prog, **settings)
