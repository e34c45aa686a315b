"""Speed of distillation against the plain models. Ratios of one interleaved run.

The peer is what any distillation has to do: the student's own forward and backward to all weights and the teacher's
forward, both on padded rows with full logits, without a loss between them beyond the cross-entropy.
"""

import json
import statistics
import tempfile
from functools import partial
from pathlib import Path

import torch

from benchmarks import rig
from benchmarks.report import Ratio, interleaved
from benchmarks.rows import Report, Row
from benchmarks.update import plain
from vgrout.config.presets import PRESETS
from vgrout.data import organism
from vgrout.imitation.distill_config import DistillConfig, Task, UldConfig, preflight
from vgrout.imitation.distill_methods import METHODS, Graded
from vgrout.imitation.trainable import AdapterOnly
from vgrout.model.logprobs import collate
from vgrout.model.policy import LanguageModel, Policy, load_policy
from vgrout.model.sampler import sample
from vgrout.model.sampling import Sampling
from vgrout.rng import torch_stream
from vgrout.types import Rollout


def teacher_file(folder: Path) -> Path:
    """An adapter that is another model than the organism."""
    policy = load_policy(organism.MODEL_DIR, device="cpu", dtype=torch.float32, cache_dir=None)
    with torch.no_grad():
        policy.adapter.δS.copy_(0.2 * torch.randn(len(policy.adapter), generator=torch.Generator().manual_seed(0)))
    policy.adapter.save(folder / "t.safetensors", {"cfg": json.dumps(PRESETS["mini"][1].as_dict())})
    return folder / "t.safetensors"


def draw(task: Task, behaviour: LanguageModel, sampling: Sampling) -> list[Graded]:
    """One step's answers at P 4, G 8."""
    problems = task.parts["train"][: rig.P]
    prompts = [behaviour.render(p.messages) for p in problems]
    sampled = sample(behaviour, prompts, rig.G, sampling, task.max_new, torch_stream(rig.SEED, "distill", 0))
    return [(Rollout.of(p, ids, a), None) for p, ids, of in zip(problems, prompts, sampled, strict=True) for a in of]


@torch.no_grad()
def read(policy: Policy, rollouts: list[Rollout]) -> None:
    """The teacher's forward with the logits of every position."""
    batch = collate([r.prompt_ids for r in rollouts], [r.completion_ids for r in rollouts], policy.device)
    policy.model(input_ids=batch.ids, use_cache=False).logits.float().log_softmax(-1)


def both(student: Policy, teacher: Policy, rollouts: list[Rollout]) -> None:
    """The plain student and teacher on these rows."""
    read(teacher, rollouts)
    plain(student, rollouts)


def run(quick: bool = False) -> Report:
    """Tokens a second of an update by MiniLLM and by ULD, against the plain models."""
    rows: list[Row] = []
    with rig.workplace(), tempfile.TemporaryDirectory() as folder:
        torch.set_num_threads(1)
        file = teacher_file(Path(folder))
        student = load_policy(organism.MODEL_DIR, device="cpu", dtype=torch.float32, cache_dir=None)
        teacher = load_policy(organism.MODEL_DIR, device="cpu", dtype=torch.float32, cache_dir=None)
        teacher.adapter.load(file)
        for name, cfg in (
            ("minillm", DistillConfig(teacher=str(file))),
            ("uld wasserstein", DistillConfig(teacher=str(file), method="uld")),
            (
                "uld topk_align",
                DistillConfig(teacher=str(file), method="uld", uld=UldConfig(uld_strategy="topk_align", uld_top_k=32)),
            ),
        ):
            task = preflight(cfg)
            method = METHODS[cfg.method](task, student, teacher)
            answers = draw(task, method.behaviour_model(student, teacher), method.sampling)
            rollouts = [rollout for rollout, _ in answers]
            trained = AdapterOnly(student, task.opt, 10)
            times = interleaved(
                {
                    "own": partial(method.learn, trained, answers, 0),
                    "plain": partial(both, student, teacher, rollouts),
                },
                6 if quick else 30,
                name,
            )
            tokens = sum(len(r.completion_ids) for r in rollouts)
            ratio = Ratio.of(times["plain"].cpu, times["own"].cpu)
            rate = tokens / statistics.median(times["own"].cpu)
            figure = f"{ratio} of its tokens a second ({rate:,.0f} a CPU second)"
            rows.append(Row("distill", f"{name}: loss and gradient", "plain student and teacher, same rows", figure))
    return Report(rows, ["Tokens are those of answers; above 1 × distillation is the faster. One thread, P 4, G 8."])
