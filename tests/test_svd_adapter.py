import math
import re
from functools import partial

import pytest
import torch
from safetensors.torch import save as to_safetensors
from safetensors.torch import save_file
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from tiny import relative, shake, tiny
from vgrout.model.rollout_grads import per_rollout_grads
from vgrout.model.svd_adapter import SvdAdapter, round_by
from vgrout.model.svd_files import canonical, read_safetensors, svd, weight_key

IDS = torch.tensor([[3, 14, 15, 92, 65, 35], [8, 9, 7, 93, 23, 84], [6, 26, 43, 38, 32, 79]])


@pytest.fixture(params=["qwen3-tied", "qwen2-bias", "gemma2"])
def family(request):
    return request.param


def adapted(family="qwen3", scale=0.0, dtype=torch.float32):
    adapter = SvdAdapter(tiny(family, dtype=dtype), cache_dir=None)
    shake(adapter, scale)
    return adapter


def row_losses(model, ids):
    """Any differentiable loss per row will do: NLL of the next tokens, weighted so that rows differ."""
    logp = model(ids, use_cache=False).logits[:, :-1].log_softmax(-1)
    nll = -logp.gather(-1, ids[:, 1:, None]).squeeze(-1)
    return nll.sum(1) * torch.arange(1.0, len(ids) + 1).to(nll)


def explicit_gradients(adapter, ids):
    """∂L/∂δS of each row by autograd through an explicit W + U diag(δ) Vh."""
    δ = (adapter.δS + adapter.δS_hack).detach().clone().requires_grad_()
    weights = {
        f"{name}.weight": site.W + (site.U * δ[site.span]) @ site.Vh
        for name, site in adapter.sites.items()
    }
    losses = row_losses(
        lambda ids, **how: functional_call(adapter.model, weights, (ids,), how), ids
    )
    return torch.stack([torch.autograd.grad(loss, δ, retain_graph=True)[0] for loss in losses])


# ── per-rollout gradients


def pieces(rows):
    return [(row, slice(6 * b, 6 * b + 6)) for b, row in enumerate(rows)]


def probed(adapter, rows=(0, 1, 2)):
    """Gradients [3, R] of the rows' losses. rows: which batch row adds to which gradient row."""
    with per_rollout_grads(adapter, 3) as probe:
        probe.announce(pieces(rows), IDS.numel())
        row_losses(adapter.model, IDS).sum().backward()
    return probe.flat


@pytest.mark.parametrize("scale", [0.0, 0.05])
def test_each_row_is_the_gradient_of_an_explicit_model_on_what_adds_to_it(family, scale):
    adapter = adapted(family, scale, dtype=torch.float64)
    alone = explicit_gradients(adapter, IDS)
    for rows in ([0, 1, 2], [0, 0, 0], [1, 0, 1]):
        got = adapter.by_module(probed(adapter, rows))
        want = adapter.by_module(torch.zeros_like(alone).index_add(0, torch.tensor(rows), alone))
        for name in adapter.names:
            assert all(
                relative(g, w) <= 1e-10 for g, w in zip(got[name], want[name], strict=True)
            ), (name, rows)


def test_both_orders_of_the_product_agree():
    """Few tokens a row go tokens-first, many go weight-gradient-first; the numbers must not care."""
    adapter = adapted("llama", 0.05)
    site, x, dy = (
        adapter.sites["model.layers.0.mlp.up_proj"],
        torch.randn(3, 50, 64),
        torch.randn(3, 50, 96),
    )
    assert max(site.W.shape) < 3 * 50, "or the two calls below take the same branch"

    def gradient(again):
        with per_rollout_grads(adapter, 1) as probe:
            probe.announce([(0, slice(0, 150))], 150, again=again)
            (site.linear(x) * dy).sum().backward()
        return probe.flat

    tokens_first, weight_first = gradient(again=True), gradient(again=False)
    assert weight_first.any()
    assert relative(tokens_first, weight_first) <= 1e-5


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_rows(reentrant):
    adapter = adapted("qwen3", 0.05)
    plain = probed(adapter)
    for name, layer in adapter.model.named_modules():
        if name.removeprefix("model.layers.").isdigit():
            layer.forward = lambda h, f=layer.forward, **kw: checkpoint(
                partial(f, **kw), h, use_reentrant=reentrant
            )
    # reentrant checkpoints need an input with a gradient: the embedding's output, as transformers
    # does it
    embedding = adapter.model.get_submodule("model.embed_tokens")
    embedding.register_forward_hook(lambda _m, _a, y: y.requires_grad_(reentrant))
    assert torch.equal(probed(adapter), plain)


def test_other_tokens_other_weights_and_models_without_a_target_are_refused():
    adapter = adapted("qwen3", 0.05)
    linear = adapter.sites[adapter.names[0]].linear
    with per_rollout_grads(adapter, 3) as probe:
        probe.announce(pieces(range(3)), IDS.numel())
        with pytest.raises(AssertionError, match="q_proj"):
            linear(torch.randn(3 * 6 - 1, 64))
        loss = row_losses(adapter.model, IDS).sum()
        with adapter.deployed(), pytest.raises(AssertionError, match="backward under"):
            loss.backward()
    assert not linear._forward_hooks, "hooks are removed"
    with pytest.raises(ValueError, match="has no Linear named"):
        SvdAdapter(nn.Sequential(nn.Linear(3, 3)), None)


# ── weights


def test_an_adapter_of_zeros_is_the_base_model_bit_for_bit(family):
    base = tiny(family)(IDS).logits
    adapter = adapted(family)
    assert torch.equal(adapter.model(IDS).logits, base)
    shake(adapter, 0.1)
    assert not torch.allclose(adapter.model(IDS).logits, base, atol=1e-2), (
        "the adapter moves the model"
    )
    with adapter.reference():
        assert torch.equal(adapter.model(IDS).logits, base)
    with per_rollout_grads(adapter, 3) as probe:
        probe.announce(pieces(range(3)), IDS.numel())
        assert not torch.equal(adapter.model(IDS).logits, base)
    shake(adapter, 0.0)
    assert torch.equal(adapter.model(IDS).logits, base)


def test_merged_weights_are_what_a_hook_would_compute(family):
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


def test_views_nest_and_survive_a_merge_and_an_exception():
    adapter = adapted("qwen3", 0.1)

    def logits():
        return adapter.model(IDS).logits

    full = logits()
    with adapter.deployed():
        kept = logits()
        with adapter.reference():
            assert not torch.equal(logits(), kept)
        assert torch.equal(logits(), kept)
    with pytest.raises(KeyError), adapter.reference(), adapter.deployed():
        raise KeyError
    assert torch.equal(logits(), full)
    assert not torch.equal(full, kept)
    with adapter.deployed():
        shake(adapter, 0.2, seed=2)
        kept = logits()
    assert not torch.equal(logits(), kept)
    with torch.no_grad():
        adapter.δS_hack.zero_()
    adapter.merge()
    assert torch.equal(logits(), kept), "without a quarantine trained and deployed are one"


# ── decomposition and cache


@pytest.mark.parametrize("shape", [(40, 24), (24, 40)])
def test_svd_rebuilds_the_weight_with_fixed_signs(shape):
    W = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    U, S, Vh = svd(W)
    assert relative(U @ S.diag() @ Vh, W) <= 1e-5
    assert (U.gather(0, U.abs().argmax(0, keepdim=True)) > 0).all()


def test_key_depends_on_every_bit_dtype_and_shape():
    W = torch.randn(4, 6)
    bit = W.clone()
    bit.view(torch.int32)[3, 5] ^= 1
    keys = [weight_key(w) for w in (W, bit, W.bfloat16(), W.reshape(6, 4))]
    assert len(set(keys)) == 4
    assert weight_key(W.mT.contiguous().mT) == weight_key(W), (
        "the same numbers in another memory order"
    )


def test_cache_hit_is_identical_and_damage_is_repaired(tmp_path, warnings):
    cold = SvdAdapter(tiny(), tmp_path)
    files = sorted(tmp_path.iterdir())
    assert len(files) == len(cold.names) == 14
    warm = SvdAdapter(tiny(), tmp_path)
    for name in cold.names:
        for part in ("U", "S", "Vh"):
            assert torch.equal(getattr(warm.sites[name], part), getattr(cold.sites[name], part))
    assert warnings == []
    files[0].write_bytes(files[0].read_bytes()[:-7])
    healed = SvdAdapter(tiny(), tmp_path)
    (warning,) = warnings
    assert "computed again" in warning
    assert all(torch.equal(healed.sites[n].U, cold.sites[n].U) for n in cold.names)
    SvdAdapter(tiny(), tmp_path)
    assert len(warnings) == 1, "the damaged file was replaced"


def test_unwritable_cache_says_so_once(tmp_path, warnings):
    (tmp_path / "file").touch()
    adapter = SvdAdapter(tiny(), tmp_path / "file" / "cache")
    (line,) = warnings
    assert "works without it" in line
    assert torch.equal(
        adapter.sites[adapter.names[0]].U, SvdAdapter(tiny(), None).sites[adapter.names[0]].U
    )


# ── files


def test_saved_adapter_is_the_deployed_model(tmp_path):
    adapter, file = adapted("qwen3", 0.1), tmp_path / "a.safetensors"
    adapter.save(file, {"step": "7"})
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]
    fresh = adapted("qwen3", 0.3)
    assert fresh.load(file).keys() == {"step", "basis"}
    with adapter.deployed():
        assert torch.equal(fresh.model(IDS).logits, adapter.model(IDS).logits)
    # one that was trained in bf16 is read on a CPU in fp32: the vectors differ by their rounding
    # alone
    half = adapted("qwen3", 0.1, dtype=torch.bfloat16)
    half.save(file, {})
    full = SvdAdapter(tiny("qwen3", dtype=torch.bfloat16).float(), cache_dir=None)
    full.load(file)
    assert torch.equal(full.δS, half.δS)


def test_load_refuses_what_is_not_its_own(tmp_path):
    adapter, path = adapted("qwen3", 0.1), tmp_path / "a.safetensors"
    before = adapter.state_dict()
    adapter.save(path, {"step": "7"})
    good, metadata = read_safetensors(path)
    first = adapter.names[0]
    nothing = re.sub(r"-?\d[^,\]]*", "NaN", metadata["basis"])
    for why, tensors, basis in (
        ("modules differ", {k: v for k, v in good.items() if k != first}, metadata),
        ("another model", good | {first: torch.zeros(3)}, metadata),
        ("made in other", good | {first: torch.full_like(good[first], torch.nan)}, metadata),
        ("its basis fingerprint cannot be read", good, {"step": "7"}),
        *(
            ("its basis fingerprint", good, {"basis": broken})
            for broken in ("{", "[1, [2]]", f"[[{10**400}]]")
        ),
        ("other singular vectors", good, {"basis": "[[1, 2]]"}),
        ("other singular vectors", good, {"basis": nothing}),
    ):
        save_file(tensors, path, basis)
        with pytest.raises(ValueError, match=why):
            adapter.load(path)
    (tmp_path / "junk").write_text("junk")
    for name in ("junk", "absent"):
        with pytest.raises(ValueError, match="not a readable safetensors file"):
            adapter.load(tmp_path / name)
    assert all(torch.equal(before[key], value) for key, value in adapter.state_dict().items())


def turned(W, *, pair=(3, 4), angle=0.0, noise=0.0, sign=1):
    """An SVD of W whose axes `pair` are turned into each other, as where two singular values are one."""
    U, S, Vh = (x.clone() for x in svd(W))
    c, s, (i, j) = math.cos(angle), math.sin(angle), pair
    turn = torch.tensor([[c, s], [-s, c]], dtype=U.dtype)
    U[:, [i, j]], Vh[[i, j]] = U[:, [i, j]] @ turn.T, turn @ Vh[[i, j]]
    rand = torch.Generator().manual_seed(len(S))
    U += noise * torch.randn(U.shape, generator=rand).to(U)
    return sign * U, S, sign * Vh


@pytest.mark.parametrize(
    "how",
    [{"sign": -1}, {"noise": 1e-6}, {"angle": 1e-3}, {"angle": 0.5}, {"angle": math.pi / 2}],
    ids=str,
)
def test_an_adapter_loads_in_its_own_basis_alone(how, tmp_path):
    """Signs, rounding and small turns of near-equal axes are what another machine may do to the same decomposition.
    With two axes turned, the same numbers would be another model, and nothing else would tell."""
    own = adapted("qwen3", 0.1)
    other = SvdAdapter(tiny("qwen3"), cache_dir=None, decompose=partial(turned, **how))
    before = other.state_dict()
    own.save(tmp_path / "a.safetensors", {})
    if how.get("angle", 0) < 0.1:
        other.load(tmp_path / "a.safetensors")
        other.load_state_dict(own.state_dict())
        assert torch.allclose(other.model(IDS).logits, own.model(IDS).logits, atol=1e-3)
        return
    with pytest.raises(
        ValueError, match=r"a\.safetensors: made in other singular vectors .* bring out/svd_cache"
    ):
        other.load(tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="saved state's delta_S: made in other singular vectors"):
        other.load_state_dict(own.state_dict())
    assert all(torch.equal(before[key], value) for key, value in other.state_dict().items())


# ── rounding to bf16


NUMBERS = (1.0, -1.0, 0.3, -0.02, 1.9999, 2.0 - 2.0**-9, 1e-30, -3e38, 1.2e-38, 5e-40, 0.0)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_rounded_number_is_a_neighbour_and_their_mean_is_the_number(number):
    """Over every value that the dither can have: exactly."""
    x = torch.full((2**16,), number)
    got = round_by(
        torch.arange(2**16, dtype=torch.int32), x.clone(), torch.empty(2**16, dtype=torch.bfloat16)
    )
    assert got.double().mean() == x[0].double()
    below, above = got.min(), got.max()
    assert below <= x[0] <= above
    if below != above:
        assert torch.nextafter(below, above) == above
    itself = x.bfloat16()
    assert torch.equal(
        round_by(torch.arange(2**16, dtype=torch.int32), itself.float(), got), itself
    )


def test_a_weight_moves_only_where_its_sum_has_moved():
    """One dither a weight: what is rounded never falls while the number rises, so nothing flickers between merges."""
    noise = torch.Generator().manual_seed(0)
    dither = torch.randint(2**16, (64,), generator=noise, dtype=torch.int32)
    path = (torch.linspace(0.1, 0.11, 200)[:, None] * torch.ones(64)).contiguous()
    rounded = torch.stack(
        [round_by(dither, x.clone(), torch.empty(64, dtype=torch.bfloat16)) for x in path]
    )
    assert (rounded.float().diff(dim=0) >= 0).all()
    assert len(rounded[100].unique()) == 2, "and not all weights jump at once"


def test_a_small_change_is_in_the_weights():
    """A step of Adam at a learning rate of 1e-4, a hundredth of bf16 weights' spacing: all of it, where rounding to the
    nearest leaves next to nothing."""
    assert [adapted("llama", size).realised_share() for size in (7e-5, 3e-3)] == pytest.approx(
        [1, 1], abs=1e-3
    )
    adapter = adapted("qwen3", dtype=torch.bfloat16)
    assert adapter.realised_share() is None
    with torch.no_grad():
        adapter.δS.copy_(
            1e-4 * torch.randn(len(adapter), generator=torch.Generator().manual_seed(2)).sign()
        )
    assert adapter.realised_share() == 0, "it is not merged yet"
    adapter.merge()
    assert adapter.realised_share() == pytest.approx(1, abs=0.15)
    adapter._dither = None
    adapter.merge()
    assert (adapter.realised_share() or 0) < 0.3


@pytest.mark.parametrize("block", [0, 1])
def test_weights_that_are_equal_are_held_once(block):
    """With the quarantine in one block the model as trained and as deployed shares all others, and a block in which no
    vector has moved is the base's own."""
    adapter = adapted("qwen3")
    with torch.no_grad():
        adapter.δS.fill_(1e-3)
        for name, span in adapter.spans.items():
            is_inside = f".layers.{block}." in name
            adapter.δS_hack[span] = 1e-3 * is_inside
            adapter.δS[span] *= not is_inside
    adapter.merge()

    def pointers():
        return {name: site.linear.weight.data_ptr() for name, site in adapter.sites.items()}

    trained = pointers()
    with adapter.deployed():
        deployed = pointers()
    for name, site in adapter.sites.items():
        is_inside = f".layers.{block}." in name
        assert (trained[name] == deployed[name]) == (not is_inside), name
        assert (deployed[name] == site.W.data_ptr()) == is_inside, name
    held = sum(weight.numel() for weights in adapter._weights.values() for weight in weights)
    assert held == sum(site.W.numel() for site in adapter.sites.values())


def test_bf16_weights_depend_on_the_vectors_alone():
    """Not on the merges before: sampler, trainer, ranks and a resumed run have the same ones."""
    adapter, resumed = (
        adapted("qwen3", 1e-3, torch.bfloat16),
        adapted("qwen3", dtype=torch.bfloat16),
    )

    def are(of, expected):
        return all(
            map(torch.equal, [site.linear.weight.data for site in of.sites.values()], expected)
        )

    def weights():
        return [site.linear.weight.data.clone() for site in adapter.sites.values()]

    merged, state = weights(), adapter.state_dict()
    with adapter.reference():
        assert all(
            site.linear.weight.data_ptr() == site.W.data_ptr() for site in adapter.sites.values()
        )
    with adapter.deployed():
        deployed = weights()
    shake(adapter, 2e-3, seed=3)
    shake(adapter, 1e-3)
    assert are(adapter, merged)
    resumed.load_state_dict(state)
    assert are(resumed, merged)
    with torch.no_grad():
        resumed.δS_hack.zero_()
    resumed.merge()
    assert are(resumed, deployed)


def test_one_state_is_one_file(tmp_path):
    """Whatever order the library or the caller gives the metadata; and it is still a file that the library reads."""
    tensors = {"b": torch.arange(5.0), "a": torch.ones(2, 3)}
    metadata = {f"key {i}": "ü" * i for i in range(12)}
    files = {
        canonical(to_safetensors(tensors, dict(order)))
        for order in (metadata.items(), [*metadata.items()][::-1])
    }
    assert len(files) == 1
    (tmp_path / "x.safetensors").write_bytes(files.pop())
    read, meta = read_safetensors(tmp_path / "x.safetensors")
    assert meta == metadata
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
