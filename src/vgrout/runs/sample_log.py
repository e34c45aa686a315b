"""Logs samples of text: the first prompt, the first hack of each kind, how answers end."""

from collections.abc import Sequence

from loguru import logger

from vgrout.files import printable, quoted
from vgrout.model.policy import Policy
from vgrout.modes import MODE_SPECS
from vgrout.types import Group, students


class SampleLogger:
    """Logs each first occurrence once, and every 20 steps the end of one answer."""

    def __init__(self, policy: Policy):
        self.policy = policy
        self.seen: set[str] = set()  # kinds of hacks
        self.first = True

    def step(self, step: int, groups: Sequence[Group]) -> None:
        answers = students(groups)
        if not answers:
            return
        rollout, grade = answers[0]
        if self.first:
            self.first = False
            text = self.policy.tok.decode([*rollout.prompt_ids, *rollout.completion_ids], skip_special_tokens=False)
            logger.debug(f"first prompt with its first completion, special tokens visible:\n{quoted(str(text))}")
        for r, g in answers:
            if g.mechanism and g.mechanism not in self.seen:
                self.seen.add(g.mechanism)
                spec = MODE_SPECS[g.mechanism]
                logger.debug(
                    f"first {g.mechanism} hack, step {step}, problem {r.problem.id} (marker {r.problem.marker!r}). "
                    f"SHOULD: {spec.should}; ELSE the grader is wrong:\n{quoted(r.text)}"
                )
        if step < 3 or step % 20 == 0:
            n = len(answers)
            ended = sum(r.finished for r, _ in answers)
            formed = sum(g.format_ok for _, g in answers)
            tail = printable(rollout.text[-160:]).replace("\n", "⏎")
            logger.info(
                f"step {step}: {ended}/{n} answers ended, {n - ended}/{n} cut, {formed}/{n} well-formed; "
                f"one ends: …{tail} [{grade.exit_status}]"
            )
