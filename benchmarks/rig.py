"""What the benches measure on: the organism's model and problems at P 4, G 8, and random models of any shape."""

import contextlib
import os
import tempfile
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from loguru import logger
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from vgrout import organism
from vgrout.config.arm import Intervention
from vgrout.config.presets import PRESETS
from vgrout.config.run import Config
from vgrout.console import Clock
from vgrout.grading.grade import Grader
from vgrout.loop import Study, as_rollout
from vgrout.model.policy import Policy, as_policy
from vgrout.model.sampler import sample
from vgrout.model.sampling import Sampling
from vgrout.types import Completion
from vgrout.rng import torch_stream
from vgrout.runs.preflight import preflight
from vgrout.runs.run_dir import RunDir
from vgrout.runs.signals import Stop
from vgrout.study import load_study
from vgrout.types import CachedGrade, Group, Problem, Rollout

P, G, SEED = 4, 8, 41
LR = 1e-6  # so small that both peers go on sampling from the same model, and answers keep their lengths
NOWHERE = Problem(0, "run_tests", "", (), (), (), "", "", "f")


def config(arm: Intervention) -> Config:
    """`mini` without demonstrations and evaluations: what TRL does as well."""
    mini = PRESETS["mini"][1]
    return replace(
        mini,
        arm=replace(mini.arm, intervention=arm),
        scale=replace(mini.scale, steps=1_000, group=G, prompts_per_step=P),  # past its end the rate would be 0
        opt=replace(mini.opt, lr=LR),
        env=replace(mini.env, teacher_pool_dir=""),
        eval=replace(mini.eval, eval_ablate_every=0),
        run=replace(mini.run, seed=SEED, checkpoint_every=10_000_000),
    )


@contextlib.contextmanager
def workplace() -> Generator[None]:
    """A temporary folder to run in, nothing on the log, torch as the organism's runs have it."""
    threads = torch.get_num_threads()
    disable_progress_bar()
    logger.disable("vgrout")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        with tempfile.TemporaryDirectory(prefix="vgrout-bench-") as folder, contextlib.chdir(folder):
            yield
    finally:
        logger.enable("vgrout")
        torch.set_num_threads(threads)


@contextlib.contextmanager
def study(arm: Intervention, grader: Grader) -> Generator[Study]:
    """Everything the trainer's loop touches, loaded by the trainer's own code."""
    cfg = config(arm)
    with RunDir.create(cfg.run_id) as run, Clock() as clock:
        yield load_study(cfg, preflight(cfg), run, grader, Stop(), clock)


def grader() -> Grader:
    return Grader(compile_reward=organism.COMPILE_REWARD, pass_reward=organism.PASS_REWARD, allow_weak=True)


@dataclass(frozen=True)
class Drawn:
    """One step's groups, every one with a signal, so that nothing is skipped."""

    problems: list[Problem]
    prompts: list[tuple[int, ...]]
    groups: list[Group]

    @property
    def rollouts(self) -> list[Rollout]:
        return [r for g in self.groups for r in g.rollouts]

    @property
    def tokens(self) -> int:
        return sum(len(r.completion_ids) for r in self.rollouts)


def draw(study: Study, step: int = 0, group: int = G, prompts: int = P) -> Drawn:
    problems = study.world.draw(SEED, step, prompts)
    ids = [study.policy.render(p.messages) for p in problems]
    stream = torch_stream(SEED, "sample", step)
    answers = sample(study.policy, ids, group, Sampling(), organism.MAX_NEW, stream)
    return Drawn(problems, ids, [as_group(p, i, a) for p, i, a in zip(problems, ids, answers, strict=True)])


def as_group(problem: Problem, prompt: tuple[int, ...], answers: Sequence[Completion]) -> Group:
    rollouts = tuple(as_rollout(problem, prompt, a, False) for a in answers)
    return Group(
        problem, rollouts, tuple(CachedGrade(float(b % 3), False, False, True, "bench") for b in range(len(answers)))
    )


def noise_groups(vocabulary: int, group: int, prompts: int, prompt: int, completion: int) -> list[Group]:
    """Groups of random tokens, all completions of one length."""
    noise = torch.Generator().manual_seed(SEED)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, vocabulary, (n,), generator=noise).tolist())

    made = []
    for _ in range(prompts):
        of = ids(prompt)
        answers = [Completion(ids(completion), "", True, (0.0,) * completion, (0.0,) * completion) for _ in range(group)]
        made.append(as_group(NOWHERE, of, answers))
    return made


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
    tok = AutoTokenizer.from_pretrained(organism.MODEL_DIR)
    assert tok is not None
    return tok
