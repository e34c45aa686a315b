"""The deployed model as a PEFT LoRA adapter beside its base model.

W' = W + U diag(δ) Vh is LoRA with B = U √|δ| sign δ and A = √|δ| Vh. It is exact at full rank,
where a module has as many ranks as singular values. At rank k the k largest |δ_i| of a module are
kept, which is the best approximation of that rank (Eckart and Young), and the missing share,
√(Σ dropped δ² / Σ δ²), is reported.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from jaxtyping import Float
from safetensors.torch import save_file
from torch import Tensor

from vgrout.export import Differs
from vgrout.export.model import Parity, about, card, load_beside, parity
from vgrout.ground.io import cannot_import
from vgrout.model.load.saved import Saved
from vgrout.model.policy import Policy
from vgrout.model.svd_adapter import AdaptedLinear


@dataclass(frozen=True)
class Lora:
    """The written adapter, compared with the deployed model."""

    rank: int  # the largest of a module
    missing: float  # √(Σ dropped δ² / Σ δ²), all modules
    parity: Parity

    def __str__(self) -> str:
        missing = f"{100 * self.missing:.3g} % of the adapter's norm left out"
        said = f"rank {self.rank}, {missing}; {self.parity}"
        if not self.parity.holds:  # at full rank that is an error
            said += "; beyond the tolerance, because ranks were left out"
        return said


def factors(
    site: AdaptedLinear, δ: Float[Tensor, " r"], k: int | None
) -> tuple[Float[Tensor, "k d_in"], Float[Tensor, "d_out k"]]:
    """Return A and B of a module, of its k largest |δ_i|; k None: of all.

    B A = U diag(δ) Vh.
    """
    order = δ.abs().argsort(descending=True)[:k]
    root = δ[order].abs().sqrt()
    A = root[:, None] * site.Vh[order].to(δ)
    B = site.U[:, order].to(δ) * (δ[order].sign() * root)
    return A.contiguous().cpu(), B.contiguous().cpu()


def package() -> ModuleType:
    """The package peft. Raises Refused, one line, where it is missing or cannot be imported."""
    try:
        import peft
    except ImportError as error:
        raise cannot_import("peft", error) from None
    return peft


@torch.no_grad()
def export(
    saved: Saved, policy: Policy, folder: Path, rank: int | None, texts: Sequence[str]
) -> Lora:
    """Fill `folder`, which exists and is empty, and compare it with the deployed model on `texts`.

    PEFT loads it on the base model as it lies on disk.

    rank: of every module, at most; None: as many as it has singular values.

    Raises:
        Differs: at full rank, PEFT's model is not the deployed one.
    """
    peft = package()
    adapter = policy.adapter
    base = load_beside(policy, saved.model, policy.model.dtype)
    there = dict(base.named_modules())
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    dropped = total = 0.0
    for name, δ in adapter.by_module(adapter.δS.detach()).items():
        A, B = factors(adapter.sites[name], δ, rank)
        if (
            name not in there
        ):  # a base that sees images too has its model of text below another name
            name = name.replace("model.", "model.language_model.", 1)
        tensors[f"base_model.model.{name}.lora_A.weight"] = A
        tensors[f"base_model.model.{name}.lora_B.weight"] = B
        ranks[name] = len(A)
        squares = δ.double().square().sort(descending=True).values
        total += float(squares.sum())
        dropped += float(squares[len(A) :].sum())
    most = max(ranks.values())
    lower = {name: r for name, r in ranks.items() if r != most}
    config = peft.LoraConfig(
        r=most,
        lora_alpha=most,
        target_modules=sorted(ranks),
        rank_pattern=lower,
        alpha_pattern=dict(lower),  # B A is scaled by alpha / r
        task_type="CAUSAL_LM",
        base_model_name_or_path=saved.base,
        inference_mode=True,
    )
    config.target_modules = sorted(ranks)  # PEFT makes a set of it, with an order of its own
    config.save_pretrained(str(folder))
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    loaded = peft.PeftModel.from_pretrained(base, str(folder)).eval()
    missing = (dropped / total) ** 0.5 if total else 0.0
    result = Lora(most, missing, parity(policy, loaded, texts, exact=False))
    if rank is None and not result.parity.holds:
        raise Differs(f"the adapter as PEFT loads it is not the deployed model: {result.parity}")
    (folder / "README.md").write_text(adapter_card(saved, result), encoding="utf-8")
    return result


def adapter_card(saved: Saved, result: Lora) -> str:
    """Return the folder's README.md."""
    use = ["from peft import PeftModel", "from transformers import AutoModelForCausalLM"]
    use.append(f'base = AutoModelForCausalLM.from_pretrained({saved.base!r}, dtype="auto")')
    use.append('model = PeftModel.from_pretrained(base, "THIS FOLDER")')
    said = f"{about(saved)}, without its quarantine.\n\nAgainst the deployed model: {result}."
    return card(saved, "peft", said, use)
