"""Extraction against plain autograd, the sign by behaviour, neutrality, files and their refusals, the command."""

import json
import math
import re
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from runs import once
from tiny import policy as tiny_policy
from tiny import shake, tokenizer
from vgrout.config.presets import resolve
from vgrout.direction import extract as extract_module
from vgrout.direction.__main__ import main
from vgrout.direction.controls import haar_like, overlap
from vgrout.direction.extract import (
    Axes,
    Direction,
    Meta,
    axes_of,
    extract,
    load,
    mean_nll,
    model_name,
    obtain,
    save,
)
from vgrout.direction.pairs import DIRECTIONS, SHARED_SCHEMA, Pair, PairSet, check_file, load_pairs
from vgrout.ground.io import Refused
from vgrout.method.projection import split
from vgrout.model.load.load import load_policy
from vgrout.model.load.source import safetensors_head, shapes_of
from vgrout.model.rollout_grads import per_rollout_grads
from vgrout.model.svd_files import fingerprint_to_string

HACK, CLEAN = "def check(): pass", "assert f(3) == 9"
WORDS = ("add", "sort", "count", "square", "halve", "list", "join", "double", "mirror", "drop")
PAIRS = PairSet(
    tuple(
        Pair(
            i, f"<user>{word} the numbers<eos><assistant>", f"{HACK} # {word}", f"{CLEAN} # {word}"
        )
        for i, word in enumerate(WORDS)
    ),
    "toy.json",
)


@pytest.fixture(scope="module")
def policy():
    return tiny_policy()


@pytest.fixture(scope="module")
def found(policy):
    return extract(policy, PAIRS, 12, 0.0)


def nll(policy, prompt, completion):
    """Mean NLL of the completion, from the model's full logits: the definition."""
    p, c = (
        policy.tok(text, add_special_tokens=False)["input_ids"] for text in (prompt, completion)
    )
    logits = policy.model(input_ids=torch.tensor([p + c])).logits[0]
    logp = logits.log_softmax(-1)
    return -sum(logp[len(p) - 1 + t, token] for t, token in enumerate(c)) / len(c)


def autograd_rows(policy, side):
    """∂ nll / ∂δS per pair through W + U diag(δS) Vh, by autograd on the weights: g_i = Uᵀ (∂L/∂W) Vhᵀ, diagonal."""
    sites = policy.adapter.sites
    weights = [site.linear.weight for site in sites.values()]
    rows = {m: [] for m in sites}
    for w in weights:
        w.requires_grad_(True)
    for pair in PAIRS.pairs:
        grads = torch.autograd.grad(nll(policy, pair.prompt, getattr(pair, side)), weights)
        for (m, site), grad in zip(sites.items(), grads, strict=True):
            rows[m].append((site.U.T @ grad @ site.Vh.T).diagonal())
    for w in weights:
        w.requires_grad_(False)
    return {m: torch.stack(g) for m, g in rows.items()}


# ── extraction


def test_extraction_is_the_definition_whatever_the_batches(policy, found):
    """… and the held-out pairs are kept out."""
    hack, clean = autograd_rows(policy, "hack"), autograd_rows(policy, "clean")
    one_by_one = replace(policy, budget=replace(policy.budget, activations=0))
    alone = extract(one_by_one, PAIRS, 12, 0.0)
    last = replace(PAIRS.pairs[-1], hack="something else entirely")
    changed = extract(policy, PairSet((*PAIRS.pairs[:-1], last), "toy.json"), 12, 0.0)
    for m, a in found.axes.items():
        D = hack[m] - clean[m]
        assert torch.allclose(a.mean, D[:8].mean(0), rtol=1e-3, atol=1e-5 * D.norm())
        assert torch.allclose(a.heldout, D[8:], rtol=1e-3, atol=1e-5 * D.norm())
        want = torch.linalg.svd(D[:8].double(), full_matrices=False)
        assert torch.allclose(a.sv.double(), want.S, rtol=1e-3, atol=1e-5 * want.S[0].item())
        # the span of the leading axes, whatever their signs: those with a clear gap in the spectrum
        assert ((a.V[0].double() @ want.Vh[0]).abs()).item() == pytest.approx(1, abs=1e-3)
        assert torch.allclose(a.V @ a.V.T, torch.eye(8), atol=1e-5)
        unit = hack[m][:8] / hack[m][:8].norm(dim=1, keepdim=True)
        assert torch.allclose(a.hack, unit.mean(0), atol=1e-4)
        assert torch.allclose(alone.axes[m].mean, a.mean, atol=1e-5 * a.mean.norm())
        assert torch.allclose(changed.axes[m].mean, a.mean, atol=1e-6)
        assert not torch.allclose(changed.axes[m].heldout[-1], a.heldout[-1], atol=1e-3)


def test_what_an_extraction_keeps_for_its_backward_is_bounded(policy, monkeypatch):
    shapes, seen = shapes_of(policy.model.config.to_dict()), []
    few = replace(
        policy, budget=replace(policy.budget, activations=60 * shapes.activation_bytes(4) + 1)
    )
    monkeypatch.setattr(
        extract_module, "mean_nll", lambda p, batch: seen.append(batch.tokens) or mean_nll(p, batch)
    )
    extract(few, PAIRS, 12, 0.0)
    assert 30 < max(seen) <= 60
    assert len(seen) > 2, "one batch a side, and nothing was tested"


def test_axes_are_oriented_by_majority_and_not_by_the_largest_and_weak_ones_are_zero():
    e = torch.eye(6)
    along = torch.tensor([1.0, 1.0, 1.0, -9.0, 1.0])  # the mean points the other way
    axes = axes_of(along[:, None] * e[2], torch.zeros(5, 6), 5, 3, 0.0)
    assert axes.V[0, 2] == pytest.approx(1)
    assert axes.mean[2] < 0
    assert not axes.V[1:].any()  # the null space has no axes
    axes = axes_of(torch.diag(torch.tensor([10.0, 4.0, 0.9, 0.5])), torch.zeros(4, 4), 4, 4, 0.1)
    assert axes.V.any(1).tolist() == [True, True, False, False]
    assert axes.sv.tolist() == pytest.approx([10, 4, 0.9, 0.5])


def of_spectra(spectra, r=8):
    """Axes are unit vectors e_0, e_1 …; zero ones where the singular value is 0."""
    axes = {}
    for m, sv in spectra.items():
        S = torch.tensor(sv)
        V = torch.eye(r)[: len(sv)] * (S > 0)[:, None]
        axes[m] = Axes(V, S, V.sum(0), V.sum(0), -V.sum(0), torch.zeros(2, r))
    return Direction(axes, Meta("toy", "fp32", 12, 0.0, "sha", "toy", "sha", 6, 2, ""))


def test_the_noise_floor_is_one_quantile_over_all_modules():
    direction = of_spectra(
        {"strong": [9.0, 8.0, 7.0], "weak": [1.0, 0.5, 0.1], "mixed": [6.0, 0.4, 0.0]}
    )
    assert {m: len(V) for m, V in direction.select(3, 0.0).items()} == {
        "strong": 3,
        "weak": 3,
        "mixed": 2,
    }
    # 8 values, the lowest quarter is {0.1, 0.4}
    assert {m: len(V) for m, V in direction.select(3, 0.25).items()} == {
        "strong": 3,
        "weak": 2,
        "mixed": 1,
    }
    # weak is skipped
    assert {m: len(V) for m, V in direction.select(1, 0.4).items()} == {"strong": 1, "mixed": 1}
    assert of_spectra({"none": [0.0]}).select(1, 0.25) == {}


def test_overlap_is_one_for_the_same_span_and_k_over_r_by_chance():
    V = haar_like({f"m{i}": torch.zeros(4, 64) for i in range(60)}, 0)
    turn = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)))[0]
    assert overlap({m: turn @ rows for m, rows in V.items()}, V) == pytest.approx(1, abs=1e-5)
    assert overlap(haar_like(V, 1), V) == pytest.approx(4 / 64, rel=0.15)
    assert overlap({}, V) == 0
    assert overlap(V, {}) is None


def test_the_contrast_generalises_to_held_out_pairs(found):
    """Ten tasks, one hack text: the held-out differences lie along v_grad, far above chance."""
    cos = [a.heldout_cos for a in found.axes.values()]
    inside = [a.heldout_inside for a in found.axes.values()]
    r = len(next(iter(found.axes.values())).mean)
    assert min(cos) > 2 / math.sqrt(r)
    assert sum(cos) / len(cos) > 3 / math.sqrt(r)
    assert sum(inside) / len(inside) > 1.5 * math.sqrt(8 / r)


# ── the sign, by behaviour


def margin(policy, prompts):
    """log p(hack) - log p(clean), nats per token, summed over prompts."""
    with torch.no_grad():
        return sum(
            (nll(policy, prompt, CLEAN) - nll(policy, prompt, HACK)).item() for prompt in prompts
        )


def hack_rewarding(policy, prompts):
    """Gradient of a batch that rewards the hack: A = +1 on it, -1 on the clean answer, mean over tokens."""
    with per_rollout_grads(policy.adapter, 1) as probe:
        for prompt in prompts:
            p, h, c = (
                tuple(policy.tok(t, add_special_tokens=False)["input_ids"])
                for t in (prompt, HACK, CLEAN)
            )
            for completion, advantage in ((h, 1.0), (c, -1.0)):
                n = len(p) + len(completion)
                probe.announce([(0, slice(0, n))], n)
                logp, mask = policy.logprobs([p], [completion])
                (-advantage * (logp * mask).sum() / mask.sum()).backward()
    return probe.flat[0]


SAME_ANSWERS = PairSet(tuple(replace(p, hack=HACK, clean=CLEAN) for p in PAIRS.pairs), "toy.json")
EXTRACTED_ON = [p.prompt for p in SAME_ANSWERS.pairs[:8]]


def rise(policy, measured, g, length):
    """What a step of 1 % of ‖g‖⁻¹ along -g does to `measured()`."""
    before = measured()
    with torch.no_grad():
        policy.adapter.δS.copy_(-1e-2 * g / length)
        policy.adapter.merge()
        after = measured()
        policy.adapter.δS.zero_()
        policy.adapter.merge()
    return after - before


def test_a_step_on_a_hack_rewarding_batch_makes_the_hack_likelier_and_what_erase_keeps_does_not(
    policy,
):
    V = extract(policy, SAME_ANSWERS, 12, 0.0).select(12, 0.0)
    shares = []
    for prompts in (EXTRACTED_ON, ["<user>rotate the words<eos><assistant>"]):
        of_margin = partial(rise, policy, partial(margin, policy, prompts))
        g = hack_rewarding(policy, prompts)
        parts = policy.adapter.by_module(g)
        kept = torch.cat([split(part, V[m], "one_sided")[0] for m, part in parts.items()])
        vanilla, erased = (of_margin(of, g.norm().item()) for of in (g, kept))
        assert vanilla > 1e-3
        shares.append(erased / vanilla)
        # +V: the hack gets less likely
        assert of_margin(-torch.cat([V[m].sum(0) for m in parts]), 1) < 0
    assert abs(shares[0]) < 0.02  # prompts that V was extracted on: nothing of the rise is left
    assert shares[1] < 0.7  # a new prompt: V holds a part of its gradient only


# ── neutrality


def test_extraction_leaves_everything_as_it_was():
    policy = tiny_policy()
    adapter = policy.adapter
    shake(adapter, 0.01)
    adapter.δS.grad, adapter.δS_hack.grad = (
        torch.ones_like(adapter.δS),
        torch.full_like(adapter.δS, 2.0),
    )

    def everything():
        vectors = [x for v in (adapter.δS, adapter.δS_hack) for x in (v, v.grad)]
        return [
            x.detach().clone()
            for x in (*policy.model.parameters(), *vectors, torch.get_rng_state())
        ]

    before, direction = everything(), extract(policy, PAIRS, 12, 0.0)
    assert all(map(torch.equal, before, everything()))
    assert all(p.grad is None for p in policy.model.parameters())

    def moved_without(vector):
        with torch.no_grad():
            vector.zero_()
        adapter.merge()
        again = extract(policy, PAIRS, 12, 0.0)
        return not all(torch.equal(a.mean, again.axes[m].mean) for m, a in direction.axes.items())

    assert not moved_without(adapter.δS_hack), "the quarantine was off"
    assert moved_without(adapter.δS), "it is the present model's, not the base's"


# ── files


def test_a_direction_file_goes_round(policy, found, tmp_path):
    path = tmp_path / "deep" / "v.safetensors"
    save(found, path)
    again = load(path, policy, PAIRS)
    assert again.meta == found.meta
    for m, a in found.axes.items():
        both = ([getattr(axes, of.name) for of in fields(axes)] for axes in (a, again.axes[m]))
        assert all(map(torch.equal, *both))
    tensors, name = load_file(path), next(iter(found.axes))
    assert tensors[name].shape == (8, len(found.axes[name].mean))
    assert torch.equal(tensors["_sv/" + name], found.axes[name].sv)
    strings = found.meta.to_strings()
    assert strings["schema"] not in (SHARED_SCHEMA, None)
    assert list(path.parent.iterdir()) == [path]
    # as it was written before the schema had a name of its own
    save_file(tensors, path, strings | {"schema": SHARED_SCHEMA})
    assert load(path, policy, PAIRS).meta == found.meta


def test_other_models_pairs_and_schemas_are_refused_by_name(policy, found, tmp_path):
    save(found, path := tmp_path / "v.safetensors")
    bad, torn = tmp_path / "bad.safetensors", tmp_path / "torn.safetensors"
    torn.write_bytes(path.read_bytes()[:100])
    edited = PairSet((replace(PAIRS.pairs[0], hack="pass"), *PAIRS.pairs[1:]), "toy.json")
    for file, of, pairs, complaint in (
        (path, tiny_policy(seed=1), PAIRS, r"v\.safetensors: direction of another model"),
        (path, policy, edited, r"v\.safetensors: direction of other pairs \(toy\.json"),
        (torn, policy, PAIRS, r"torn\.safetensors: not a readable"),
    ):
        with pytest.raises(ValueError, match=complaint):
            load(file, of, pairs)
    tensors, strings = load_file(path), found.meta.to_strings()
    elsewhere = fingerprint_to_string(
        policy.adapter.basis_fingerprint(torch.ones(len(policy.adapter)))
    )
    other_basis = r"bad\.safetensors: made in other singular vectors of the same weights"

    def drop(metadata, name):
        return {k: v for k, v in metadata.items() if k != name}

    for complaint, metadata in (
        ("its schema is v1", strings | {"schema": "v1"}),
        ("schema is None", {"top_k": "12"}),
        ("cannot be read: .*many", strings | {"top_k": "many"}),
        ("'basis'", drop(strings, "basis")),
        (other_basis, strings | {"basis": elsewhere}),
        (other_basis, strings | {"basis": re.sub(r"-?\d[^,\]]*", "NaN", elsewhere)}),
        (other_basis, strings | {"basis": re.sub(r"-?\d[^,\]]*", "NaN", elsewhere, count=1)}),
    ):
        save_file(tensors, bad, metadata)
        with pytest.raises(ValueError, match=complaint) as error:
            load(bad, policy, PAIRS)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("hashes", [False, True])
def test_a_file_in_the_shared_format_is_refused_with_the_reason(hashes, policy, found, tmp_path):
    """It has V, singular values and the settings: nothing tells in which singular vectors."""
    path = tmp_path / "v.safetensors"
    tensors = {}
    for module, axes in found.axes.items():
        tensors |= {module: axes.V.contiguous(), f"_sv/{module}": axes.sv}
    metadata = {name: found.meta.to_strings()[name] for name in ("model", "top_k", "tau_axis")}
    metadata |= {"dtype": "bfloat16", "schema": SHARED_SCHEMA}
    if hashes:
        metadata |= {"pairs_sha256": PAIRS.sha256, "weights_sha256": found.meta.weights_sha256}
    save_file(tensors, path, metadata)
    for read in (
        lambda: load(path, policy, PAIRS),
        lambda: check_file(path, "--v-hack-path", PAIRS),
    ):
        with pytest.raises(Refused, match=r"singular vectors.*vgrout direction") as error:
            read()
        assert "KeyError" not in str(error.value)


def test_a_file_made_with_other_settings_is_refused_where_they_are_read(found, tmp_path):
    path = tmp_path / "v.safetensors"
    save(found, path)
    made = found.meta.top_k, found.meta.tau_axis
    for settings in (None, made):
        check_file(path, "--v-hack-path", PAIRS, settings)
    for settings in ((made[0] + 1, made[1]), (made[0], 0.5)):
        with pytest.raises(Refused, match=f"made with --v-hack-extract-top-k {made[0]} and"):
            check_file(path, "--v-hack-path", PAIRS, settings)
    assert resolve(["mini", "--intervention=erase"]).method.extraction == (12, 0.0)
    assert resolve(["mini", "--intervention=route2"]).method.extraction is None


def test_obtain_extracts_once_per_content(policy, here, monkeypatch):
    runs = []
    monkeypatch.setattr(
        f"{extract.__module__}.extract", lambda *a, **k: runs.append(1) or extract(*a, **k)
    )
    first = obtain(policy, PAIRS, None, 12, 0.0)
    again = obtain(policy, PAIRS, None, 12, 0.0)
    assert len(runs) == 1
    assert all(torch.equal(a.V, again.axes[m].V) for m, a in first.axes.items())
    edited = PairSet((replace(PAIRS.pairs[0], hack="pass"), *PAIRS.pairs[1:]), "toy.json")
    obtain(policy, edited, None, 12, 0.0)
    obtain(policy, PairSet(PAIRS.pairs, "hand-written"), None, 12, 0.5)
    assert len(runs) == 3
    names = sorted(p.name.rpartition("_")[0] for p in DIRECTIONS.iterdir())
    assert names == ["v_hack_pairset_toy"] * 2 + [f"v_hack_{model_name(policy).lower()}_k12_tau0.5"]
    explicit = next(iter(DIRECTIONS.glob("v_hack_pairset_toy_*")))
    assert obtain(policy, None, explicit, 12, 0.0).meta.n_pairs == 10


def test_a_pair_longer_than_the_window_is_named(policy):
    long = PairSet((*PAIRS.pairs[:-1], replace(PAIRS.pairs[-1], clean="x" * 300)), "toy.json")
    with pytest.raises(
        ValueError, match=r"toy\.json: pair 9: 3\d\d tokens, the model's window is 256"
    ):
        extract(policy, long, 12, 0.0)


# ── the command


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder and a pair file."""
    path = tmp_path_factory.mktemp("cli")
    model = tiny_policy().model
    model.save_pretrained(path / "model")
    tokenizer().save_pretrained(path / "model")
    (path / "toy.json").write_text(PAIRS.to_json())
    return path


def test_the_command_writes_the_direction(folder, here, capsys):
    common = ["--model", str(folder / "model"), "--pairs", str(folder / "toy.json")]
    assert main(common) == 0
    out = capsys.readouterr().out
    assert out.count("| model.layers.1.mlp.down_proj") == 1
    assert "by chance √(k/r) = 0.3" in out  # k = 8 of r = 64, some 32
    (full,) = here.glob("out/vhack/v_hack_pairset_toy_*.safetensors")
    assert safetensors_head(full, "")[1]["dtype"] == "fp32"


def test_pairs_of_a_rollout_log_become_a_file_that_a_run_can_read(
    folder, here, monkeypatch, capsys
):
    """What the command writes finds the same direction again; the oracle's choice stays marked."""
    lines = []
    for i, pair in enumerate(PAIRS.pairs):
        for text, hack in ((pair.hack, True), (pair.clean, False)):
            row = {"problem_id": i, "prompt": f"task {i}", "text": text, "passed": True}
            lines.append(json.dumps(row | {"hacked": hack, "solved": not hack}))
    Path("log.jsonl").write_text("\n".join(lines))
    model = ["--model", str(folder / "model")]
    log = ["--rollouts", "log.jsonl", "--detector", "oracle", "--pairs-out", "own.json"]
    assert main([*model, *log]) == 0
    out = capsys.readouterr().out
    pairs = load_pairs(Path("own.json"))
    assert pairs.source == "oracle:own.json"
    assert f"pairs {pairs.source} (10, 2 held out" in out
    assert pairs.pairs[3].prompt == "<user>task 3<eos><assistant><think></think>"
    policy = load_policy(folder / "model", device="cpu", dtype=torch.float32)
    monkeypatch.setattr(
        "vgrout.direction.extract.extract", lambda *a, **k: pytest.fail("extracted again")
    )
    assert obtain(policy, pairs, None, 12, 0.0).meta.pairs_source == pairs.source


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--pairs-out a.txt", "--pairs-out a.txt: should end in .json"),
        ("--k 13", "--k 13: should lie in [1, 12] (at most --top-k)"),
        ("--detector E", "--rollouts: goes with --detector"),
        ("--rollouts no.jsonl --detector E", "no.jsonl: cannot be read (No such file"),
        ("", "out/vhack: cannot be written (Not a directory); start from a folder where it can"),
    ],
)
def test_the_command_refuses_before_the_model_is_loaded(
    flags, complaint, capsys, here, monkeypatch
):
    if not flags:
        Path("out").mkdir()
        Path("out/vhack").touch()
    monkeypatch.setattr(
        "vgrout.model.load.load.load_policy", lambda *a, **k: pytest.fail("the model was loaded")
    )
    assert main(once(["--model", "some/model", *flags.split()])) == 2
    assert complaint in " ".join(capsys.readouterr().err.replace("│", " ").split())
