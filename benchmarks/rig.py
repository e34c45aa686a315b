"""Workloads of the benches: runs of the trainer that take turns, and groups of random tokens."""

import contextlib
import hashlib
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from benchmarks.measure import held_bytes, peak_bytes
from vgrout.config.presets import resolve
from vgrout.config.run import Config
from vgrout.config.settings import Sampling
from vgrout.envs.base import split_tasks
from vgrout.envs.code.modes import Problem
from vgrout.ground.data import Batch, CachedGrade, Completion, Group, Rollout, UpdateRow
from vgrout.ground.rng import torch_stream
from vgrout.loop.grpo import PolicyGradients, policy_gradients
from vgrout.model.policy import Policy
from vgrout.model.sampling.sampler import sample
from vgrout.runs.plan import preflight

P, G, SEED = 4, 8, 41
# so small that both peers go on sampling from the same model, and answers keep their lengths
LR = 1e-6
NOWHERE = Problem(0, "run_tests", "", (), (), (), "", "", "f")


def command(intervention: str, *more: str, **instead: object) -> list[str]:
    """`mini` without demonstrations and evaluations: what TRL does as well.

    more: further flags. instead: other values of the flags below.
    """
    flags: dict[str, object] = {
        "intervention": intervention,
        "steps": 1000,  # past its end the rate would be 0
        "group": G,
        "prompts-per-step": P,
        "lr": LR,
        "teacher-pool-dir": "none",
        "eval-ablate-every": 0,
        "checkpoint-every": 10_000_000,
        "seed": SEED,
    }
    for name, value in instead.items():
        flags[name.replace("_", "-")] = value
    return ["mini", *(f"--{name}={value}" for name, value in flags.items()), *more]


@contextlib.contextmanager
def workplace(stay: bool = False) -> Generator[None]:
    """A temporary folder to run in (stay: this one), nothing on the log, torch's threads as before."""
    threads = torch.get_num_threads()
    disable_progress_bar()
    logger.disable("vgrout")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        with (
            tempfile.TemporaryDirectory(prefix="vgrout-bench-") as folder,
            contextlib.chdir("." if stay else folder),
        ):
            yield
    finally:
        logger.enable("vgrout")
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class Load:
    """What a step samples and learns from; every answer is as long as it may be."""

    prompts: int
    group: int  # answers to a prompt
    prompt: int  # tokens of a prompt
    answer: int  # tokens of an answer

    @property
    def answers(self) -> int:
        """Answers of a step."""
        return self.prompts * self.group


class Turns:
    """A run of the trainer in a process of its own, which does its next steps on request.

    It has to be closed: this process waits for it at its own end.
    """

    def __init__(self, name: str, argv: list[str]) -> None:
        """Start the run, and wait until it stands before its first step.

        Raises:
            RuntimeError: it ended before; with its log.
        """
        tag = f"_turns_{name}"
        self._log = Path(f"turns_{name}.log").resolve()
        context = multiprocessing.get_context("spawn")
        self._pipe, other_end = context.Pipe()
        self._process = context.Process(
            target=_paced, args=(other_end, [*argv, f"--out-tag={tag}"], self._log)
        )
        self._process.start()
        other_end.close()
        self._wait()
        self.path = max(Path("out/runs").glob(f"*{tag}"))

    def take(self, n: int) -> float:
        """Seconds a step over the next n steps: all that the trainer does, its files too."""
        start = time.perf_counter()
        self._pipe.send(n)
        self._wait()
        return (time.perf_counter() - start) / n

    @property
    def peak(self) -> int:
        """The most bytes that the process has held; the sandbox has processes of its own."""
        return peak_bytes(self._process.pid or 0)

    @property
    def held(self) -> int:
        """Bytes that the process holds now."""
        return held_bytes(self._process.pid or 0)

    def close(self) -> None:
        """End the run."""
        self._process.kill()
        self._process.join()

    def _wait(self) -> None:
        try:
            self._pipe.recv()
        except EOFError:
            raise RuntimeError(
                f"the run ended: {self._log.read_text(encoding='utf-8')[-2000:]}"
            ) from None


def _paced(pipe: Connection, argv: list[str], log: Path) -> None:
    """Run the trainer; before each step's rollouts it waits until it is asked for the step."""
    from vgrout.loop import rollout

    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    make = rollout.rollout
    left = 0  # steps that it was asked for, and has not begun

    def when_asked(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        if left == 0:
            pipe.send(None)
            left = pipe.recv()
        left -= 1
        return make(*args, **kwargs)

    rollout.rollout = when_asked  # ty: ignore
    from vgrout.train import main

    sys.exit(main(argv))


def problems(argv: list[str], steps: int) -> list[list[Any]]:
    """The problems that each step of the run draws, if all of their prompts fit the model."""
    cfg = resolve(argv)
    splits = split_tasks(
        preflight(cfg).environment,
        None,
        n_train=cfg.scale.n_problems,
        seed=SEED,
        prompt_tokens=lambda _: 0,
        max_prompt=0,
    )
    return [splits.draw(SEED, step, P) for step in range(steps)]


def differing(completion: str) -> float:
    """A reward (--reward) by which the answers of any model differ, so that every group has a signal."""
    return int(hashlib.sha256(completion.encode()).hexdigest(), 16) % 3 / 2


def noise_groups(
    vocabulary: int, group: int, prompts: int, prompt: int, completion: int
) -> list[Group]:
    """Groups of random tokens, all completions of one length, under rewards that differ."""
    noise = torch.Generator().manual_seed(SEED)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, vocabulary, (n,), generator=noise).tolist())

    logp = (0.0,) * completion
    grades = tuple(_grade(float(i % 3)) for i in range(group))
    groups: list[Group] = []
    for index in range(prompts):
        prompt_ids = ids(prompt)
        rollouts: list[Rollout] = []
        for _ in range(group):
            answer = Completion(ids(completion), "", True, logp)
            rollouts.append(Rollout.of(prompt_ids, answer))
        groups.append(Group(NOWHERE, tuple(rollouts), grades, index=index))
    return groups


def _grade(reward: float) -> CachedGrade:
    return CachedGrade(
        reward=reward, passed=False, hacked=False, gt_pass=False, format_ok=True, grader="bench"
    )


def update(policy: Policy, groups: list[Group], by_rollout: bool) -> Callable[[], PolicyGradients]:
    """Forward and backward of one update, as `learnt`."""
    return partial(policy_gradients, policy, *learnt(groups, by_rollout))


def learnt(groups: list[Group], by_rollout: bool) -> tuple[Batch, Config]:
    """What an update learns from: a gradient for each rollout, or one for each group."""
    rows: list[UpdateRow] = []
    for group in groups:
        for rollout, A in zip(group.rollouts, group.view().advantages, strict=True):
            at = len(rows) if by_rollout else group.index
            rows.append(UpdateRow(rollout, group.index, A, row_of_g=at))
    longest = max(len(row.rollout.ids) for row in rows)
    cfg = resolve(command("none", f"--max-new={longest}"))
    return Batch(tuple(groups), (), (), len(rows), 0, rows=tuple(rows)), cfg


def random_model(
    *, device: str = "cpu", dtype: torch.dtype = torch.float32, **shape: Any
) -> Qwen3ForCausalLM:
    """A Qwen3 of any shape with random weights; no token ends its answers."""
    torch.manual_seed(SEED)
    with torch.device(device):
        model = Qwen3ForCausalLM(Qwen3Config(**shape, eos_token_id=None))
    return model.to(dtype).eval()


def sampler(policy: Policy, load: Load) -> Callable[[], list[list[Completion]]]:
    """Answers of exactly `load.answer` tokens to random prompts."""
    groups = noise_groups(policy.model.config.vocab_size, 1, load.prompts, load.prompt, 1)
    prompts = [g.rollouts[0].prompt_ids for g in groups]
    endless = replace(policy, eos_ids=frozenset())
    return lambda: sample(
        endless, prompts, load.group, Sampling(), load.answer, torch_stream(SEED, "bench")
    )


def timed(run: Callable[[], object]) -> float:
    """Seconds of one call, the device's work included."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else int
    wait()
    start = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - start
