"""What distillation and DPO train: δS on a frozen model, or all weights.

Gradients add up until `step`. Also here: what the files of such a run say of its models.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from vgrout.config.run import Config
from vgrout.config.settings import OptConfig
from vgrout.ground.io import Json, atomic_folder, write_json
from vgrout.ground.metrics import Rate
from vgrout.ground.tensor_types import Routed
from vgrout.loop.optim import Optimizer, Update, lr_at
from vgrout.model.layout import Packed
from vgrout.model.logprobs import PaddedBatch
from vgrout.model.policy import LanguageModel, Policy
from vgrout.model.rollout_grads import per_rollout_grads
from vgrout.model.svd_adapter import weights_sha256

Loss = Callable[[], Float[Tensor, ""]]


class AdapterOnly:
    """Trains δS on a frozen model; saves an adapter file like the trainer's."""

    def __init__(self, policy: LanguageModel, opt: OptConfig, steps: int) -> None:
        assert isinstance(policy, Policy)
        self.adapter = policy.adapter
        self.optim = Optimizer(policy.adapter, opt, steps)
        self.grad = torch.zeros_like(policy.adapter.δS)

    def add(self, batch: PaddedBatch | Packed, loss: Loss) -> float:
        """Run `loss`, whose forward is on `batch`, and its backward pass; returns the loss."""
        with per_rollout_grads(self.adapter, 1) as collected:
            collected.announce([(0, slice(0, batch.tokens))], batch.tokens)
            value = loss()
            value.backward()
            self.grad += collected.flat[0]
        return float(value.detach())

    def step(self, finite: bool = True) -> Update | None:
        """Step along the gradient added since the last step, and forget it.

        None if the gradient is not finite, or by `finite` its loss is not: no weight has changed
        then.
        """
        gradient = self.grad
        self.grad = torch.zeros_like(self.grad)
        update = self.optim.step(Routed(gradient, finite=finite))
        return None if update.skipped else update

    def save(self, path: Path, metadata: Mapping[str, str]) -> None:
        """Save what was learnt. path: the file's, without an ending."""
        self.adapter.save(path.with_name(path.name + ".safetensors"), metadata)

    def state_dict(self) -> dict[str, Any]:
        return {"adapter": self.adapter.state_dict(), "optim": self.optim.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.adapter.load_state_dict(state["adapter"])
        self.optim.load_state_dict(state["optim"])


class FullModel:
    """Trains every weight, in the model's dtype; saves a Hugging Face folder."""

    def __init__(self, lm: LanguageModel, opt: OptConfig, steps: int) -> None:
        self.lm = lm
        self.opt = opt
        self.steps = steps
        lm.model.requires_grad_(True)
        self.done = 0
        self.adamw = torch.optim.AdamW(
            lm.model.parameters(),
            lr=opt.lr,
            betas=(opt.adam_beta1, opt.adam_beta2),
            weight_decay=opt.weight_decay,
        )

    def add(self, batch: PaddedBatch | Packed, loss: Loss) -> float:
        """Run `loss` and its backward pass; returns the loss."""
        value = loss()
        value.backward()
        return float(value.detach())

    def step(self, finite: bool = True) -> Update | None:
        """Step along the gradient added since the last step, as `AdapterOnly.step` does."""
        lr = lr_at(self.done, self.opt, self.steps)
        self.done += 1
        norm = float(torch.nn.utils.clip_grad_norm_(self.lm.model.parameters(), self.opt.grad_clip))
        finite = finite and math.isfinite(norm)
        if finite:
            for group in self.adamw.param_groups:
                group["lr"] = lr
            self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        return Update(Routed(), stepped=True, gn=norm, lr=lr) if finite else None

    def save(self, path: Path, metadata: Mapping[str, str]) -> None:
        """Save the model's folder; one that is there is replaced once the new one is complete."""
        with atomic_folder(path, replace=True) as folder:
            self.lm.model.save_pretrained(folder)
            self.lm.tok.save_pretrained(folder)
            write_json(folder / "vgrout.json", dict(metadata))

    def state_dict(self) -> dict[str, Any]:
        return {
            "done": self.done,
            "adamw": self.adamw.state_dict(),
            "model": self.lm.model.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.done = state["done"]
        self.adamw.load_state_dict(state["adamw"])
        self.lm.model.load_state_dict(state["model"])


Trainable = AdapterOnly | FullModel


def model_hashes(**models: LanguageModel) -> dict[str, str | None]:
    """sha256 of the models' base weights and tokenizers, for run.json."""
    hashes: dict[str, str | None] = {}
    for name, lm in models.items():
        adapter = lm.adapter if isinstance(lm, Policy) else None
        hashes[f"{name}_weights"] = weights_sha256(lm.model, adapter)
        hashes[f"{name}_tokenizer"] = lm.tokenizer_sha256
    return hashes


def metadata(cfg: Config, lm: LanguageModel, step: int, **more: str) -> dict[str, str]:
    """The metadata of a saved file. step: how many steps have been done."""
    dtype = str(lm.model.dtype).removeprefix("torch.")
    about = {"model": cfg.scale.model, "dtype": dtype, "step": str(step)}
    return about | more | {"cfg": json.dumps(cfg.as_dict())}


def hack_and_solve(evaluation: Json) -> str:
    """Hack and solve rate in percent, of an evaluation as JSON."""
    hack, solve = Rate(*evaluation["hack"]), Rate(*evaluation["solve"])
    return f"hack {hack.percent} % / solve {solve.percent} %"
