"""ULD and reverse KL against TRL's own, value and gradient in fp64.

TRL has no MiniLLM trainer any more; its generalised JSD at beta 1 is the reverse KL of MiniLLM's single-step part.
Its ULD aligns by index unless it is told otherwise, and takes a token's own logits: both are given it here.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from test_imitation import logits
from vgrout.imitation.losses import reverse_kl, wasserstein

trl = pytest.importorskip("trl", reason="TRL is not installed: uv run --extra trl pytest tests/test_trl_imitation.py")
gold = pytest.importorskip("trl.experimental.gold.gold_trainer")
pytestmark = pytest.mark.filterwarnings("default")  # another project's warnings


def same_value_and_gradient(own_loss: Any, trl_loss: Any, x: Tensor) -> None:
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    own, other = own_loss(a), trl_loss(b)
    own.backward()
    other.backward()
    assert a.grad is not None
    assert b.grad is not None
    assert a.grad.abs().max() > 1e-4
    assert abs(float(own.detach()) - float(other.detach())) < 1e-12
    assert (a.grad - b.grad).abs().max() < 1e-12


def test_reverse_kl_is_trls() -> None:
    teacher = logits(5, 11, seed=1)
    same_value_and_gradient(
        lambda s: reverse_kl(s, teacher).sum(),
        lambda s: gold.GOLDTrainer.generalized_jsd_loss(s[None], teacher[None], beta=1.0, reduction="sum"),
        logits(5, 11),
    )


def test_uld_is_trls(tmp_path: Any) -> None:
    off = dict.fromkeys(("bf16", "use_extended_uld", "uld_use_hybrid_loss", "uld_skip_student_eos"), False)
    off |= {"uld_skip_teacher_eos": False, "uld_crossentropy_weight": 0.0, "uld_distillation_weight": 1.0}
    off |= {"uld_student_temperature": 1.0, "uld_teacher_temperature": 1.0, "uld_token_merge_strategy": "observed"}
    where = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": [], "use_uld_loss": True}
    config = trl.experimental.gold.GOLDConfig(**where, **off)
    loss = gold.ULDLoss(config)
    n, teacher = 6, logits(6, 19, seed=1)
    ids = torch.ones(1, n, dtype=torch.long)
    same_value_and_gradient(
        lambda s: wasserstein(s, teacher).mean(),
        lambda s: loss._compute_distillation_loss(s[None], teacher[None], ids, ids, ids, ids),
        logits(n, 11),
    )
