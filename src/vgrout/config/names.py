"""Names that people type: flags of other trainers and of the documents, with what is said of each here. Torch-free.

This is the parser's table and that of docs/flags.md. A flag alone means exactly the same, and is taken for it; any
other answer is the refusal's. A name may end with a word of its flag's value.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from vgrout.cli import parse_args
from vgrout.config.checks import flag, listed
from vgrout.errors import Refused

T = TypeVar("T")

NAMES: dict[str, dict[str, str]] = {
    "TRL": {
        "learning_rate": "--lr",
        "num_generations": "--group",
        "max_completion_length": "--max-new",
        "max_steps": "--steps",
        "max_grad_norm": "--grad-clip",
        "num_iterations": "--updates-per-batch",
        "save_steps": "--checkpoint-every",
        "save_total_limit": "--checkpoint-keep",
        "eval_steps": "--eval-ablate-every",
        "epsilon": "with one update per batch no ratio is clipped; with more say --clip-low and --clip-high",
        "epsilon_high": "with one update per batch no ratio is clipped; with more say --clip-high",
        "loss_type": "say --loss grpo, with --unbiased (the default, Dr. GRPO) or --no-unbiased",
        "scale_rewards": "say --unbiased (no division by the group's std, the default) or --no-unbiased",
        "per_device_train_batch_size": "a step has --prompts-per-step problems with --group answers each",
        "gradient_accumulation_steps": "a step is computed in micro-batches by itself; leave it out",
        "num_train_epochs": "say --steps, of --prompts-per-step problems each",
        "warmup_steps": "say --warmup-frac, the share of --steps",
        "lr_scheduler_type": "linear warm-up (--warmup-frac), then cosine to 0; leave it out",
        "bf16": "say --dtype bf16",
        "fp16": "say --dtype bf16 or --dtype fp32",
        "use_vllm": "the trainer samples by itself; leave it out",
        "gradient_checkpointing": "a step is computed in micro-batches by itself; leave it out",
        "entropy_coef": "the loss has no entropy term; leave it out",
        "use_cpu": "a GPU is used where there is one; for the CPU set CUDA_VISIBLE_DEVICES to nothing",
        "project": "say --track wandb, and set WANDB_PROJECT",
        "run_name": "say --out-tag, the suffix of the run's name, or --output-dir, its folder",
        "use_bias_correction_kl": "say --kl-bias-correction, with --beta",
        "report_to": "say --track tensorboard, wandb or trackio",
        "logging_steps": "every step is logged; leave it out",
        "resume_from_checkpoint": "say --resume RUN or --resume latest",
    },
    "verl, cleanrl, earlier TRL and others": {
        "warmup_ratio": "--warmup-frac",
        "max_prompt_length": "a prompt longer than the model's window minus --max-new is dropped; leave it out",
        "model_name_or_path": "--model",
        "model_name": "--model",
        "rollout_n": "--group",
        "ppo_epochs": "say --updates-per-batch, each on the whole batch",
        "total_training_steps": "--steps",
        "max_new_tokens": "--max-new",
        "max_tokens": "--max-new",
        "max_response_length": "--max-new",
        "batch_size": "a step has --prompts-per-step problems with --group answers each",
        "train_batch_size": "a step has --prompts-per-step problems with --group answers each",
        "epochs": "say --steps, of --prompts-per-step problems each",
        "total_timesteps": "say --steps, of --prompts-per-step × --group answers each",
        "enable_thinking": "--thinking",
        "kl_coef": "say --beta, the weight of the KL (K3) in the loss",
        "kl_loss_coef": "say --beta, the weight of the KL (K3) in the loss",
        "clip_ratio": "with one update per batch no ratio is clipped; with more say --clip-low and --clip-high",
        "clip_coef": "with one update per batch no ratio is clipped; with more say --clip-low and --clip-high",
        "dataset": "say --problems FILE; `vgrout download dataset` makes one",
        "dataset_name": "say --problems FILE; `vgrout download dataset` makes one",
        "reward_funcs": "say --reward module:function",
        "lora_r": "the adapter is one number per singular value, of full rank; leave it out",
        "lora_rank": "the adapter is one number per singular value, of full rank; leave it out",
        "device": "a GPU is used where there is one; for the CPU set CUDA_VISIBLE_DEVICES to nothing",
        "cuda": "a GPU is used where there is one; for the CPU set CUDA_VISIBLE_DEVICES to nothing",
        "gpu": "a GPU is used where there is one; for the CPU set CUDA_VISIBLE_DEVICES to nothing",
        "config": "every setting is a flag; a study file holds many: docs/studies.md",
        "verbose": "the log below logs/ has everything; for the console say --columns all",
        "wandb_project": "say --track wandb, and set WANDB_PROJECT",
        "wandb_project_name": "say --track wandb, and set WANDB_PROJECT",
        "wandb": "say --track wandb",
        "exp_name": "say --out-tag, the suffix of the run's name, or --output-dir, its folder",
    },
    "The documents and earlier versions": {
        "half_a": "--report-detectors",
        "gate_anchor_teacher_only": "--known-hacks-teacher-only",
        "max_error_reschedule_attempts": "--max-error-retries",
        "preserve_all_thinking": "--preserve-thinking",
        "rl_checkpoint_save_every_steps": "--checkpoint-every",
        "rl_checkpoint_keep_last": "--checkpoint-keep",
        "rl_checkpoint_include_optimizer": "every checkpoint has it, or a resumed run would be another; leave it out",
        "rl_checkpoint_include_ref_model": "the reference is the adapter at zero, and needs no file; leave it out",
        "rl_checkpoint_include_rollout_buffer": "a step learns from its own rollouts alone; leave it out",
        "checkpoint_include_optimizer": "every checkpoint has it, or a resumed run would be another; leave it out",
        "checkpoint_include_ref_model": "the reference is the adapter at zero, and needs no file; leave it out",
        "checkpoint_include_rollout_buffer": "a step learns from its own rollouts alone; leave it out",
        "dppo_mask_low": "say --dppo-diff-low, which bounds a fall of either sign of the advantage",
        "dppo_mask_high": "say --dppo-diff-high, which bounds a rise of either sign of the advantage",
        "kl_tau": "dppo_tv has no KL term; leave it out (under --loss grpo --beta weighs one)",
        "task": "say --problems FILE for problems of your own, or --env for another environment",
        "base_model": "--model",
        "reward_model": "a reward is a function here: say --reward module:function",
        "regrade_pool": "a pool's labels are those of the grader that it names; make it anew with `vgrout substrate` "
        "or `vgrout teacher`",
        "resume_force": "nothing but a halted run is resumed against its will: say --resume RUN --guard log",
        "packing": "rows are packed by themselves where they can be; leave it out",
        "ranks": "torchrun starts ranks: docs/scaling.md",
        "minillm_enabled": "distillation is a command of its own: vgrout distill --method minillm",
        "uld_strategy": "distillation is a command of its own: vgrout distill --method uld",
        "clip": "with one update per batch no ratio is clipped: leave it out; with more say --clip-low and --clip-high",
        "cos_pre_split_every": "cos_pre_s and cos_pre_t are measured in every step; leave it out",
        "route2_gate": "say --monitor gate or --monitor band",
        "route2_quar_lr_scale": "both vectors learn at --lr; leave it out",
        "icepop_low": "say --loss icepop --clip-low 0.2",
        "icepop_high": "say --loss icepop --clip-high 5",
        "placebo_pairs_path": "say --control placebo --placebo-pairs FILE",
        "saturated_groups": "every group is looked at; leave it out",
        "preserve_thinking_between_tool_calls": "no problem here has tool calls; leave it out",
        "loss dr_grpo": "--loss grpo with --unbiased, its default, is Dr. GRPO",
        "intervention vanilla": "say --intervention none",
        "intervention projected": "say --intervention erase",
        "intervention routing": "say --intervention route",
        "intervention routing2": "say --intervention route2",
        "intervention sgtm": "say --intervention route2 --monitor detector",
        "control oracle": "say --monitor labels",
        "reward_hack_detector separation": "at most three different rewards, and it needs four; leave it out",
        "reward_hack_detector mop": "it missed 5 of 5 hacking runs; leave it out",
        "reward_hack_detector ragen": "it missed 5 of 5 hacking runs; leave it out",
    },
}
ANSWERS = {name: answer for of in NAMES.values() for name, answer in of.items()}

# Keys of a run's files by the names that the documents have for them: file → documents' key → the key here.
KEYS: dict[str, dict[str, str]] = {
    "steps.jsonl": {
        "gt_s": "solve_s",
        "gt_t": "pass_t",
        "sprd": "signal",
        "N": "n",
        "t_rew": "grade",
    },
    "rollouts.jsonl": {
        "exploited": "hacked",
        "gt_correct": "solved",
        "hacked_C": "hacked_arbitrary",
        "hacked_D": "hacked_wrong_tests",
        "hacked_E": "hacked_loophole_used",
        "problem": "problem_id",
        "mode": "env_mode",
    },
}

# Values at which a flag of the documents changes nothing here: the documents' own defaults.
NO_CHANGE = {("clip", "0.2"), ("cos_pre_split_every", "1")}

# What other commands than train answer to such a name, where it is not the answer of train.
OF_COMMANDS: dict[str, dict[str, str]] = {
    "distill": {
        "minillm_enabled": "say --method minillm",
        "model": "say --student",
        "base_model": "say --student",
        "reward_model": "answers are graded as they are by train, and nothing is learnt from the grade; leave it out",
    },
    "iterative_dpo": {
        "reward_funcs": "say --scorer, which may be a module:function",
        "model": "say --base-model",
        "model_name_or_path": "say --base-model",
    },
}


def same(answer: str) -> bool:
    """Whether an answer of the table is the flag that means exactly the same."""
    return re.fullmatch("--[a-z0-9-]+", answer) is not None


def translated(argv: Iterable[str]) -> list[str]:
    """A command line in this trainer's flags, with - for _ in their names. Raises Refused, one line, at the first
    that is not here."""
    out, name = [], ""
    for word in without_defaults(argv):
        value = word
        if word.startswith("--"):
            head, equals, value = word.partition("=")
            typed = head[2:].replace("-", "_")
            name = typed.removeprefix("no_")
            if same(answer := ANSWERS.get(name, "")):
                typed = typed.removesuffix(name) + answer[2:]
                name = answer[2:].replace("-", "_")
            word = f"{flag(typed)}{equals}{value}"
        for there in (name, *(f"{name} {given}" for given in listed(value))):
            if there in ANSWERS:
                raise Refused(f"{flag(name)}{there.removeprefix(name)}: not here; {ANSWERS[there]}")
        out.append(word)
    return out


def without_defaults(argv: Iterable[str]) -> list[str]:
    """A command line without the documents' flags at the documents' defaults, which are what happens here; and
    `--teacher-modes None`, all flaws, as it is said here."""
    words = [*argv]
    out: list[str] = []
    i = 0
    while i < len(words):
        head, equals, value = words[i].partition("=")
        n = 1
        if words[i].startswith("--") and not equals and i + 1 < len(words):
            value, n = words[i + 1], 2
        name = head.removeprefix("--").replace("-", "_")
        if (name, value) == ("teacher_modes", "None"):
            out.append("--teacher-modes=")
        elif (name, _plain(value)) in NO_CHANGE:
            pass
        else:
            out.append(words[i])
            n = 1
        i += n
    return out


def _plain(value: str) -> str:
    """A number in its shortest form: 0.20 is 0.2."""
    try:
        return f"{float(value):g}"
    except ValueError:
        return value


def parse_command(
    what: Callable[..., T] | Mapping[str, Callable[..., T]],
    argv: list[str] | None,
    prog: str,
    **settings: object,
) -> T:
    """As `parse_args`; a flag that the command does not have, and that is in the table, is answered.

    Raises:
        Refused: as there, in one line.
    """
    try:
        return parse_args(what, argv, prog, **settings)
    except Refused as e:
        unknown = re.match(r"--([\w-]+)(?:[= ][^:]*)?: no such flag", str(e))
        if unknown is None:
            raise
        answer = _answer(unknown[1].replace("-", "_"), prog.split()[-1])
        if not answer:
            raise
        raise Refused(f"--{unknown[1]}: not here; {answer}") from None


def _answer(name: str, command: str) -> str:
    """What a command other than train says of a name; "": nothing is known of it."""
    of_command = OF_COMMANDS.get(command, {}).get(name)
    if of_command:
        return of_command
    answer = ANSWERS.get(name, "")
    if not answer or "is a command of its own" in answer:
        return answer
    return f"of `vgrout train`: {answer}"
