"""TRL (extra `bench`) doing our step: GRPOTrainer, LoRA on the same Linears, an in-process reward.

It has its best reasonable settings for this work: no gradient checkpointing, fp32, Dr. GRPO without
KL (no reference forward), one optimiser step a generation (no second forward for old log-probs), no
logging, no saving, and the faster of two numbers of threads. Its reward only parses the answer,
which is cheaper than any check of it.
"""

import ast
import importlib
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback

from benchmarks.rig import LR, SEED, G, P
from vgrout.config.settings import Sampling
from vgrout.envs.code.modes import Problem
from vgrout.ground import embedded
from vgrout.ground.io import Refused
from vgrout.model.load.source import TARGETS

LENGTH = "completions/mean_length"
CODE = re.compile(r"```(?:python)?\n(.*?)```", re.DOTALL)


def libraries() -> dict[str, Any]:
    """trl, peft, datasets. Raises Refused, one line, where one is missing."""
    try:
        return {name: importlib.import_module(name) for name in ("trl", "peft", "datasets")}
    except ImportError as e:
        raise Refused(
            f"{e.name} is not installed; run `uv run --extra bench python -m benchmarks …`"
        ) from None


def parses(completions: Sequence[Any], **_: Any) -> list[float]:
    """Reward 1 for an answer whose code parses."""
    rewards = []
    for completion in completions:
        found = CODE.search(completion[0]["content"])
        try:
            ast.parse(found[1] if found else "!")
            rewards.append(1.0)
        except (SyntaxError, ValueError):
            rewards.append(0.0)
    return rewards


def _now() -> float:
    """The time, once a GPU has done what it was told to."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class Clock(TrainerCallback):
    """Times TRL's steps. After each block the other contestant has its turn, which is not timed."""

    def __init__(self, per_block: int, other: Callable[[], None]) -> None:
        self.per_block = per_block
        self.other = other
        self.steps = 0
        self.start = 0.0
        self.blocks: list[float] = []  # seconds a step, of each block

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.steps == 0:
            self.start = _now()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps += 1
        if self.steps % self.per_block:
            return
        self.blocks.append((_now() - self.start) / self.per_block)
        if len(self.blocks) > 1:  # the first block warms up
            threads = torch.get_num_threads()
            self.other()
            torch.set_num_threads(threads)
        self.start = _now()


@dataclass(frozen=True)
class Model:
    """What TRL trains."""

    folder: Path = embedded.MODEL_DIR
    dtype: torch.dtype = torch.float32
    max_new: int = embedded.MAX_NEW


def settings(max_new: int, group: int, **own: Any) -> Any:
    """TRL's configuration for one of our steps; own: what differs by model and machine."""
    sampling = Sampling()
    return libraries()["trl"].GRPOConfig(
        output_dir="trl",
        num_generations=group,
        max_completion_length=max_new,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        loss_type="dr_grpo",
        scale_rewards="none",
        beta=0.0,
        learning_rate=LR,
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        shuffle_dataset=False,
        dataloader_pin_memory=False,
        seed=SEED,
        **own,
    )


def lora(rank: int) -> Any:
    """LoRA on the Linears that we adapt."""
    config = libraries()["peft"].LoraConfig
    return config(r=rank, lora_alpha=2 * rank, target_modules=sorted(TARGETS))


def trainer(
    model: Model, problems: Sequence[Sequence[Problem]], steps: int, callback: TrainerCallback
) -> Any:
    """A GRPOTrainer on these steps' problems."""
    lib = libraries()
    args = settings(
        model.max_new,
        G,
        per_device_train_batch_size=P * G,
        max_steps=steps,
        gradient_checkpointing=False,
        chat_template_kwargs={"enable_thinking": False},
    )
    messages = [list(problem.messages) for step in problems for problem in step]
    return lib["trl"].GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model.folder, dtype=model.dtype),
        reward_funcs=parses,
        args=args,
        train_dataset=lib["datasets"].Dataset.from_dict({"prompt": messages}),
        processing_class=AutoTokenizer.from_pretrained(model.folder),
        peft_config=lora(8),
        callbacks=[callback],
    )


def measure(
    problems: Sequence[Sequence[Problem]],
    blocks: int,
    per_block: int,
    other: Callable[[], None],
    choose: bool,
    model: Model = Model(),
) -> tuple[list[float], str]:
    """Seconds of TRL's steps by block, and a note on them. `other` is called after each block.

    choose: try one thread and all of them, and take the faster.
    """
    before = torch.get_num_threads()
    best, tried = before, ""
    if choose:
        trials = _try_threads(model, problems)
        best = min(trials, key=lambda threads: trials[threads])
        times = ", ".join(f"{threads}: {seconds:.2f} s" for threads, seconds in trials.items())
        tried = f" (of {times})"
    clock = Clock(per_block, other)
    length = _train(model, problems, (blocks + 1) * per_block, clock, best)
    torch.set_num_threads(before)
    seconds = clock.blocks[1:]
    note = (
        f"TRL {version('trl')}, peft {version('peft')}: LoRA rank 8 on the same Linears, "
        f"{best} thread(s){tried}; {statistics.median(seconds):.2f} s a step, "
        f"answers of {length:.0f} tokens on average."
    )
    return seconds, note


def _try_threads(model: Model, problems: Sequence[Sequence[Problem]]) -> dict[int, float]:
    """Number of threads → seconds of a step with them."""
    trials: dict[int, float] = {}
    for threads in (1, len(os.sched_getaffinity(0))):
        clock = Clock(1, lambda: None)
        _train(model, problems, 4, clock, threads)
        trials[threads] = statistics.median(clock.blocks[1:])
    return trials


def _train(
    model: Model,
    problems: Sequence[Sequence[Problem]],
    steps: int,
    callback: TrainerCallback,
    threads: int,
) -> float:
    """Run TRL; mean length of its answers in tokens."""
    peer = trainer(model, problems, steps, callback)
    torch.set_num_threads(threads)  # the trainer's accelerator may set it at construction
    peer.remove_callback(PrinterCallback)  # its summary is not our table
    peer.train()
    lengths = [float(entry[LENGTH]) for entry in peer.state.log_history if LENGTH in entry]
    return lengths[-1] if lengths else math.nan
