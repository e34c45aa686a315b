"""One model on several ranks: the numbers of one rank, a part of its bytes. The real torchrun, on gloo."""

import os
import signal

import pytest
import torch
from transformers import StableLmConfig, StableLmForCausalLM

from files import loaded
from runs import flags, once, only_run, rows, status
from test_ranks import output_of, process_of, same_run, torchrun
from test_train import start, wait_for_steps
from tiny import SHAPE, tiny
from vgrout.config.presets import resolve
from vgrout.ground import ranks
from vgrout.ground.io import Refused
from vgrout.model.svd_adapter import SvdAdapter, cuts
from vgrout.model.svd_files import svd, weight_key
from vgrout.runs import plan

TENSOR = "--tensor-parallel"

# Compares a whole model with the same one on two ranks: both weights are in each process.
PARITY = """
import json, sys
from dataclasses import replace
from pathlib import Path
import torch
sys.path.insert(0, sys.argv[1])
from tiny import as_policy, shake, tiny
from vgrout.config.settings import Sampling
from vgrout.ground import ranks
from vgrout.model.hidden_states import latents
from vgrout.model.load.source import shapes_of
from vgrout.model.logprobs import completion_logprobs, pieces_of
from vgrout.model.rollout_grads import per_rollout_grads
from vgrout.model.sampling import decoder
from vgrout.model.sampling.sampler import sample
from vgrout.model.svd_adapter import cut

def policy(family, dtype, shared):
    model = tiny(family, 0, dtype)
    model.config.eos_token_id = model.generation_config.eos_token_id = 1
    if shared: cut(model)
    made = as_policy(model)
    shake(made.adapter, 0.3)
    return made

def text(n): return tuple(torch.randint(7, 97, (n,), generator=stream).tolist())

def gradients(policy, rows):
    with per_rollout_grads(policy.adapter, len(rows)) as collected:
        for part, batch in policy.batches(prompts, answers, rows, 64):
            collected.announce(pieces_of(batch, [rows[i] for i in part]), batch.tokens)
            loss = completion_logprobs(policy.model, batch).sum()
            of_forward = len(sums)
            loss.backward()
            backward.add(len(sums) - of_forward)
    return collected.flat

def counted(x, sum_shards=ranks.sum_shards):
    sums.append(1)
    return sum_shards(x)

def held(policy):
    # bytes of what is cut, and of all
    of_cut, everything = [], [p.data for p in policy.model.parameters()]
    for s in policy.adapter.sites.values():
        of_cut += [s.linear.weight.data, s.W, s.held_U, s.held_Vh]
    everything += of_cut
    return nbytes(of_cut), nbytes(everything)

def nbytes(tensors):
    storages = [x.untyped_storage() for x in tensors]
    return sum({x.data_ptr(): x.nbytes() for x in storages}.values())

sums, found = [], {}
with ranks.joined():
    ranks.share_model(2)
    ranks.sum_shards = counted
    models = [(name, torch.float32) for name in ("qwen3", "qwen2-bias", "llama", "gemma", "gemma2")]
    for name, dtype in [*models, ("qwen3", torch.bfloat16)]:
        # a large model's decoder, and a small one's
        decoder.FUSE_BELOW = 0 if name == "llama" else 2**26
        stream = torch.Generator().manual_seed(3)
        prompts = [text(5), text(9), text(9)]
        prompts.append(prompts[1])
        answers = [text(n) for n in (6, 4, 8, 3)]
        one, two = (policy(name, dtype, shared) for shared in (False, True))
        off = {}
        def compare(what, of):
            want, got = of(one), of(two)
            off[what] = float((got - want).abs().max() / want.abs().max())
        with torch.no_grad():
            compare("logits", lambda p: p.model(input_ids=torch.tensor([prompts[1]])).logits)
            compare("log-probs", lambda p: p.logprobs(prompts, answers)[0])
            compare("hidden", lambda p: latents(p, prompts, answers))
            compare("KL", lambda p: p.kl_to_base(prompts, answers))
            compare("fingerprint", lambda p: p.adapter.basis_fingerprint(p.adapter.δS))
        compare("realised", lambda p: torch.tensor(p.adapter.realised_share()))
        backward = set()
        for packs in (True, False):
            for rows in ([0, 1, 2, 3], [0, 0, 0, 0]):
                want = gradients(replace(one, packs=packs and one.packs), rows)
                got = ranks.total(gradients(replace(two, packs=packs and two.packs), rows))
                off[f"g, packed {packs}, rows {rows}"] = float((got - want).abs().max() / want.abs().max())
        weights = [
            torch.equal(b.shard.of(a.linear.weight.data), b.linear.weight.data)
            for a, b in zip(one.adapter.sites.values(), two.adapter.sites.values(), strict=True)
        ]
        drawn = [sample(p, prompts[:3], 4, Sampling(), 12, torch.Generator().manual_seed(1)) for p in (one, two)]
        same = [[c.ids for c in row] for row in drawn[0]] == [[c.ids for c in row] for row in drawn[1]]
        found[f"{name} {dtype}"] = {
            "off": off, "backward": sorted(backward), "weights": all(weights), "tokens": same,
            "one": held(one), "two": held(two),
            "planned": shapes_of(two.model.config.to_dict()).factors // 2,
            "factors": sum(s.held_U.numel() + s.held_Vh.numel() for s in two.adapter.sites.values()),
            "fast": (one.lean, one.packs) == (two.lean, two.packs),
        }
    Path(f"{ranks.rank()}.json").write_text(json.dumps(found))
"""


@pytest.fixture(scope="module")
def parity(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parity")
    (folder / "parity.py").write_text(PARITY)
    output_of(torchrun(folder, 2, os.path.dirname(__file__), program=["parity.py"]))
    return [loaded(folder / f"{rank}.json") for rank in range(2)]


@pytest.mark.long
def test_two_ranks_compute_what_one_does(parity):
    """Logits, log-probs, hidden states, KL, gradients; merged weights to the last bit, in bf16 too."""
    for of_rank in parity:
        for name, of_family in of_rank.items():
            bound = 1e-5 if "float32" in name else 0.1
            assert all(off <= bound for off in of_family["off"].values()), (name, of_family["off"])
            assert of_family["weights"], name
            assert of_family["fast"], name
            # two of each block; the first one's attention needs no gradient of its input
            assert of_family["backward"] == [0, 2 * SHAPE["num_hidden_layers"] - 1], name
            assert of_family["tokens"] or "bfloat16" in name


@pytest.mark.long
def test_what_is_cut_is_held_once(parity):
    for name, first in parity[0].items():
        of_cut, everything = first["one"]
        held = [of_rank[name]["two"] for of_rank in parity]
        assert first["factors"] == first["planned"]
        assert [cut for cut, _ in held] == [of_cut / 2] * 2
        assert sum(total for _, total in held) <= 1.1 * of_cut + 2 * (everything - of_cut), name


def test_ranks_divide_the_decompositions(tmp_path):
    computed, until_all_are_there = [], []

    def decompose(W):
        computed.append(weight_key(W))
        return svd(W)

    for rank in range(2):
        computed.clear()
        with pytest.MonkeyPatch.context() as m:
            m.setattr(ranks, "size", lambda: 2)
            m.setattr(ranks, "here", lambda: 2)
            m.setattr(ranks, "rank", lambda rank=rank: rank)
            m.setattr(ranks, "gather", lambda _: until_all_are_there.append({*computed}))
            SvdAdapter(tiny(), tmp_path / str(rank), decompose)
        assert len(computed) == 14
    first, second = until_all_are_there
    assert not first & second
    assert len(first) == len(second) == 7


SHARED = [*flags("route2", "--vhack-refresh-every", "2")]


@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.long
def test_rows_of_a_shared_model(n, shared_run, tmp_path):
    """Two ranks with one model; two times two."""
    alone = shared_run(*SHARED)
    output_of(torchrun(shared_run.warm(tmp_path), n, *once(SHARED), TENSOR, "2"))
    same_run(alone, only_run(tmp_path))


@pytest.mark.slow
def test_a_killed_rank_and_other_numbers_of_ranks(shared_run, tmp_path):
    """Of two ranks with one model one is killed; one whole model goes on, and then two ranks again."""
    argv = flags("route2", "--checkpoint-every", "1", "--steps", "12")
    whole = shared_run(*argv)
    job = torchrun(shared_run.warm(tmp_path), 2, *argv, TENSOR, "2")
    path = wait_for_steps(tmp_path, 3, job)
    os.kill(process_of(job, 1), signal.SIGKILL)
    output_of(job, 1)
    end = status(path)
    assert end["state"] == "failed"
    assert end["reason"].startswith("another rank has ended")
    again = ["smoke", "--resume", str(path.relative_to(tmp_path)), TENSOR]
    process = start(tmp_path, *again, "1")
    wait_for_steps(tmp_path, len(rows(path)) + 3, process)
    process.send_signal(signal.SIGTERM)
    output_of(process, 130)
    assert len(rows(path)) < 12
    output_of(torchrun(tmp_path, 2, *again, "2"))
    same_run(whole, path)


def test_who_cannot_share_a_model():
    with pytest.raises(
        Refused, match=r"--tensor-parallel 2: takes a multiple of 2 processes .* not 1; "
    ):
        plan.require_shards(resolve(["smoke", TENSOR, "2"]))
    with pytest.raises(Refused, match=r"--tensor-parallel 4: does not divide .*key/value heads, 2"):
        plan.require_shards(resolve(["smoke", TENSOR, "4"]))
    with torch.device("meta"):
        without_plan = StableLmForCausalLM(StableLmConfig(**SHAPE))
    with pytest.raises(
        Refused, match=r"--tensor-parallel 2: transformers has no plan for StableLm"
    ):
        cuts(without_plan, 2)
