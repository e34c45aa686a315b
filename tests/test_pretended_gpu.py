"""Whole small runs on a pretended GPU: nothing mixes devices, and the host waits a counted few times a step."""

import contextlib
from collections import Counter
from dataclasses import replace

import pytest
import torch

import tiny
from benchmarks import rig
from pretended_gpu import pretended_gpu
from runs import ARMS, IMITATIONS, PAIRS, flags, imitate, rows, run, status
from vgrout.config.settings import OptConfig, Sampling
from vgrout.ground.console import Clock
from vgrout.ground.tensor_types import Routed
from vgrout.loop.optim import Optimizer
from vgrout.model.sampling import decoder as decoders
from vgrout.model.sampling.decoder import LeanDecoder
from vgrout.model.sampling.sampler import sample

# How often the host may wait in a step, beside once a token: when it samples, and when it learns.
SAMPLING, UPDATE = 8, 30
READ = "model/sampling/sampler.py:wait"  # a token of every row
SAME = ("hack_s", "solve_s", "rew", "n")


def test_the_pretence_itself():
    """It refuses what CUDA refuses, and counts what makes the host wait."""
    host = torch.ones(2, 3)
    with pretended_gpu() as gpu:
        x = host.to("cuda")
        assert (x.device.type, (x @ x.T).device.type, gpu.waits.total()) == ("cuda", "cuda", 1)
        assert torch.tensor([1.0]).pin_memory().to(x.device, non_blocking=True).is_cuda
        assert gpu.waits.total() == 1
        for mixed in (
            lambda: x + host,
            lambda: x @ host.T,
            lambda: torch.cat([x, host]),
            lambda: host[x[0].long()],
        ):
            with pytest.raises(RuntimeError, match="two devices"):
                mixed()
        with pytest.raises(TypeError, match="numpy"):
            x.numpy()
        assert (x + 1).sum().item() == 12
        assert x[x > 0].numel() == 6
        assert x.cpu().numpy().sum() == 6
        assert x.tolist() == host.tolist()
        assert gpu.waits.total() == 5
        x[:, torch.tensor([0], device=x.device)] = 0
        assert float(x.requires_grad_().square().sum().backward() or x.grad.sum()) == 8
    assert host.device.type == "cpu"


def ids_of(answers):
    return [answer.ids for of_prompt in answers for answer in of_prompt]


def test_a_step_waits_a_few_times(monkeypatch):
    """Sampling once a token, and an update as often whatever the rows, groups and forwards are."""
    monkeypatch.setattr(decoders, "FUSE_BELOW", 0)
    counts = []
    with pretended_gpu() as gpu:
        policy = tiny.as_policy(tiny.tiny("qwen3").to("cuda"))
        assert policy.lean
        assert policy.packs
        for groups, size, tokens in ((1, 2, 64), (3, 6, 4096)):
            policy = replace(policy, budget=replace(policy.budget, tokens=tokens))
            gpu.waits.clear()
            asked = [(3, 4, 5)] * groups, size, Sampling(), 8
            answers = sample(policy, *asked, torch.Generator().manual_seed(0))
            draws = gpu.waits.pop(READ)
            assert draws == max(map(len, ids_of(answers)))
            sampling = gpu.waits.total()
            gpu.waits.clear()
            made = rig.update(
                policy, rig.noise_groups(97, size, groups, 12, 10), by_rollout=False
            )()
            Optimizer(policy.adapter, OptConfig(), 10).step(Routed(made.g.sum(0)), made.metrics)
            counts.append((sampling, gpu.waits.total()))
        gpu.waits.clear()
        plain = sample(replace(policy, graphs=False), *asked, torch.Generator().manual_seed(0))
        assert gpu.waits.total() <= sampling + max(map(len, ids_of(plain)))
        assert ids_of(plain) == ids_of(answers)
        block = LeanDecoder(policy.model).layers[0]
        assert [len(linears.parts) for linears in (block.qkv, block.up)] == [1, 1], (
            "merged weights lie side by side"
        )
    assert counts[0] == counts[1]
    assert counts[0][0] <= SAMPLING
    assert counts[0][1] <= UPDATE


def waiting(gpu, m):
    """What the host waits for in each of a run's phases, one by one."""
    usual, of = Clock.__call__, dict[str, list[Counter[str]]]()

    @contextlib.contextmanager
    def counted(clock, phase, *how, **more):
        before = gpu.waits.copy()
        with usual(clock, phase, *how, **more) as inside:
            yield inside
        of.setdefault(phase, []).append(gpu.waits - before)

    m.setattr(Clock, "__call__", counted)
    return of


# one that projects, one with a gate and a quarantine, one whose monitor reads the model's states
LONG = ("erase", "route2", "route2-online-probe")
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in (*ARMS, *PAIRS) if name not in LONG]


@pytest.mark.long
@pytest.mark.parametrize("method", [*LONG, *SLOW])
def test_a_run(method, tmp_path, shared_run, monkeypatch):
    """Through the decoder of large models, the direction extracted and evaluated on the way. Rewards are the CPU's."""
    argv = flags(
        method,
        "--dtype",
        "fp32",
        "--steps",
        "2",
        "--eval-ablate-every",
        "1",
        "--eval-n-prompts",
        "1",
    )
    with monkeypatch.context() as m, pretended_gpu() as gpu:
        m.setattr(decoders, "FUSE_BELOW", 0)
        waits = waiting(gpu, m)
        made = run(shared_run.warm(tmp_path), *argv)
    for of_gen, of_fb in zip(waits["gen"], waits["fb"], strict=True):
        draws = of_gen.pop(READ)
        assert 1 <= draws <= 128, "one a token"
        assert of_gen.total() <= SAMPLING, of_gen
        assert of_fb.total() <= UPDATE, of_fb
    for got, want in zip(rows(made), rows(shared_run(*argv)), strict=True):
        assert [got[name] for name in SAME] == [want[name] for name in SAME]
        assert got["gn"] == pytest.approx(want["gn"], rel=1e-3)


@pytest.mark.long
def test_a_run_that_is_stopped_and_resumed(tmp_path, shared_run):
    """In bf16, as on a GPU by default; the checkpoint is read there, too."""
    argv = flags("route2", "--steps", "3", "--checkpoint-every", "1")
    with pretended_gpu():
        stopped = run(shared_run.warm(tmp_path), *argv, stop_after=0)
        resumed = run(tmp_path, "smoke", "--resume", str(stopped))
    assert resumed == stopped
    assert status(stopped)["state"] == "finished"
    assert [row["step"] for row in rows(stopped)] == [0, 1, 2]


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["distill-minillm", "dpo", pytest.param("distill-uld", marks=pytest.mark.slow)]
)
def test_imitation(name, tmp_path):
    with pretended_gpu():
        made = imitate(tmp_path, *IMITATIONS[name])
    assert status(made)["state"] == "finished"
