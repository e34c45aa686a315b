import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from methods import relative
from tiny import FAMILIES, tiny
from vgrout.model.svd_adapter import SvdAdapter, canonical, read_safetensors, round_by, svd, weight_key

IDS = torch.tensor([[3, 14, 15, 92, 65, 35], [8, 9, 7, 93, 23, 84], [6, 26, 43, 38, 32, 79]])


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def adapted(family: str = "qwen3", scale: float = 0.0, dtype: torch.dtype = torch.float32) -> SvdAdapter:
    adapter = SvdAdapter(tiny(family, dtype=dtype), cache_dir=None)
    shake(adapter, scale)
    return adapter


def shake(adapter: SvdAdapter, scale: float, seed: int = 1) -> None:
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for vector in (adapter.δS, adapter.δS_hack):
            vector.copy_(scale * torch.randn(len(adapter), generator=noise))
    adapter.merge()


def row_losses(model: nn.Module, ids: Tensor) -> Tensor:
    """Any differentiable loss per row will do: NLL of the next tokens, weighted so that rows differ."""
    logp = model(ids, use_cache=False).logits[:, :-1].log_softmax(-1)
    nll = -logp.gather(-1, ids[:, 1:, None]).squeeze(-1)
    return nll.sum(1) * torch.arange(1.0, len(ids) + 1).to(nll)


def checkpointed(forward: Callable[..., Tensor], reentrant: bool) -> Callable[..., Tensor]:
    return lambda h, **kw: checkpoint(lambda h: forward(h, **kw), h, use_reentrant=reentrant)


def explicit_gradient(adapter: SvdAdapter, ids: Tensor) -> dict[str, Tensor]:
    """∂L/∂δS by autograd through an explicit W + U diag(δ) Vh."""
    δ = (adapter.δS + adapter.δS_hack).detach().clone().requires_grad_()
    weights = {f"{name}.weight": site.W + (site.U * δ[site.span]) @ site.Vh for name, site in adapter.sites.items()}

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = adapter.model

        def forward(self, ids: Tensor) -> Tensor:
            return row_losses(self.net, ids)

    loss = functional_call(Rows(), {f"net.{k}": w for k, w in weights.items()}, (ids,)).sum()
    (g,) = torch.autograd.grad(loss, δ)
    return adapter.by_module(g)


# ── per-rollout gradients ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("scale", [0.0, 0.05])
def test_row_is_the_backward_of_that_rollout_alone(family: str, scale: float) -> None:
    adapter = adapted(family, scale)
    with adapter.per_rollout_grads(len(IDS)) as probe:
        row_losses(adapter.model, IDS).sum().backward()
    for b in range(len(IDS)):
        with adapter.per_rollout_grads(len(IDS)) as alone:
            (row_losses(adapter.model, IDS) * torch.eye(len(IDS))[b]).sum().backward()
        assert alone.flat.abs().sum(1).nonzero().flatten().tolist() == [b], "only its own row"
        for name, g in probe.grads.items():
            # fp32 sums of the same terms in another order
            assert relative(g[b], alone.grads[name][b]) <= 1e-5, (name, b)


@pytest.mark.parametrize("scale", [0.0, 0.05])
@pytest.mark.parametrize("rows", [[0, 1, 2], [0, 0, 0], [1, 0, 1]])
def test_rows_sum_to_the_gradient_of_an_explicit_model(family: str, scale: float, rows: list[int]) -> None:
    adapter = adapted(family, scale, dtype=torch.float64)
    want = explicit_gradient(adapter, IDS)
    with adapter.per_rollout_grads(3) as probe:
        probe.rows(rows)
        row_losses(adapter.model, IDS).sum().backward()
    assert sorted(set(rows)) == probe.flat.abs().sum(1).nonzero().flatten().tolist()
    for name, g in probe.grads.items():
        assert relative(g.sum(0), want[name]) <= 1e-10, name


def test_both_orders_of_the_product_agree() -> None:
    """Few tokens a row go tokens-first, many go weight-gradient-first; the numbers must not care."""
    adapter = adapted("llama", 0.05)
    site = adapter.sites["model.layers.0.mlp.up_proj"]
    x, dy = torch.randn(3, 50, 64), torch.randn(3, 50, 96)
    rows = torch.tensor([0, 1, 0])
    assert max(site.W.shape) < 3 * 50, "or the two calls below take the same branch"
    with adapter.per_rollout_grads(2) as tokens_first, adapter.per_rollout_grads(2) as weight_first:
        for b in range(3):
            tokens_first.add(site, rows[b : b + 1], [(int(rows[b]), slice(0, 1))], x[b : b + 1], dy[b : b + 1])
        weight_first.add(site, torch.zeros(3, dtype=torch.long), [(0, slice(0, 3))], x, dy)
    assert relative(tokens_first.flat.sum(0), weight_first.flat.sum(0)) <= 1e-5


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_rows(reentrant: bool) -> None:
    adapter = adapted("qwen3", 0.05)
    with adapter.per_rollout_grads(3) as plain:
        row_losses(adapter.model, IDS).sum().backward()
    for name, layer in adapter.model.named_modules():
        if name.removeprefix("model.layers.").isdigit():
            layer.forward = checkpointed(layer.forward, reentrant)
    # reentrant checkpoints need an input with a gradient: the embedding's output, as transformers does it
    embedding = adapter.model.get_submodule("model.embed_tokens")
    embedding.register_forward_hook(lambda _m, _a, y: y.requires_grad_(reentrant))
    with adapter.per_rollout_grads(3) as saved:
        row_losses(adapter.model, IDS).sum().backward()
    assert torch.equal(saved.flat, plain.flat)


def test_probe_refuses_flattened_rows_and_other_weights() -> None:
    adapter = adapted("qwen3", 0.05)
    linear = adapter.sites[adapter.names[0]].linear
    with adapter.per_rollout_grads(3), pytest.raises(AssertionError, match="q_proj"):
        linear(torch.randn(3 * 6, 64))
    with adapter.per_rollout_grads(3):
        loss = row_losses(adapter.model, IDS).sum()
        with adapter.deployed(), pytest.raises(AssertionError, match="backward under"):
            loss.backward()
    assert not linear._forward_hooks, "hooks are removed"


# ── weights ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_adapter_of_zeros_is_the_base_model_bit_for_bit(family: str) -> None:
    base = tiny(family)(IDS).logits
    adapter = adapted(family)
    assert torch.equal(adapter.model(IDS).logits, base)
    shake(adapter, 0.1)
    assert not torch.allclose(adapter.model(IDS).logits, base, atol=1e-2), "the adapter moves the model"
    with adapter.reference():
        assert torch.equal(adapter.model(IDS).logits, base)
    with adapter.per_rollout_grads(3):
        assert not torch.equal(adapter.model(IDS).logits, base)
    shake(adapter, 0.0)
    assert torch.equal(adapter.model(IDS).logits, base)


def test_merged_weights_are_what_a_hook_would_compute(family: str) -> None:
    adapter = adapted(family, 0.1)
    merged = adapter.model(IDS).logits
    with adapter.deployed():
        kept = adapter.model(IDS).logits
    for δ, want in ((adapter.δS + adapter.δS_hack, merged), (adapter.δS, kept)):
        handles = [
            site.linear.register_forward_hook(
                lambda _m, args, y, s=site, δ=δ: y + ((args[0] @ s.Vh.mT) * δ[s.span]) @ s.U.mT
            )
            for site in adapter.sites.values()
        ]
        with adapter.reference(), torch.no_grad():
            hooked = adapter.model(IDS).logits
        for handle in handles:
            handle.remove()
        assert relative(want, hooked) <= 1e-5  # fp32, two orders of one sum


def test_contexts_nest_and_restore_on_exceptions() -> None:
    adapter = adapted("qwen3", 0.1)
    logits: dict[str, Tensor] = {"full": adapter.model(IDS).logits}
    with adapter.deployed():
        logits["deployed"] = adapter.model(IDS).logits
        with adapter.reference():
            logits["reference"] = adapter.model(IDS).logits
        assert torch.equal(adapter.model(IDS).logits, logits["deployed"])
    with adapter.quarantine_only():
        logits["quarantine"] = adapter.model(IDS).logits
    assert len({float(x.sum()) for x in logits.values()}) == 4, "four different models"
    with pytest.raises(KeyError), adapter.reference(), adapter.deployed():
        raise KeyError
    assert torch.equal(adapter.model(IDS).logits, logits["full"])


def test_merge_inside_a_context_keeps_it() -> None:
    adapter = adapted("qwen3", 0.1)
    with adapter.deployed():
        shake(adapter, 0.2, seed=2)
        inside = adapter.model(IDS).logits
    assert not torch.equal(adapter.model(IDS).logits, inside)
    with torch.no_grad():
        adapter.δS_hack.zero_()
    adapter.merge()
    assert torch.equal(adapter.model(IDS).logits, inside), "without a quarantine trained and deployed are one"


def test_no_target_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to adapt"):
        SvdAdapter(nn.Sequential(nn.Linear(3, 3)), None)


# ── decomposition and cache ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("shape", [(40, 24), (24, 40)])
def test_svd_rebuilds_the_weight_with_fixed_signs(shape: tuple[int, int]) -> None:
    W = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    U, S, Vh = svd(W)
    assert relative(U @ S.diag() @ Vh, W) <= 1e-5
    assert (U.gather(0, U.abs().argmax(0, keepdim=True)) > 0).all()
    assert relative(svd(-W)[0] @ svd(-W)[1].diag() @ svd(-W)[2], -W) <= 1e-5


def test_key_depends_on_every_bit_dtype_and_shape() -> None:
    W = torch.randn(4, 6)
    bit = W.clone()
    bit.view(torch.int32)[3, 5] ^= 1
    keys = [weight_key(w) for w in (W, bit, W.bfloat16(), W.reshape(6, 4))]
    assert len(set(keys)) == 4
    assert weight_key(W.mT.contiguous().mT) == weight_key(W), "the same numbers in another memory order"


def test_cache_hit_is_identical_and_damage_is_repaired(tmp_path: Path, warnings: list[str]) -> None:
    cold = SvdAdapter(tiny(), tmp_path)
    files = sorted(tmp_path.iterdir())
    assert len(files) == len(cold.names) == 14
    warm = SvdAdapter(tiny(), tmp_path)
    for name in cold.names:
        for part in ("U", "S", "Vh"):
            assert torch.equal(getattr(warm.sites[name], part), getattr(cold.sites[name], part))
    assert warnings == []
    files[0].write_bytes(files[0].read_bytes()[:-7])
    wrong = load_file(files[1])
    wrong["S"][0] += 1
    save_file(wrong, files[1])
    healed = SvdAdapter(tiny(), tmp_path)
    assert len(warnings) == 2
    assert all("computed again" in line for line in warnings)
    assert all(torch.equal(healed.sites[n].U, cold.sites[n].U) for n in cold.names)
    SvdAdapter(tiny(), tmp_path)
    assert len(warnings) == 2, "the damaged files were replaced"


def test_unwritable_cache_says_so_once(tmp_path: Path, warnings: list[str]) -> None:
    (tmp_path / "file").touch()
    adapter = SvdAdapter(tiny(), tmp_path / "file" / "cache")
    assert len(warnings) == 1
    assert "works without it" in warnings[0]
    assert torch.equal(adapter.sites[adapter.names[0]].U, SvdAdapter(tiny(), None).sites[adapter.names[0]].U)


# ── files ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_saved_adapter_is_the_deployed_model(tmp_path: Path) -> None:
    adapter = adapted("qwen3", 0.1)
    adapter.save(tmp_path / "a.safetensors", {"step": "7"})
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]
    fresh = adapted("qwen3", 0.3)
    assert fresh.load(tmp_path / "a.safetensors").keys() == {"step", "basis"}
    with adapter.deployed():
        assert torch.equal(fresh.model(IDS).logits, adapter.model(IDS).logits)


def test_load_refuses_what_is_not_its_own(tmp_path: Path) -> None:
    adapter = adapted("qwen3", 0.1)
    before = adapter.state_dict()
    good = {name: view.detach().clone() for name, view in adapter.by_module(adapter.δS).items()}
    first = adapter.names[0]
    bad = {
        "modules differ": {k: v for k, v in good.items() if k != first},
        "has shape": good | {first: torch.zeros(3)},
        "NaN": good | {first: torch.full_like(good[first], torch.nan)},
    }
    for message, tensors in bad.items():
        save_file(tensors, tmp_path / "bad.safetensors")
        with pytest.raises(ValueError, match=message):
            adapter.load(tmp_path / "bad.safetensors")
    (tmp_path / "junk").write_text("junk")
    for name in ("junk", "absent"):
        with pytest.raises(ValueError, match="not a readable safetensors file"):
            adapter.load(tmp_path / name)
    assert all(torch.equal(before[key], value) for key, value in adapter.state_dict().items())


def turned(W: Tensor, *, pair: tuple[int, int] = (3, 4), angle: float = 0.0, noise: float = 0.0, sign: int = 1):
    """An SVD of W whose axes `pair` are turned into each other, as where two singular values are one."""
    U, S, Vh = (x.clone() for x in svd(W))
    c, s, (i, j) = math.cos(angle), math.sin(angle), pair
    turn = torch.tensor([[c, s], [-s, c]], dtype=U.dtype)
    U[:, [i, j]], Vh[[i, j]] = U[:, [i, j]] @ turn.T, turn @ Vh[[i, j]]
    rand = torch.Generator().manual_seed(len(S))
    U += noise * torch.randn(U.shape, generator=rand).to(U)
    return sign * U, S, sign * Vh


@pytest.mark.parametrize("how", [{"sign": -1}, {"noise": 1e-6}, {"angle": 1e-3}], ids=str)
def test_an_adapter_loads_in_the_same_basis(how: dict[str, float], tmp_path: Path) -> None:
    """Signs, rounding and small turns of near-equal axes are what another machine may do to the same decomposition."""
    own = adapted("qwen3", 0.1)
    other = SvdAdapter(tiny("qwen3"), cache_dir=None, decompose=partial(turned, **how))
    own.save(tmp_path / "a.safetensors", {})
    other.load(tmp_path / "a.safetensors")
    other.load_state_dict(own.state_dict())
    assert torch.allclose(other.model(IDS).logits, own.model(IDS).logits, atol=1e-3)


@pytest.mark.parametrize("how", [{"angle": math.pi / 2}, {"angle": 0.5}], ids=str)
def test_an_adapter_from_another_basis_is_refused(how: dict[str, float], tmp_path: Path) -> None:
    """Two axes of one machine's SVD turned: the same numbers would be another model, and nothing else would tell."""
    own = adapted("qwen3", 0.1)
    other = SvdAdapter(tiny("qwen3"), cache_dir=None, decompose=partial(turned, **how))
    before = other.state_dict()
    own.save(tmp_path / "a.safetensors", {})
    with pytest.raises(ValueError, match=r"a\.safetensors: made in other singular vectors .* bring out/svd_cache"):
        other.load(tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="saved state's delta_S: made in other singular vectors"):
        other.load_state_dict(own.state_dict())
    assert all(torch.equal(before[key], value) for key, value in other.state_dict().items())


def test_an_adapter_whose_basis_cannot_be_read_is_refused(tmp_path: Path) -> None:
    own = adapted("qwen3", 0.1)
    own.save(tmp_path / "a.safetensors", {"step": "7"})
    tensors, _ = read_safetensors(tmp_path / "a.safetensors")
    save_file(tensors, tmp_path / "old.safetensors", {"step": "7"})
    with pytest.raises(ValueError, match=r"old\.safetensors: says nothing of its singular vectors"):
        own.load(tmp_path / "old.safetensors")
    for broken in ("[[1, 2]]", "{", "[1, [2]]"):
        save_file(tensors, tmp_path / "old.safetensors", {"basis": broken})
        with pytest.raises(ValueError, match="its basis fingerprint"):
            own.load(tmp_path / "old.safetensors")


def test_bf16_and_fp32_share_a_basis(tmp_path: Path) -> None:
    """An adapter trained in bf16 is read on a CPU in fp32: the vectors differ by their rounding alone."""
    half = adapted("qwen3", 0.1, dtype=torch.bfloat16)
    half.save(tmp_path / "a.safetensors", {})
    model = tiny("qwen3", dtype=torch.bfloat16).float()
    full = SvdAdapter(model, cache_dir=None)
    full.load(tmp_path / "a.safetensors")
    assert torch.equal(full.δS, half.δS)


# ── rounding to bf16 ───────────────────────────────────────────────────────────────────────────────────────────────


NUMBERS = (1.0, -1.0, 0.3, -0.02, 1.9999, 2.0 - 2.0**-9, 1e-30, -3e38, 1.2e-38, 5e-40, 0.0)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_rounded_number_is_a_neighbour_and_their_mean_is_the_number(number: float) -> None:
    """Over every value that the dither can have: exactly."""
    x = torch.full((2**16,), number)
    got = round_by(torch.arange(2**16, dtype=torch.int32), x.clone(), torch.empty(2**16, dtype=torch.bfloat16))
    assert got.double().mean() == x[0].double()
    below, above = got.min(), got.max()
    assert below <= x[0] <= above
    if below != above:
        assert torch.nextafter(below, above) == above
    itself = x.bfloat16()
    assert torch.equal(round_by(torch.arange(2**16, dtype=torch.int32), itself.float(), got), itself)


def test_a_weight_moves_only_where_its_sum_has_moved() -> None:
    """One dither a weight: what is rounded never falls while the number rises, so nothing flickers between merges."""
    noise = torch.Generator().manual_seed(0)
    dither = torch.randint(2**16, (64,), generator=noise, dtype=torch.int32)
    path = (torch.linspace(0.1, 0.11, 200)[:, None] * torch.ones(64)).contiguous()
    rounded = torch.stack([round_by(dither, x.clone(), torch.empty(64, dtype=torch.bfloat16)) for x in path])
    assert (rounded.float().diff(dim=0) >= 0).all()
    assert len(rounded[100].unique()) == 2, "and not all weights jump at once"


def merged_nearest(adapter: SvdAdapter) -> None:
    adapter._dither = None
    adapter.merge()


def test_a_small_change_is_in_bf16_weights() -> None:
    """A step of Adam at a learning rate of 1e-4, a hundredth of the weights' spacing: all of it, where rounding to the
    nearest leaves next to nothing."""
    adapter = adapted("qwen3", dtype=torch.bfloat16)
    assert adapter.realised_share() is None
    with torch.no_grad():
        adapter.δS.copy_(1e-4 * torch.randn(len(adapter), generator=torch.Generator().manual_seed(2)).sign())
    assert adapter.realised_share() == 0, "it is not merged yet"
    adapter.merge()
    assert adapter.realised_share() == pytest.approx(1, abs=0.15)
    merged_nearest(adapter)
    share = adapter.realised_share()
    assert share is not None
    assert share < 0.3


@pytest.mark.parametrize("size", [7e-5, 3e-3])
def test_all_of_a_change_is_in_fp32_weights(size: float) -> None:
    assert adapted("llama", size).realised_share() == pytest.approx(1, abs=1e-3)


def weights(adapter: SvdAdapter) -> list[Tensor]:
    return [site.linear.weight.data.clone() for site in adapter.sites.values()]


def test_bf16_weights_depend_on_the_vectors_alone() -> None:
    """Not on the merges before: sampler, trainer, ranks and a resumed run have the same ones."""
    adapter = adapted("qwen3", 1e-3, dtype=torch.bfloat16)
    merged, state = weights(adapter), adapter.state_dict()
    with adapter.reference():
        assert all(site.linear.weight.data_ptr() == site.W.data_ptr() for site in adapter.sites.values())
    with adapter.deployed():
        deployed = weights(adapter)
    shake(adapter, 2e-3, seed=3)
    shake(adapter, 1e-3)
    assert all(map(torch.equal, weights(adapter), merged))
    resumed = adapted("qwen3", dtype=torch.bfloat16)
    resumed.load_state_dict(state)
    assert all(map(torch.equal, weights(resumed), merged))
    with torch.no_grad():
        resumed.δS_hack.zero_()
    resumed.merge()
    assert all(map(torch.equal, weights(resumed), deployed))


def test_a_share_of_the_quarantine_is_in_bf16_weights() -> None:
    """Of ε ΔW, which is far below the spacing of two bf16 numbers."""
    adapter = adapted("qwen3", 3e-3, dtype=torch.bfloat16)
    with adapter.deployed():
        off = weights(adapter)
    with adapter.quarantine_at(0.1):
        on = weights(adapter)
    ΔW = [site.change(adapter.δS_hack.detach()) for site in adapter.sites.values()]
    got = sum(float(((b.float() - a.float()) * c).sum()) for a, b, c in zip(off, on, ΔW, strict=True))
    assert got / sum(float(c.square().sum()) for c in ΔW) == pytest.approx(0.1, rel=0.2)


def test_one_state_is_one_file(tmp_path: Path) -> None:
    """Whatever order the library or the caller gives the metadata; and it is still a file that the library reads."""
    tensors = {"b": torch.arange(5.0), "a": torch.ones(2, 3)}
    metadata = {f"key {i}": "ü" * i for i in range(12)}
    files = {canonical(to_safetensors(tensors, dict(order))) for order in (metadata.items(), [*metadata.items()][::-1])}
    assert len(files) == 1
    (tmp_path / "x.safetensors").write_bytes(files.pop())
    read, meta = read_safetensors(tmp_path / "x.safetensors")
    assert meta == metadata
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
