"""The code world's splits, without a run."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vgrout.config.run import Config
from vgrout.config.settings import EnvConfig, ScaleConfig
from vgrout.envs.base import Splits, split_tasks
from vgrout.envs.code.environment import CodeEnvironment
from vgrout.envs.code.modes import Mode
from vgrout.envs.code.problems import ProblemRow


@dataclass
class Pool:
    """What an environment reads of a pool."""

    partition: Mapping[int, Mode]
    announced: Any


def load_splits(
    rows: Sequence[ProblemRow],
    *,
    env_mode: Any,
    n_problems: int,
    seed: int,
    partition: Mapping[int, Mode] | None = None,
    markers: Mapping[int, str] | None = None,
    test_rows: Sequence[ProblemRow] = (),
    published: bool = False,
    only_ids: Iterable[int] | None = None,
    only_modes: Iterable[Mode] = (),
    prompt_len: Callable[[Any], int],
    max_prompt: int,
) -> Splits:
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
