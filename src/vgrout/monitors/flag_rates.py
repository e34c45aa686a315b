"""How well a monitor flagged, after the fact: for the step's row alone, nothing of it reaches an arm."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vgrout.tensor_types import GroupFlags
from vgrout.types import CachedGrade, Grade, Group, Rate


@dataclass(frozen=True, slots=True)
class FlagRates:
    """What was flagged of exploits, of correct rollouts, of demonstrations; None: no monitor that reads text."""

    recall: Rate | None = None
    false_flags: Rate | None = None
    flag_t: Rate | None = None

    @classmethod
    def of(cls, groups: Sequence[Group], flags: Sequence[GroupFlags]) -> "FlagRates":
        """flags: one a group, or none at all."""
        if not flags:
            return cls()
        pairs = [x for group, f in zip(groups, flags, strict=True) for x in zip(group.grades, f.flagged, strict=True)]
        own = [(g, flagged) for g, flagged in pairs if isinstance(g, Grade)]
        return cls(
            recall=Rate.of(flagged for g, flagged in own if g.exploited),
            false_flags=Rate.of(flagged for g, flagged in own if g.gt_correct),
            flag_t=Rate.of(flagged for g, flagged in pairs if isinstance(g, CachedGrade)),
        )

    def columns(self) -> dict[str, Any]:
        return {"recall": self.recall, "false_flags": self.false_flags, "flag_t": self.flag_t}
