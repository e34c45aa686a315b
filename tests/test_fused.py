"""Fused blocks: the formulas against transformers' own modules, whole updates with and without them, the compiler."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

import tiny
from benchmarks import rig
from pretended_gpu import pretended_gpu
from vgrout.model import fused, lean_decoder, trials
from vgrout.model.fused import fuse, fused_blocks
from vgrout.model.lean_decoder import LeanDecoder
from vgrout.model.logprobs import backbone, completion_hidden, foreign
from vgrout.model.policy import Policy
from vgrout.model.trials import fuse_blocks

EPS = 1e-6
ROOT = Path(__file__).parent.parent


@pytest.fixture
def not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "compiled", lambda function: function)


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def norm_of(weight: Tensor) -> Qwen3RMSNorm:
    module = Qwen3RMSNorm(len(weight), EPS)
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    return module


def in_transformers(x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None) -> Tensor:
    y = x if weight is None else norm_of(weight)(x)
    return apply_rotary_pos_emb(y, y, cos, sin)[0]


def cases() -> Iterator[tuple[str, Any, Any, list[Tensor]]]:
    """Name, ours, transformers', and what both are functions of."""
    weight, of_head = noise(12, seed=7), noise(8, seed=8)
    # halves that differ, as those of no model do
    cos, sin = noise(5, 8, seed=9), noise(5, 8, seed=10)
    silu = torch.nn.functional.silu
    yield (
        "norm",
        lambda x: fused._Norm.apply(x, weight, EPS),
        norm_of(weight),
        [noise(1, 5, 12)],
    )
    for name, w in (("rotate", None), ("norm and rotate", of_head)):
        yield (
            name,
            lambda x, w=w: fused._Rotate.apply(x, cos, sin, w, EPS),
            lambda x, w=w: in_transformers(x, cos, sin, w),
            [noise(5, 3, 8)],
        )
    yield (
        "gated",
        fused._Gated.apply,
        lambda g, u: silu(g) * u,
        [noise(1, 5, 6), noise(1, 5, 6, seed=1)],
    )


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case[0])
def test_the_formulas_and_their_gradients_are_those_of_transformers(case, not_compiled):
    _, ours, theirs, given = case
    results: list[list[Tensor]] = []
    for function in (ours, theirs):
        inputs = [x.clone().requires_grad_() for x in given]
        y = function(*inputs)
        dy = noise(*y.shape, seed=11)
        results.append([y.detach(), *torch.autograd.grad(y, inputs, dy)])
    for got, want in zip(*results, strict=True):
        # transformers' norm is computed in fp32
        assert tiny.relative(got, want) < 1e-6


def gradient(policy: Policy) -> Tensor:
    groups = rig.noise_groups(97, 3, 2, 7, 6)
    made = rig.update(policy, groups, by_rollout=True)()
    assert made.g is not None
    return made.g


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2-bias"])
def test_an_update_is_the_same_with_fused_blocks(family, not_compiled):
    policy = tiny.policy(family)
    tiny.shake(policy.adapter, 0.05)
    want = gradient(policy)
    fuse(policy.model)
    calls: list[str] = []
    for name in ("_norm_forward", "_attention_forward", "_mlp_forward"):
        with pytest.MonkeyPatch.context() as patched:
            run = getattr(fused, name)
            patched.setattr(
                fused, name, lambda *a, run=run, name=name, **k: calls.append(name) or run(*a, **k)
            )
            got = gradient(policy)
        assert name in calls
        assert tiny.relative(got, want) < 1e-5
    assert all("forward" not in vars(module) for module in policy.model.modules())


def test_a_forward_that_ends_at_a_block_is_the_same(not_compiled):
    policy = tiny.policy()
    batch = policy.batch([(3, 4, 5), (3, 4, 5)], [(6, 7, 1), (8, 9, 10)])
    want = completion_hidden(policy.model, batch, layer=1)
    fuse(policy.model)
    assert tiny.relative(completion_hidden(policy.model, batch, layer=1), want) < 1e-5
    assert all("forward" not in vars(module) for module in policy.model.modules())


def test_norms_that_are_trained_are_not_fused():
    model = tiny.tiny()
    fuse(model)
    core = backbone(model)
    for trained in (True, False):
        model.requires_grad_(trained)
        with fused_blocks(model, core):
            assert ("forward" in vars(model.get_submodule("model.layers.1.mlp"))) != trained


def on_gpu(family: str) -> Any:
    model = tiny.tiny(family).requires_grad_(False).to("cuda")  # ty: ignore
    fuse_blocks(model, backbone(model), lean=True)
    return model


@pytest.mark.parametrize(
    ("family", "taken"), [("qwen3", True), ("llama", True), ("qwen2-bias", True), ("gemma", False)]
)
def test_a_gpu_has_fused_blocks_where_the_model_is_of_their_kind(family, taken, warnings):
    with pretended_gpu():
        assert (on_gpu(family) in fused._fused) == taken
    assert warnings == []
    model = tiny.tiny("qwen3")
    fuse_blocks(model, backbone(model), lean=True)
    assert model not in fused._fused, "on a CPU"


def missing(_: object) -> Any:
    raise RuntimeError("Failed to find C compiler.\nPlease specify one")


def wrong(function: Any) -> Any:
    """A kernel that is wrong in its last element."""

    def kernel(*given: Any) -> Any:
        out = function(*given)
        if isinstance(out, Tensor):
            out.view(-1)[-1:].add_(out.norm())
        return out

    return kernel


@pytest.mark.parametrize(
    ("compiler", "why"), [(missing, "find C compiler. Please"), (wrong, "something else")]
)
def test_without_a_compiler_that_works_transformers_blocks_stay(
    compiler, why, warnings, monkeypatch
):
    with pretended_gpu():
        monkeypatch.setattr(fused, "compiled", compiler)
        assert on_gpu("qwen3") not in fused._fused
    (line,) = warnings
    assert why in line


def test_blocks_that_are_not_what_their_name_says_stay(warnings):
    """The trial of the whole model finds what no kernel's own does."""
    with pretended_gpu():
        model = tiny.tiny("qwen3").requires_grad_(False).to("cuda")  # ty: ignore
        model.get_submodule("model.layers.0.mlp").act_fn = torch.nn.GELU()
        fuse_blocks(model, backbone(model), lean=True)
        assert model not in fused._fused
    assert "something else" in warnings[0]


@pytest.mark.parametrize("family", ["qwen3", "qwen3-padded"])
@pytest.mark.parametrize("part", ["queries", "values"])
def test_a_decoding_step_that_is_wrong_fails_its_trial(family, part, not_compiled, monkeypatch):
    """Also where logits of ids that the tokenizer lacks are so low that a norm over all of them is infinite."""
    model = tiny.policy(family).model
    assert (foreign(model) is not None) == (family == "qwen3-padded")
    fuse(model)
    assert trials._decodes(model, LeanDecoder(model, static=True))

    def wrong_heads(*given: Any) -> Tensor:
        heads = fused.rotated_heads(*given)
        heads[:, slice(0, 1) if part == "queries" else slice(-1, None)] *= -1
        return heads

    monkeypatch.setattr(lean_decoder, "rotated_heads", wrong_heads)
    assert not trials._decodes(model, LeanDecoder(model, static=True))


def test_a_model_without_the_lean_decoder_keeps_its_fused_updates(monkeypatch, warnings):
    monkeypatch.setattr(trials, "_decodes", lambda *_: pytest.fail("nobody decodes with it"))
    with pretended_gpu():
        model = tiny.tiny("qwen3").requires_grad_(False).to("cuda")  # ty: ignore
        fuse_blocks(model, backbone(model), lean=False)
        assert model in fused._fused


# In a process of its own: the compiler cannot trace the checks of annotations that tests put on every function.
COMPILED = """
import sys
from dataclasses import replace
import torch
import tiny
from benchmarks import rig
from vgrout.model import trials
from vgrout.model.lean_decoder import LeanDecoder
from vgrout.model.fused import fuse, kernels_agree
from vgrout.model.logprobs import backbone
from vgrout.model.sampler import sample
from vgrout.config.sampling import Sampling


def answers(policy, graphs):
    policy = replace(policy, graphs=graphs)
    of_prompts = sample(policy, [(3, 4, 5), (6, 7)], 5, Sampling(), 20, torch.Generator().manual_seed(0))
    return [answer.ids for of_prompt in of_prompts for answer in of_prompt]


def gradient(policy):
    groups = rig.noise_groups(97, 3, 2, 7, 6)
    return rig.update(policy, groups, by_rollout=True)().g


policy = tiny.policy(sys.argv[1])
core = backbone(policy.model)
want = gradient(policy)
assert kernels_agree(policy.model, core)
torch.compiler.set_stance("fail_on_recompile")
fuse(policy.model)
assert tiny.relative(gradient(policy), want) < 1e-5
assert trials._packs(policy.model, core, 40)
assert trials._decodes(policy.model, LeanDecoder(policy.model, static=True))
assert answers(policy, graphs=True) == answers(policy, graphs=False)
print("the same")
"""


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_compiled_kernels_are_the_formulas_for_any_length(family, tmp_path):
    """By inductor's CPU back end; none is made again for another length."""
    paths = [str(ROOT), str(ROOT / "src"), str(ROOT / "tests")]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", COMPILED, family], env=env, capture_output=True, text=True
    )
    assert done.stdout == "the same\n", done.stderr
