"""What a run's method is built from, and the state of its direction."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from vgrout.config.run import Config
from vgrout.direction.pairs import KnownCorrect, PairSet
from vgrout.ground.data import GradedAnswer, Task
from vgrout.ground.tensor_types import Spans
from vgrout.model.policy import Policy


@dataclass(frozen=True, slots=True)
class Setup:
    """What a run's method is built from.

    pairs, placebo: of the direction, and of a placebo control. problems: of training. answers_of_base: graded answers
    of the untrained model to problems, a group to each. folder: the run's; None on ranks that do not write.
    """

    cfg: Config
    policy: Policy
    pairs: PairSet | None = None
    placebo: PairSet | None = None
    known_correct: Sequence[KnownCorrect] = ()
    problems: Sequence[Task] = ()
    answers_of_base: Callable[[Sequence[Task]], list[GradedAnswer]] | None = None
    folder: Path | None = None

    @property
    def spans(self) -> Spans:
        """Adapted module → its part of a gradient, in the model's order."""
        return self.policy.adapter.spans

    @property
    def device(self) -> torch.device:
        return self.policy.adapter.δS.device


@dataclass(frozen=True, slots=True)
class Refresh:
    """State of the direction after a step."""

    age: int | None = None  # steps since v was extracted; None: there is no direction
    # ‖V_new V_oldᵀ‖²_F / k_old when v was extracted again in this step: 1 same span
    overlap: float | None = None
    modules: int = 0
    axes: int = 0

    def columns(self) -> dict[str, int | None]:
        return {"refr": self.age}
