"""Workloads of the benchmarks: the organism's model and problems at P 4, G 8, and random models of any shape."""

import contextlib
import hashlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
from loguru import logger
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from benchmarks.report import resident
from vgrout import loading, ranks
from vgrout.config.presets import PRESETS
from vgrout.config.run import Config
from vgrout.data import organism
from vgrout.grading.grade import Grader
from vgrout.method import Method, Setup, make_method
from vgrout.model.policy import Policy, as_policy
from vgrout.model.sampler import sample
from vgrout.model.sampling import Sampling
from vgrout.problems import ProblemSplits
from vgrout.ranks import Place
from vgrout.rng import torch_stream
from vgrout.runs.peers import started
from vgrout.runs.preflight import preflight
from vgrout.runs.run_context import RunContext
from vgrout.runs.run_dir import RunDir
from vgrout.train import follow, grader_of, train
from vgrout.types import CachedGrade, Completion, Group, Problem, Rollout

T = TypeVar("T")

P, G, SEED = 4, 8, 41
LR = 1e-6  # so small that both peers go on sampling from the same model, and answers keep their lengths
NOWHERE = Problem(0, "run_tests", "", (), (), (), "", "", "f")


def config(intervention: str, checkpoint_every: int = 10_000_000, tag: str = "") -> Config:
    """`mini` without demonstrations and evaluations: what TRL does as well."""
    mini = PRESETS["mini"][1]
    return replace(
        mini,
        method=replace(mini.method, intervention=intervention),
        scale=replace(mini.scale, steps=1_000, group=G, prompts_per_step=P),  # past its end the rate would be 0
        opt=replace(mini.opt, lr=LR),
        env=replace(mini.env, teacher_pool_dir=""),
        eval=replace(mini.eval, eval_ablate_every=0),
        run=replace(mini.run, seed=SEED, checkpoint_every=checkpoint_every, out_tag=tag),
    )


@contextlib.contextmanager
def workplace(stay: bool = False) -> Generator[None]:
    """A temporary folder to run in (stay: this one), nothing on the log, torch as the organism's runs have it."""
    threads = torch.get_num_threads()
    disable_progress_bar()
    logger.disable("vgrout")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        with tempfile.TemporaryDirectory(prefix="vgrout-bench-") as folder, contextlib.chdir("." if stay else folder):
            yield
    finally:
        logger.enable("vgrout")
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class Loaded:
    """What the trainer's loop begins with, loaded by the trainer's own code."""

    cfg: Config
    policy: Policy
    problems: ProblemSplits
    method: Method


def load(intervention: str, grader: Grader | None) -> Loaded:
    """A run of `config(intervention)`, before its first step."""
    return loaded(config(intervention), grader)


def loaded(cfg: Config, grader: Grader | None, policy: Policy | None = None) -> Loaded:
    """A run, before its first step; on a policy that is there already."""
    inputs, policy = preflight(cfg), policy or loading.load_policy(cfg)
    problems = loading.load_problems(cfg, inputs, policy)
    return Loaded(cfg, policy, problems, make_method(Setup(cfg, policy, inputs, grader, problems.train)))


class Turns:
    """A run of the trainer in a process of its own, on so many ranks, which does its next steps on request."""

    def __init__(self, cfg: Config, n: int = 1) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other_end = context.Pipe()
        self._process = context.Process(target=_contestant, args=(other_end, cfg, n))
        self._process.start()
        other_end.close()
        self.path = Path(self._answer())

    def take(self, n: int) -> float:
        """Seconds a step over the next n steps: all that the trainer does, its files and checkpoints too."""
        start = time.perf_counter()
        self._pipe.send(n)
        self._answer()
        return (time.perf_counter() - start) / n

    @property
    def peak(self) -> int:
        """The most bytes that its first process has held, since its start; the sandbox has processes of its own."""
        return resident("VmHWM", self._process.pid)

    def close(self) -> None:
        """End the run."""
        self._pipe.send(None)
        self._process.join()

    def _answer(self) -> Any:
        return _received(self._pipe)


class _Paced(RunContext):
    """Rank 0 of a contestant: before the ranks go on to a step they wait for it to agree, which it does on request."""

    def __init__(self, folder: RunDir, grader: Grader, cfg: Config, pipe: Connection) -> None:
        record = {"config": cfg.as_dict()}
        super().__init__(folder, grader, resume_command="", resumes=False, record=record)
        self._pipe, self._left = pipe, 0

    def started(self) -> None:
        super().started()
        self._pipe.send(self.path)
        self._next()

    def vote_stop(self) -> bool:
        self._left -= 1
        if self._left == 0:
            self._pipe.send(None)
            self._next()
        return super().vote_stop()

    def _next(self) -> None:
        steps = self._pipe.recv()
        self.stop.requested, self._left = steps is None, steps or 0


def _contestant(pipe: Connection, cfg: Config, n: int) -> None:
    inputs = preflight(cfg)
    try:
        with (
            workplace(stay=True),
            started(n, follow, Path("logs/bench")) as others,
            grader_of(cfg, inputs, n) as own,
            _Paced(RunDir.create(cfg.run_id), own, cfg, pipe) as run,
            others.joined((cfg, inputs, run.path, False)),
        ):
            train(cfg, run, inputs)
    except BaseException as e:
        pipe.send(e)


def _received(pipe: Connection) -> Any:
    """What the other end sends; an error is raised here."""
    message = pipe.recv()
    if isinstance(message, BaseException):
        raise message
    return message


def on_ranks(n: int, work: Callable[[], T]) -> T:
    """What `work` returns on rank 0 of n, in processes of their own. It is a function of a module."""
    context = multiprocessing.get_context("spawn")
    own_end, other_end = context.Pipe()
    process = context.Process(target=_first, args=(other_end, n, work))
    process.start()
    try:
        return _received(own_end)
    finally:
        process.join()


def _first(pipe: Connection, n: int, work: Callable[[], object]) -> None:
    try:
        with workplace(stay=True), started(n, partial(_other, work), Path("logs/bench")) as others, others.joined(None):
            pipe.send(work())
    except BaseException as e:
        pipe.send(e)


def _other(work: Callable[[], object], place: Place, log: Path) -> int:
    with ranks.joined(place):
        ranks.from_first(None)
        work()
    return 0


def differing(completion: str) -> float:
    """A reward (--reward) by which the answers of any model differ, so that every group has a signal."""
    return int(hashlib.sha256(completion.encode()).hexdigest(), 16) % 3 / 2


def grader() -> Grader:
    """A grader with the organism's rewards; close it."""
    return Grader(compile_reward=organism.COMPILE_REWARD, pass_reward=organism.PASS_REWARD, allow_weak=True)


@dataclass(frozen=True)
class Drawn:
    """One step's groups, every one with a signal, so that nothing is skipped."""

    problems: list[Problem]
    prompts: list[tuple[int, ...]]
    groups: list[Group]

    @property
    def rollouts(self) -> list[Rollout]:
        """Of all groups."""
        return [r for g in self.groups for r in g.rollouts]

    @property
    def tokens(self) -> int:
        """Of all completions."""
        return sum(len(r.completion_ids) for r in self.rollouts)


def draw(loaded: Loaded, max_new: int = organism.MAX_NEW) -> Drawn:
    """The completions of a first step."""
    problems = loaded.problems.draw(SEED, 0, P)
    ids = [loaded.policy.render(p.messages) for p in problems]
    answers = sample(loaded.policy, ids, G, Sampling(), max_new, torch_stream(SEED, "sample", 0))
    of = zip(problems, ids, answers, strict=True)
    return Drawn(problems, ids, [as_group(*one, index) for index, one in enumerate(of)])


def as_group(problem: Problem, prompt: tuple[int, ...], answers: Sequence[Completion], index: int = 0) -> Group:
    """Completions of one prompt under rewards that differ; equal ones are rewarded alike, as by a grader."""
    rollouts = tuple(Rollout.of(problem, prompt, a) for a in answers)
    kinds: dict[tuple[int, ...], int] = {}
    rewards = [kinds.setdefault(a.ids, len(kinds)) % 3 for a in answers]
    grades = tuple(CachedGrade(float(r), False, False, True, "bench") for r in rewards)
    return Group(problem, rollouts, grades, index=index)


def noise_groups(vocabulary: int, group: int, prompts: int, prompt: int, completion: int) -> list[Group]:
    """Groups of random tokens, all completions of one length."""
    noise = torch.Generator().manual_seed(SEED)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, vocabulary, (n,), generator=noise).tolist())

    def one_group() -> Group:
        prompt_ids, logp = ids(prompt), (0.0,) * completion
        answers = [Completion(ids(completion), "", True, logp, logp) for _ in range(group)]
        return as_group(NOWHERE, prompt_ids, answers)

    return [one_group() for _ in range(prompts)]


def random_model(*, device: str = "cpu", dtype: torch.dtype = torch.float32, **shape: Any) -> Qwen3ForCausalLM:
    """The organism's shape with random weights, changed where `shape` says so."""
    usual: dict[str, Any] = {
        "vocab_size": 1024,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "eos_token_id": None,
    }
    torch.manual_seed(SEED)
    with torch.device(device):
        model = Qwen3ForCausalLM(Qwen3Config(**usual | shape))
    return model.to(dtype).eval()


def random_policy(**shape: Any) -> Policy:
    """A policy on random weights, whose answers run to their full length: no token ends them."""
    torch.set_num_threads(1)
    return replace(as_policy(random_model(**shape), tokenizer(), None), eos_ids=frozenset())


def tokenizer() -> PreTrainedTokenizerBase:
    """The organism's."""
    tok = AutoTokenizer.from_pretrained(organism.MODEL_DIR)
    assert tok is not None
    return tok
