"""What a careful reader wants to see of the text itself: the first prompt, the first true hack of each kind, tails."""

from collections.abc import Sequence

from loguru import logger

from vgrout.grading.modes import MODE_SPECS
from vgrout.measure import students
from vgrout.model.policy import Policy
from vgrout.types import Group


class Narrator:
    """Writes to the log once per first time, and every 20 steps the tail of one answer."""

    def __init__(self, policy: Policy):
        self.policy = policy
        self.seen: set[str] = set()
        self.first = True

    def step(self, step: int, groups: Sequence[Group]) -> None:
        live = students(groups)
        if not live:
            return
        rollout, grade = live[0]
        if self.first:
            self.first = False
            text = self.policy.tok.decode([*rollout.prompt_ids, *rollout.completion_ids], skip_special_tokens=False)
            logger.debug(f"first prompt with its first completion, special tokens visible:\n{text}")
        for r, g in live:
            if g.mechanism and g.mechanism not in self.seen:
                self.seen.add(g.mechanism)
                spec = MODE_SPECS[g.mechanism]
                logger.debug(
                    f"first {g.mechanism} hack, step {step}, problem {r.problem.id} (marker {r.problem.marker!r}). "
                    f"SHOULD: {spec.should}; ELSE the grader is wrong:\n{r.text}"
                )
        if step < 3 or step % 20 == 0:
            n = len(live)
            ended = sum(r.finished for r, _ in live)
            formed = sum(g.format_ok for _, g in live)
            tail = rollout.text[-160:].replace("\n", "⏎")
            logger.info(
                f"step {step}: {ended}/{n} answers ended, {n - ended}/{n} cut, {formed}/{n} well-formed; "
                f"one ends: …{tail} [{grade.exit_status}]"
            )
