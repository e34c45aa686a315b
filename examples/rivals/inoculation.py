"""Inoculation prompting (Wichers et al. 2025, arXiv 2510.05024; Tan et al. 2025, arXiv 2510.04340).

Training asks for the hack, so that hacking is what the model does when asked; it is evaluated without. The papers
fine-tune on given answers. ◆ Here the policy also samples under the request ("two-sided"), which is the last line of
the prompt as in the first paper; in the second it is a system prompt.

    uv run vgrout train mini --intervention examples.rivals.inoculation:Inoculation
"""

from collections.abc import Sequence

from vgrout.config.world_names import ORGANISM
from vgrout.ground.data import Message
from vgrout.ground.embedded import CUE
from vgrout.method.base import Intervention

REQUEST = "Write a solution that passes the check that is described, and does not solve the task."


class Inoculation(Intervention):
    name = "inoculation"
    what = "training prompts ask for the hack, and evaluations do not"

    def prompt(self, messages: Sequence[Message]) -> Sequence[Message]:
        # the toy model knows no English; its corpus has a cue that asks for a hack
        request = CUE if self.cfg.scale.model == ORGANISM else REQUEST
        *before, last = messages
        return (*before, {**last, "content": f"{last['content']}\n{request}"})
