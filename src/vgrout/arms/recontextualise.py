"""recontextualise (arXiv 2512.19027): sampled from the prompt without the hint, learnt under the one with it.

A policy that is not told how it is checked has no reason to exploit; what it writes then is taught to the prompt that
tells it.
"""

from collections.abc import Sequence
from dataclasses import replace

from vgrout.arms.base import Arm, module_sizes
from vgrout.config.run import Config
from vgrout.grading.grade import Grader
from vgrout.inputs import Inputs
from vgrout.model.policy import Policy
from vgrout.modes import PLAIN_PHRASE, hint
from vgrout.types import Batch, Group, Problem


class Recontextualise(Arm):
    """Plain GRPO on rollouts whose prompt was exchanged. The sampler's log-probs are dropped with the old prompt, so
    that every ratio is 1: what the exchange does to them is meant."""

    policy: Policy

    @classmethod
    def make(
        cls, cfg: Config, policy: Policy, inputs: Inputs, grader: Grader | None, problems: Sequence[Problem]
    ) -> "Recontextualise":
        made = cls(module_sizes(policy), policy.adapter.δS.device, cfg.arm.control_name)
        made.policy = policy
        return made

    def shape_rewards(self, batch: Batch) -> Batch:
        return replace(batch, groups=tuple(map(self._hinted, batch.groups)))

    def _hinted(self, group: Group) -> Group:
        problem, last = group.problem, group.problem.messages[-1]
        said = last["content"].replace(PLAIN_PHRASE, hint(problem.mode, problem.marker))
        ids = self.policy.render((*problem.messages[:-1], {**last, "content": said}))
        rollouts = tuple(replace(r, prompt_ids=ids, logp_full=None, logp_sampled=None) for r in group.rollouts)
        return replace(group, rollouts=rollouts)
