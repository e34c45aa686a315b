"""Load and check everything the loop touches, in the order in which things depend on one another."""

import hashlib
import os
import resource
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from loguru import logger
from tqdm import tqdm
from transformers.utils.logging import disable_progress_bar

from vgrout.arms.base import Arm
from vgrout.arms.baselines import make_baseline
from vgrout.arms.by_direction import make_arm
from vgrout.arms.own_streams import make_streams
from vgrout.config.run import ORGANISM, READING, Config
from vgrout.console import Clock
from vgrout.evaluate import Side
from vgrout.grading.grade import Grader
from vgrout.guard.guard import Watch
from vgrout.loop import Study, load_state_dict
from vgrout.model.policy import SVD_CACHE, Policy, load_language_model, load_policy
from vgrout.model.sampler import Sampling
from vgrout.model.svd_adapter import weights_sha256
from vgrout.monitors.text_scores import anchor_texts, background
from vgrout.optim import Optimizer
from vgrout.problems import ProblemSplits, balanced, load_splits, plain
from vgrout.runs import checkpoint
from vgrout.runs.preflight import Inputs
from vgrout.runs.results import Final
from vgrout.runs.run_context import Interrupted
from vgrout.runs.run_dir import RunDir
from vgrout.runs.signals import Stop
from vgrout.table import StepRow
from vgrout.teacher.demonstrations import Teacher
from vgrout.teacher.pools import regraded
from vgrout.teacher.substrate import elicited
from vgrout.types import MODES, Answer, Mode, Problem


def device_and_dtype(cfg: Config) -> tuple[torch.device, torch.dtype]:
    """bf16 on a GPU, fp32 on a CPU (the organism's weights are small enough for exactness)."""
    if torch.cuda.is_available():
        return torch.device("cuda"), torch.bfloat16
    # Matrices of 128 × 256 lose by a second thread, by far on a machine that is shared: grading has the other cores.
    few = cfg.scale.model == ORGANISM
    torch.set_num_threads(cfg.run.threads or (1 if few else os.cpu_count() or 1))
    return torch.device("cpu"), torch.float32


def load_study(cfg: Config, inputs: Inputs, run: RunDir, grader: Grader, stop: Stop, clock: Clock) -> Study:
    """Raises ValueError, one line, where the files do not fit the model."""
    device, dtype = device_and_dtype(cfg)
    if not sys.stderr.isatty():
        disable_progress_bar()
    policy = load_policy(cfg.model_path, device=device, dtype=dtype, cache_dir=SVD_CACHE)
    policy = replace(policy, preserve_thinking=cfg.env.preserve_thinking)
    if policy.window <= cfg.scale.max_new:
        raise ValueError(
            f"--max-new {cfg.scale.max_new}: the model's window holds {policy.window} tokens, prompt included"
        )
    judge = None
    if cfg.loss.teacher_model:
        judge = load_language_model(cfg.teacher_model_path, device=device, dtype=dtype, flag="--teacher-model")
        if judge.tokenizer_sha256 != policy.tokenizer_sha256:
            raise ValueError(
                f"--teacher-model {cfg.loss.teacher_model}: has another tokenizer than --model {cfg.scale.model}"
            )
    pool = inputs.pool
    world = load_splits(
        inputs.rows,
        env_mode=cfg.env.env_mode,
        n_problems=cfg.scale.n_problems,
        seed=cfg.run.seed,
        partition=pool.partition if pool else None,
        markers=pool.announced if pool else None,
        only_ids=pool.ids if pool and cfg.mixes else None,
        only_modes=cfg.env.demo_held_out,
        prompt_len=lambda p: len(policy.render(p.messages)),
        max_prompt=policy.window - cfg.scale.max_new,
    )
    if world.too_long:
        logger.warning(
            f"{world.too_long} problems dropped: prompt longer than the window ({policy.window}) minus max_new"
        )

    if sentence := cfg.inoculation:  # evaluation asks as ever
        asked = [elicited(p, sentence) for p in world.train]
        fit = tuple(p for p in asked if len(policy.render(p.messages)) <= policy.window - cfg.scale.max_new)
        logger.info(f"every training prompt ends with {sentence!r}")
        world = replace(world, train=fit)
    if pool is not None and cfg.env.regrade_pool:
        again = regraded(pool, {p.id: p for p in world.train}, grader, partial(tqdm, desc="regrading", disable=None))
        pool = again.pool
        for line in again.lines():
            logger.info(line)
    teacher = Teacher(
        pool if cfg.mixes else None,
        policy,
        world.train,
        per_group=cfg.n_teacher,
        seed=cfg.run.seed,
        off_step=cfg.env.teacher_off_step,
        modes=cfg.env.demo_modes,
        max_new=cfg.scale.max_new,
    )
    sampling = Sampling()
    if cfg.loss.drops and cfg.loss.ratio_support == "full":
        logger.info(
            f"sampled at temperature {sampling.temperature:g}, top-k {sampling.top_k}, top-p {sampling.top_p:g}; "
            f"{cfg.loss.loss} compares full softmaxes at temperature 1 (--ratio-support sampled: what was sampled from)"
        )
    return Study(
        cfg=cfg,
        policy=policy,
        grader=grader,
        world=world,
        teacher=teacher,
        teacher_model=judge,
        arm=load_arm(cfg, inputs, policy, grader, world, sampling),
        baseline=make_baseline(cfg, policy, inputs.pairs),
        optim=Optimizer(
            policy.adapter,
            lr=cfg.opt.lr,
            betas=(cfg.opt.adam_beta1, cfg.opt.adam_beta2),
            weight_decay=cfg.opt.weight_decay,
            warmup_frac=cfg.opt.warmup_frac,
            steps=cfg.scale.steps,
            grad_clip=cfg.opt.grad_clip,
        ),
        run=run,
        stop=stop,
        clock=clock,
        sampling=sampling,
        watch=Watch(cfg, policy, grader, world.train, sampling),
    )


def load_arm(
    cfg: Config, inputs: Inputs, policy: Policy, grader: Grader, world: ProblemSplits, sampling: Sampling
) -> Arm:
    """The arm; for one that reads, the base answers some training prompts first."""
    if cfg.arm.intervention not in READING:
        return make_arm(cfg.arm, policy, inputs.pairs, inputs.placebo, cfg.run.seed)
    known = None
    if cfg.arm.control not in ("no_gate", "oracle"):
        known = background(
            policy,
            grader,
            world.train,
            anchor_texts(policy, inputs.anchors, inputs.rows),
            sampling=sampling,
            max_new=cfg.scale.max_new,
            paid=cfg.env.pass_reward,
            seed=cfg.run.seed,
            prompts=cfg.arm.reader_prompts,
            judged=cfg.arm.reader_threshold == "both",
        )
        logger.info(
            f"read before training: {len(known.fit)} texts as the cloud, {len(known.judge)} paid answers and "
            f"{len(known.anchors)} anchors for the threshold"
        )
    return make_streams(
        cfg.arm, policy, inputs.pairs, inputs.placebo, known, paid=cfg.env.pass_reward, seed=cfg.run.seed
    )


def restore(study: Study) -> None:
    """Put everything back to the last good checkpoint, and cut the growing files to what they were then."""
    point, rows = checkpoint.go_back(study.run.path)
    study.rows = [StepRow.from_json(row) for row in rows]
    load_state_dict(study, point.state)


def provenance(study: Study) -> dict[str, Any]:
    """For run.json: the control's name, and where the direction comes from."""
    arm = study.cfg.arm
    return {
        "control": arm.control_name,
        "control_what": arm.control_what,
        "direction": study.arm.origin.as_json() if study.arm.origin else None,
    }


def hashes(study: Study) -> dict[str, str | None]:
    """sha256 of what was loaded: with `plan.file_hashes`, everything the numbers depend on besides the code."""
    policy, judge = study.policy, study.teacher_model
    return {
        "base_weights": weights_sha256(policy.model, policy.adapter),
        "teacher_weights": weights_sha256(judge.model, None) if judge else None,
        "tokenizer": policy.tokenizer_sha256,
    }


def direction_hash(study: Study) -> str | None:
    """sha256 of the arm's V as the run starts; None: no direction. A resumed run takes its V from the checkpoint."""
    V = {name: rows for name, rows in study.arm.state_dict().items() if name.startswith("V/")}
    digest = hashlib.sha256()
    for name, rows in V.items():
        digest.update(name.encode() + b"\0" + rows.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest() if V else None


def evaluate_final(study: Study) -> Final:
    """All four sides on the same held-out test problems. Without a quarantine, as trained *is* deployed (unless the
    quarantine is what is deployed): not sampled twice. The base comes first, so a broken adapter cannot disturb it."""
    cfg, step = study.cfg, study.cfg.scale.steps
    problems = balanced(study.world.test, cfg.eval.final_n_prompts, 0, "test")

    def answers(side: Side, problems: list[Problem]) -> list[Answer]:
        if study.stop.requested:
            raise Interrupted("interrupted before the final evaluation was done")
        with study.clock(f"final evaluation, {side}"):
            return study.answers(problems, cfg.eval.final_samples, side, step, "final")

    base, deployed = answers("base", problems), answers("deployed", problems)
    differs = bool(study.policy.adapter.δS_hack.any()) or cfg.arm.control == "ablate_kept"
    trained = answers("trained", problems) if differs else deployed
    bare = answers("deployed", [plain(p) for p in problems])
    return Final.of(base=base, trained=trained, deployed=deployed, plain=bare)


def in_distribution(study: Study, inputs: Inputs) -> list[Mode] | None:
    """The modes that the direction's pairs were built on, by their problem ids; None without a direction."""
    if inputs.pairs is None:
        return None
    ids = {p.problem_id for p in inputs.pairs.pairs}
    return [m for m in MODES if any(r.mode == m and r.id in ids for r in inputs.rows)]


def accelerator() -> str | None:
    """The GPU's name; None on a CPU."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def peak_memory() -> str:
    host = f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB of host memory"
    if not torch.cuda.is_available():
        return host
    return f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB on the GPU, {host}"
