"""Fitting problems, model hashes and file metadata for distillation and DPO."""

import json

from loguru import logger

from vgrout.config.run import Config
from vgrout.imitation.common import Task
from vgrout.model.policy import LanguageModel, Policy
from vgrout.model.svd_adapter import weights_sha256
from vgrout.problems import ProblemSplits
from vgrout.rng import py_stream


def fitting_splits(task: Task, *models: LanguageModel) -> ProblemSplits:
    """The problems whose prompt and longest answer fit the window of all these models; of the training problems the
    first `--n-problems` in the run's order.

    Raises:
        ValueError: one line: a split has no such problem.
    """

    def fits(messages: tuple[dict[str, str], ...]) -> bool:
        return all(len(lm.render(messages)) <= lm.window - task.max_new for lm in models)

    parts = {name: tuple(p for p in problems if fits(p.messages)) for name, problems in task.parts.items()}
    if empty := [name for name, problems in parts.items() if not problems]:
        raise ValueError(f"--max-new {task.max_new}: no prompt of the {empty[0]} split fits the window")
    if too_long := sum(map(len, task.parts.values())) - sum(map(len, parts.values())):
        logger.warning(f"{too_long} problems dropped: prompt longer than a window minus max_new")
    train = list(parts["train"])
    py_stream(task.cfg.seed, "train-order").shuffle(train)
    return ProblemSplits(tuple(train[: task.cfg.n_problems]), parts["val"], parts["test"], too_long)


def model_hashes(**models: LanguageModel) -> dict[str, str | None]:
    """sha256 of the models' base weights and tokenizers, for run.json."""
    out: dict[str, str | None] = {}
    for name, lm in models.items():
        out[f"{name}_weights"] = weights_sha256(lm.model, lm.adapter if isinstance(lm, Policy) else None)
        out[f"{name}_tokenizer"] = lm.tokenizer_sha256
    return out


def metadata(described: Config, lm: LanguageModel, step: int, **more: str) -> dict[str, str]:
    """The metadata of a saved file. step: how many have been done."""
    dtype = str(lm.model.dtype).removeprefix("torch.")
    about = {"model": described.scale.model, "dtype": dtype, "step": str(step)}
    return about | more | {"cfg": json.dumps(described.as_dict())}
