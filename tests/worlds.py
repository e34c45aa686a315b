"""The code world's splits, without a run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vgrout.config.run import Config
from vgrout.config.settings import EnvConfig, ScaleConfig
from vgrout.envs.base import split_tasks
from vgrout.envs.code.environment import CodeEnvironment
from vgrout.envs.code.modes import Mode


@dataclass
class Pool:
    """What an environment reads of a pool."""

    partition: Mapping[int, Mode]
    announced: Any


def load_splits(
    rows,
    *,
    env_mode,
    n_problems,
    seed,
    partition=None,
    markers=None,
    test_rows=(),
    published=False,
    only_ids=None,
    only_modes=(),
    prompt_len,
    max_prompt,
):
    """The rows in splits, under these settings."""
    env = EnvConfig(env_mode=env_mode, marker_names="published" if published else "varied")
    file = rows[0].where.rpartition(", line ")[0]
    cfg = Config(env=env, scale=ScaleConfig(problems=file))
    return split_tasks(
        CodeEnvironment(cfg, rows, test_rows),
        Pool(partition or {}, markers),
        n_train=n_problems,
        seed=seed,
        prompt_tokens=prompt_len,
        max_prompt=max_prompt,
        only_ids=None if only_ids is None else {*only_ids},
        only_flaws={*only_modes},
    )
