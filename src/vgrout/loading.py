"""From a run's checked files to what its loop calls: the policy, the problems, the demonstrations."""

from dataclasses import replace
from functools import partial

import torch
from loguru import logger
from tqdm import tqdm

from vgrout import ranks
from vgrout.config.run import Config
from vgrout.grading.grade import Grader, cores
from vgrout.inputs import Inputs
from vgrout.model import policy as models
from vgrout.model.policy import SVD_CACHE, LanguageModel, Policy, load_language_model, pick_device
from vgrout.model.source import is_small
from vgrout.problems import ProblemSplits, elicited, load_splits, plain, without_hints
from vgrout.teacher.demonstrations import Teacher
from vgrout.teacher.pools import regraded


def device_and_dtype(cfg: Config) -> tuple[torch.device, torch.dtype]:
    """Where the run's model is, and in which dtype."""
    # Matrices of 128 × 256 lose by a second thread, by far on a machine that is shared: grading has the other cores.
    # torch goes by OMP_NUM_THREADS, which is 1 for each run of a sweep; a launcher of ranks sets it for other reasons.
    of_rank = cores() // ranks.here() if ranks.here() > 1 else torch.get_num_threads()
    usual = 1 if is_small(cfg.model_path) else max(1, of_rank)
    return pick_device(cfg.model_path, cfg.run.dtype, cfg.run.threads or usual)


def load_policy(cfg: Config) -> Policy:
    """The run's model, frozen, under an adapter whose two vectors are zero.

    Raises:
        ValueError: a model that this trainer cannot use, or whose window is no longer than --max-new; one line.
    """
    device, dtype = device_and_dtype(cfg)
    policy = models.load_policy(cfg.model_path, device=device, dtype=dtype, cache_dir=SVD_CACHE)
    if policy.window <= cfg.scale.max_new:
        raise ValueError(
            f"--max-new {cfg.scale.max_new}: the model's window holds {policy.window} tokens, prompt included"
        )
    if cfg.loss.drops and cfg.loss.ratio_support == "full":
        s = cfg.sampling
        logger.info(
            f"sampled at temperature {s.temperature:g}, top-k {s.top_k}, top-p {s.top_p:g}; {cfg.loss.loss} compares "
            "full softmaxes at temperature 1 (--ratio-support sampled: what was sampled from)"
        )
    return replace(policy, preserve_thinking=cfg.env.preserve_thinking)


def load_teacher_model(cfg: Config, policy: Policy) -> LanguageModel | None:
    """The model of --teacher-model, for its log-probs alone: no weight of it is decomposed. None without one.

    Raises:
        ValueError: its tokenizer is another one than the policy's.
    """
    if not cfg.loss.teacher_model:
        return None
    device, dtype = policy.device, policy.model.dtype
    teacher = load_language_model(cfg.teacher_model_path, device=device, dtype=dtype, flag="--teacher-model")
    if teacher.tokenizer_sha256 != policy.tokenizer_sha256:
        raise ValueError(
            f"--teacher-model {cfg.loss.teacher_model}: has another tokenizer than --model {cfg.scale.model}"
        )
    return teacher


def load_problems(cfg: Config, inputs: Inputs, policy: Policy) -> ProblemSplits:
    """The run's problems in disjoint train / val / test splits, without those whose prompt does not fit the window.

    Raises:
        ValueError: none is left.
    """
    pool, room = inputs.pool, policy.window - cfg.scale.max_new
    splits = load_splits(
        inputs.rows,
        env_mode=cfg.env.env_mode,
        n_problems=cfg.scale.n_problems,
        seed=cfg.run.seed,
        partition=pool.partition if pool else None,
        markers=pool.announced if pool else None,
        test_rows=inputs.test_rows,
        published=cfg.env.marker_names == "published",
        only_ids=pool.ids if pool else None,  # mixed in or not: a control trains on the problems of its method
        only_modes=cfg.env.demo_held_out,
        prompt_len=lambda p: len(policy.render(p.messages)),
        max_prompt=room,
    )
    for name, needed in (("val", cfg.eval.eval_ablate_every > 0), ("test", True)):
        if needed and not getattr(splits, name):
            raise ValueError(
                f"--max-new {cfg.scale.max_new}: no prompt of the {name} split fits the model's window "
                f"({policy.window} tokens, prompt included)"
            )
    if cfg.plain_prompts:  # shorter than with a hint: they fit too
        train, val, test = (
            tuple(without_hints(part, cfg.env.unannounced)) for part in (splits.train, splits.val, splits.test)
        )
        splits = replace(splits, train=train, val=val, test=test)
    if splits.too_long:
        logger.warning(
            f"{splits.too_long} problems dropped: prompt longer than the window ({policy.window}) minus max_new"
        )
    if cfg.method.control_spec.prompts == "without the hint":  # training alone; evaluations keep the hint
        logger.info("no training prompt says how answers are checked")
        splits = replace(splits, train=tuple(map(plain, splits.train)))
    if sentence := cfg.inoculation:  # of the training prompts alone
        invited = [elicited(p, sentence) for p in splits.train]
        logger.info(f"every training prompt ends with {sentence!r}")
        splits = replace(splits, train=tuple(p for p in invited if len(policy.render(p.messages)) <= room))
    return splits


def load_teacher(cfg: Config, inputs: Inputs, policy: Policy, problems: ProblemSplits, grader: Grader) -> Teacher:
    """The pool's demonstrations for the training problems, graded again first under --regrade-pool.

    Raises:
        ValueError: a pool that demonstrates nothing here, or whose tokens cannot be used.
    """
    pool = inputs.pool
    if pool is not None and cfg.env.regrade_pool:
        again = regraded(pool, {p.id: p for p in problems.train}, grader, partial(tqdm, desc="regrading", disable=None))
        pool = again.pool
        for line in again.lines():
            logger.info(line)
    return Teacher(
        pool if cfg.mixes else None,
        policy,
        problems.train,
        per_group=cfg.n_teacher,
        seed=cfg.run.seed,
        off_step=cfg.env.teacher_off_step,
        modes=cfg.env.demo_modes,
        max_new=cfg.scale.max_new,
    )
