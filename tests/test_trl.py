"""Losses against TRL's own, where both define the same one. `uv run --extra trl pytest tests/test_trl.py`.

TRL's trainer computes its loss from the log-probs it is given here: value and gradient in fp64, rollouts of four
lengths, ratios on both sides of every bound. dppo_tv has no counterpart there.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrize import register_parametrization

import tiny
from methods import make as make_method
from methods import problem
from test_losses import LENGTHS, NORM, G, T, make
from tiny import relative
from vgrout.config.settings import LossConfig, OptConfig
from vgrout.ground.data import Batch, CachedGrade, Group, Rollout
from vgrout.loop.grpo import policy_gradients
from vgrout.loop.losses import policy_loss
from vgrout.loop.optim import Optimizer

trl = pytest.importorskip(
    "trl", reason="TRL is not installed: uv run --extra trl pytest tests/test_trl.py"
)
datasets = pytest.importorskip("datasets")
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("default")]  # another project's warnings

# our settings, TRL's. The KL is k3 in both, TRL's without the factor π/π_old that it has by
# default.
SAME = {
    "grpo": ({"unbiased": False}, {"loss_type": "grpo"}),
    "dr_grpo": ({}, {"loss_type": "dr_grpo"}),
}


def trainer(folder, prompts=("a",) * 8, model=None, **settings):
    """TRL's trainer on a tiny model; its reward is the sum of an answer's tokens, modulo 5."""
    usual = {"use_cpu": True, "bf16": False, "report_to": [], "max_completion_length": NORM.max_new}
    return trl.GRPOTrainer(
        model=model or tiny.tiny().eval(),
        reward_funcs=lambda completion_ids, **_: [float(sum(ids) % 5) for ids in completion_ids],
        args=trl.GRPOConfig(output_dir=str(folder), **usual | settings),
        train_dataset=datasets.Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=tiny.tokenizer(),
    )


def trl_loss(peer, x, **more):
    """TRL's loss of these log-probs, and its gradient on them."""
    logp = x.logp.clone().requires_grad_()
    peer._get_per_token_logps_and_entropies = lambda *_, **__: (logp, torch.zeros_like(logp), None)
    total = peer.compute_loss(
        peer.model,
        {
            "prompt_ids": torch.ones(G, 1, dtype=torch.long),
            "prompt_mask": torch.ones(G, 1, dtype=torch.long),
            "completion_ids": torch.ones(G, T, dtype=torch.long),
            "completion_mask": x.mask.long(),
            "advantages": x.advantages,
            "old_per_token_logps": x.logp,
            "ref_per_token_logps": x.logp_ref,
            "num_items_in_batch": x.mask.sum(),
            **more,
        },
    )
    total.backward()
    return float(total.detach()), logp.grad


def own_loss(x, **cfg):
    logp = x.logp.clone().requires_grad_()
    total = policy_loss(replace(x, logp=logp), LossConfig(**cfg)).per_rollout.sum()
    total.backward()
    assert logp.grad is not None
    return float(total.detach()), logp.grad


def cases():
    norm = replace(NORM, rollouts=G, tokens=sum(LENGTHS))  # one batch is the whole step
    return [make(seed, spread=1.5, norm=norm) for seed in range(6)]


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("name", SAME)
def test_value_and_gradient_are_trls(name, beta, tmp_path, record_property):
    own, other = SAME[name]
    peer = trainer(tmp_path, use_bias_correction_kl=False, **other)  # plain k3
    # at construction it would load a reference model; the log-probs are given here
    peer.beta = beta
    worst = 0.0
    for x in cases():
        (a, g), (b, h) = own_loss(x, beta=beta, **own), trl_loss(peer, x)
        assert g.abs().max() > 1e-3
        worst = max(worst, abs(a - b), float((g - h).abs().max()))
    record_property("largest difference", worst)
    print(f"{name}, beta {beta}: largest difference {worst:.1e} (trl {trl.__version__})")
    assert worst < 1e-12  # the same fp64 sums in another order


class Turned(nn.Module):
    """W + U diag(δ) Vh."""

    def __init__(self, site):
        super().__init__()
        self.U, self.Vh = site.U.detach().clone(), site.Vh.detach().clone()
        self.δ = nn.Parameter(torch.zeros(len(self.Vh)))

    def forward(self, W):
        return W + (self.U * self.δ) @ self.Vh


def test_a_step_is_trls(tmp_path):
    """TRL samples a batch and trains on it once; the trainer's update gets the same batch."""
    lr, n, most = 0.02, 4, 12
    policy, peers = tiny.policy(), tiny.tiny().requires_grad_(False)
    turned = {name: Turned(site) for name, site in policy.adapter.sites.items()}
    for name, part in turned.items():
        register_parametrization(peers.get_submodule(name), "weight", part)
    peer = trainer(
        tmp_path,
        ("a", "bc"),
        peers,
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
        gradient_checkpointing=False,
        max_completion_length=most,
        per_device_train_batch_size=2 * n,
        num_generations=n,
        num_iterations=1,
        max_steps=1,
        temperature=1.0,
        top_k=0,
        beta=0.0,
        scale_rewards="none",
        learning_rate=lr,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        max_grad_norm=1e9,
        loss_type="dr_grpo",
    )
    batches = []
    generate = peer._generate_and_score_completions

    def kept(inputs):
        batches.append(generate(inputs))
        return batches[-1]

    peer._generate_and_score_completions = kept
    peer.train()
    (b,) = batches
    rollouts = [
        Rollout(
            ids,
            "",
            True,
            prompt_ids=tuple(b["prompt_ids"][i][b["prompt_mask"][i] > 0].tolist()),
        )
        for i in range(2 * n)
        for ids in [tuple(b["completion_ids"][i][b["completion_mask"][i] > 0].tolist())]
    ]
    grades = [
        CachedGrade(float(sum(r.ids) % 5), False, False, False, True, "trl") for r in rollouts
    ]
    groups = [
        Group(
            problem(i),
            tuple(rollouts[n * i : n * i + n]),
            tuple(grades[n * i : n * i + n]),
            index=i,
        )
        for i in range(2)
    ]
    assert [A for g in groups for A in g.advantages] == pytest.approx(b["advantages"].tolist())
    method = make_method(policy, "none")
    policy.adapter.load_state_dict(
        {name: torch.zeros_like(v) for name, v in policy.adapter.state_dict().items()}
    )
    # lr in step 0
    opt = OptConfig(lr=1000 * lr, adam_beta1=0.9, adam_beta2=0.999, weight_decay=0.0, grad_clip=1e9)
    batch = Batch(tuple(groups), (), (), 2 * n, 0)
    batch = method.flag(batch)
    g, _ = policy_gradients(policy, batch, method.cfg)
    Optimizer(policy.adapter, opt, 1000).step(method.route(batch, g))
    far = relative(
        policy.adapter.δS.detach(), torch.cat([part.δ.detach() for part in turned.values()])
    )
    print(f"δS {far:.1e} apart (trl {trl.__version__})")
    assert far < 1e-4  # fp32
