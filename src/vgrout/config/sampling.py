"""How answers are sampled. Torch-free; the distribution that it makes of logits is in `vgrout.model.sampling`."""

from dataclasses import dataclass

from vgrout.config.checks import changed, check, refuse_unread, setting
from vgrout.errors import refuse


@dataclass(frozen=True)
class Sampling:
    """How answers are sampled. Applied in this order, as transformers does: temperature, top-k, top-p."""

    temperature: float = setting(0.7, low=0, high=1e3)
    """Divides the logits, wherever answers are sampled; 0: greedy."""
    top_p: float = setting(1.0, low=1e-6, high=1)
    """Sample from the smallest set of most likely tokens whose probability reaches this; 1: all."""
    top_k: int = setting(20, low=0, high=10_000_000)
    """Sample from the k most likely tokens; 0: all."""

    def __post_init__(self) -> None:
        check(self)
        unread = [name for name, _ in changed(self) if name != "temperature"]
        if not self.temperature:
            refuse_unread(unread, "at --temperature 0; leave it out")

    def require_draws(self, flag: str, n: int) -> None:
        """Raises Refused, one line, where the n > 1 answers to a prompt that `flag` asks for would all be the same
        one."""
        greedy = (
            f"--temperature {self.temperature:g}"
            if not self.temperature
            else f"--top-k {self.top_k}"
        )
        refuse(
            n > 1 and (not self.temperature or self.top_k == 1),
            f"{greedy} with {flag} {n}: all answers to a prompt would be the same; choose larger values",
        )
