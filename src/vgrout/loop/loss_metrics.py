"""What is measured of a step's losses: over micro-batches and ranks."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vgrout.ground import ranks
from vgrout.ground.data import UpdateRow
from vgrout.loop.losses import LossInput, LossOutput
from vgrout.model.attention import uploaded
from vgrout.model.layout import Packed
from vgrout.model.logprobs import PaddedBatch

RAW_MAX = 600.0  # log-ratios are written down as they are up to e^600: a mean of them is still finite in fp64


@dataclass
class _Spread:
    """Count, sum and ends of some numbers: what is reported of them, and what ranks exchange."""

    n: int = 0
    sum: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    @classmethod
    def of(cls, values: Tensor) -> "_Spread":
        if not len(values):
            return cls()
        return cls(
            len(values),
            sum=float(values.sum()),
            low=float(values.min()),
            high=float(values.max()),
        )

    def __add__(self, other: "_Spread") -> "_Spread":
        # min and max of a NaN depend on the order of their arguments: the sum has it
        return _Spread(
            self.n + other.n,
            self.sum + other.sum,
            min(self.low, other.low),
            max(self.high, other.high),
        )

    @property
    def mean(self) -> float | None:
        return self.sum / self.n if self.n else None


class Tally:
    """Collects per-token numbers over micro-batches; one transfer from the device at the end."""

    def __init__(self) -> None:
        self.parts: list[dict[str, Tensor]] = []
        self.losses: list[Tensor] = []

    @torch.no_grad()
    def add(
        self,
        rows: Sequence[UpdateRow],
        batch: PaddedBatch | Packed,
        x: LossInput,
        output: LossOutput,
    ) -> None:
        """Add a micro-batch: numbers [B, T] a token, of which those of completion tokens are kept."""
        device = x.mask.device
        shape = x.mask.shape
        is_teacher: list[bool] = []
        is_sampled: list[bool] = []  # its sampler's log-probs are known
        for row in rows:
            of_teacher = row.rollout.source == "teacher"
            is_teacher.append(of_teacher)
            is_sampled.append(row.rollout.logp is not None and not of_teacher)
        teacher = uploaded(is_teacher, device)
        sampled = uploaded(is_sampled, device)
        columns = {
            "logp": x.logp,
            "log_ratio": x.logp - x.logp_sampler,
            "low": output.low,
            "high": output.high,
            # those of a rollout, [B], are the same at all its tokens
            "teacher": teacher[:, None].expand(shape),
            "sampled": sampled[:, None].expand(shape),
            "A": x.advantages[:, None].expand(shape),
        }
        if output.kl is not None:
            columns["kl"] = output.kl
        self.losses.append(output.per_rollout.sum())
        of_tokens: dict[str, Tensor] = {}
        for name, column in columns.items():
            of_tokens[name] = column[batch.wanted].double()
        self.parts.append(of_tokens)

    def metrics(self) -> dict[str, float | None]:
        """The step's columns of its losses (`StepRow`), over all ranks' tokens. None: there was no such token."""
        spreads: defaultdict[str, _Spread] = defaultdict(_Spread)
        # of ranks that hold one model together, all have measured the same
        for of_rank in ranks.gather(self._spreads)[:: ranks.shards()]:
            for name, spread in of_rank.items():
                spreads[name] += spread
        loss = spreads.pop("loss", _Spread())
        ratio = spreads.pop("ratio", _Spread())
        return {
            **{name: spread.mean for name, spread in spreads.items()},
            "loss": loss.sum if loss.n else None,
            "ratio_min": ratio.low if ratio.n else None,
            "ratio_mean": ratio.mean,
            "ratio_max": ratio.high if ratio.n else None,
        }

    def _spreads(self) -> dict[str, _Spread]:
        """What was measured of this rank's tokens."""
        if not self.parts:
            return {}
        names = list(self.parts[0])
        columns: list[Tensor] = []
        for name in names:
            of_parts = [part[name] for part in self.parts]
            columns.append(torch.cat(of_parts))
        on_cpu = torch.stack(columns).cpu()
        column = dict(zip(names, on_cpu, strict=True))
        teacher = column["teacher"] > 0
        sampled = column["sampled"] > 0
        logp = column["logp"]
        low = column["low"]
        high = column["high"]
        A = column["A"]
        masked = (low + high) > 0
        log_ratio = column["log_ratio"].clamp(-RAW_MAX, RAW_MAX)
        ratio = log_ratio.exp()
        mismatch = ratio - log_ratio - 1
        values = {
            "loss": torch.stack(self.losses).cpu(),
            "ratio": ratio[sampled],
            "lp_s": logp[~teacher],
            "lp_t": logp[teacher],
            "mismatch_kl": mismatch[sampled],
            "masked_mismatch_kl": mismatch[sampled & masked],
            "unmasked_mismatch_kl": mismatch[sampled & ~masked],
            "is_masked": masked.double(),
            "is_masked_low": low,
            "is_masked_high": high,
            "masked_positive": masked[A > 0].double(),
            "masked_negative": masked[A < 0].double(),
        }
        if "kl" in column:
            values["kl"] = column["kl"]
        return {name: _Spread.of(numbers) for name, numbers in values.items()}
