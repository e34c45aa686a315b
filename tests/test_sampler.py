"""Sampling: the distribution, the bookkeeping, and that no lever (dropping, sharing, the lean decoder) changes it."""

import math
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessorList
from transformers.generation.logits_process import (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import tiny
from pretended_gpu import graphs_that_run_again
from quick import first_quick
from vgrout.config.settings import Sampling
from vgrout.ground import ranks
from vgrout.model import logprobs
from vgrout.model.load.load import as_language_model, try_template
from vgrout.model.load.trials import lean_fits, packs, require_branching, trial_tokens
from vgrout.model.logprobs import backbone
from vgrout.model.rollout_grads import per_rollout_grads
from vgrout.model.sampling import decoder as decoder_module
from vgrout.model.sampling import kv_cache, sampler
from vgrout.model.sampling.decoder import HfDecoder, LeanDecoder
from vgrout.model.sampling.sampler import WIDE, candidates, draw, largest, placed, sample
from vgrout.train import main as train

PROMPTS = ((2, 79, 76, 83, 1, 4), (9,), (2, 40, 41, 42, 43, 44, 45, 46, 1, 4))
FAMILIES = first_quick(["qwen3", "gemma2"])  # the lean decoder, and transformers' own cache


def stream(seed=0):
    return torch.Generator().manual_seed(seed)


def run(policy, n=5, sampling=None, max_new=30, **kw):
    return sample(policy, PROMPTS, n, sampling or Sampling(), max_new, stream(), **kw)


def tokens(answers):
    return [[a.ids for a in of_prompt] for of_prompt in answers]


def same(one, other, abs):
    """Equal tokens, and log-probs but for rounding."""
    pairs = zip(chain(*one), chain(*other), strict=True)
    close = [pytest.approx(a.logp, abs=abs) == b.logp for a, b in pairs]
    return tokens(one) == tokens(other) and all(close)


# ── levers change nothing


def test_sampling_in_turns_changes_no_token():
    policy = tiny.policy()
    row = policy.budget.kv // sampler.rows_at_once(policy, 10, 30, 4)
    few = replace(policy, budget=replace(policy.budget, kv=2 * row + 1))
    assert sampler.rows_at_once(few, 10, 30, 4) == 2
    assert tokens(run(few, [4, 0, 5])) == tokens(run(policy, [4, 0, 5]))


def test_prompts_that_are_read_at_once_fit_what_may_be(monkeypatch):
    policy = tiny.policy("gemma2")
    want = tokens(run(policy, [4, 0, 5]))
    assert sampler.rows_at_once(policy, 10, 30, 4) > 9
    monkeypatch.setattr(sampler, "PROMPT_TOKENS", 19)  # one of the longest
    assert sampler.rows_at_once(policy, 10, 30, 4) == 4
    assert sampler.rows_at_once(tiny.policy(), 10, 30, 4) > 9, "reads them in parts"
    assert tokens(run(policy, [4, 0, 5])) == want


def one_at_a_time(policy, monkeypatch, *args, **kw):
    """Answers that share nothing with each other, and leave no batch."""
    with monkeypatch.context() as patch:
        patch.setattr(sampler, "rows_at_once", lambda *_: 1)
        return run(policy, *args, **kw)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("begin_alike", [False, True])
def test_rows_that_leave_and_tokens_that_are_shared_change_no_answer(
    family, begin_alike, monkeypatch
):
    """The answers' tree, node by node: as many slots a step as there are prefixes."""
    policy, widths = tiny.policy(family), []
    kind = HfDecoder if family == "gemma2" else LeanDecoder
    step = kind.step
    s = Sampling(temperature=0.2, top_k=2) if begin_alike else Sampling()
    alone = one_at_a_time(policy, monkeypatch, 7, s)
    monkeypatch.setattr(
        kind, "step", lambda self, tokens: widths.append(len(tokens)) or step(self, tokens)
    )
    together = run(policy, 7, s)
    assert same(together, alone, abs=1e-4)
    answers = [(p, a.ids) for p, of_prompt in enumerate(together) for a in of_prompt]
    # transformers' cache is copied whole when a slot leaves: a few stay that nobody reads
    if policy.lean:
        for t, width in enumerate(widths):
            assert width == len({(p, ids[: t + 1]) for p, ids in answers if len(ids) > t + 1})
    if begin_alike:
        assert sum(widths) < 0.9 * sum(len(ids) - 1 for _, ids in answers)
    else:
        assert len({len(ids) for _, ids in answers}) > 2, "or nothing was dropped"


SIZES = ["small", "large", "large, no oneDNN", "large, static"]


@pytest.mark.parametrize(
    ("family", "dtype", "size"),
    [
        *(("qwen3", dtype, size) for dtype in (torch.float32, torch.bfloat16) for size in SIZES),
        ("llama", torch.float32, "large"),
        *(("qwen2-bias", torch.float32, size) for size in SIZES),
    ],
)
def test_the_lean_decoder_computes_what_transformers_does(family, dtype, size, monkeypatch):
    """Logits of prefill and ten steps; slots branch, swap places and leave on the way; two prompts end."""
    monkeypatch.setattr(decoder_module, "FUSE_BELOW", 2**26 if size == "small" else 0)
    # prompts one by one, or all at once
    monkeypatch.setattr(decoder_module, "PROMPT_TOKENS_CPU", 12 if size == "large" else 512)
    monkeypatch.setattr(kv_cache, "BLOCK", 16)  # two of them are passed
    if size == "large, no oneDNN":  # has no bf16 on a CPU without AVX-512
        monkeypatch.setattr(decoder_module, "can_prepack", lambda _: False)
    model = tiny.tiny(family, dtype=dtype)
    moves = {0: [0, 2, 1, 0, 2, 2], 4: [0, 5, 2, 3], 6: [1, 0, 0], 8: [2, 1, 2, 1]}
    noise = torch.randint(1, 97, (10, 6), generator=stream())
    decoders = HfDecoder(model), LeanDecoder(model, static="static" in size)
    with torch.no_grad():
        logits = [d.prefill(PROMPTS, 6, 20) for d in decoders]
        for t in range(10):
            want, got = logits
            # fp32: order of summation; bf16: every product is rounded to 2^-9
            assert (got - want).abs().max() <= want.abs().max() * {2: 5e-2, 4: 1e-5}[dtype.itemsize]
            for d in decoders:
                d.keep(moves.get(t, range(len(want))))
            logits = [d.step(noise[t, : len(moves.get(t, want))]) for d in decoders]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_that_does_not_wait_for_the_tokens_samples_the_same(family, monkeypatch):
    """The device goes on with every row's token before the host has read it, once no rows share a slot."""
    policy = tiny.policy(family)
    want = one_at_a_time(policy, monkeypatch, 5)
    ahead = []
    step_ahead = sampler._Run._step_ahead
    monkeypatch.setattr(sampler, "overlaps", lambda _: True)
    monkeypatch.setattr(
        sampler._Run,
        "_step_ahead",
        lambda self, drawn: ahead.append(len(drawn.tokens)) or step_ahead(self, drawn),
    )
    assert same(run(policy, 5), want, abs=1e-4)
    assert len(ahead) > 5
    assert len(set(ahead)) > 1, "rows leave on the way"


def test_a_captured_step_is_replayed_from_the_third_time_on(monkeypatch):
    """One a width and number of blocks."""
    want = tokens(run(tiny.policy()))
    made = graphs_that_run_again(monkeypatch)
    assert tokens(run(capturing(monkeypatch))) == want
    assert sum(graph.replayed for graph in made) > 10
    assert len(made) > 2


def test_what_a_decoder_captured_is_forgotten_where_its_buffers_are(monkeypatch):
    """A graph reads and writes the addresses that it was captured with."""
    made = graphs_that_run_again(monkeypatch)
    lean = capturing(monkeypatch).decoder()
    for _ in range(2):
        with torch.no_grad():
            lean.prefill(PROMPTS, 3, 8)
            for _ in range(6):
                lean.step(torch.tensor([5, 6, 7]))
    assert len(made) == 2
    assert all(graph.replayed > 0 for graph in made)


def test_a_step_that_cannot_be_captured_runs_as_it_is(monkeypatch, warnings):
    want = tokens(run(tiny.policy()))
    assert tokens(run(capturing(monkeypatch))) == want, "on a CPU"
    assert "a decoding step cannot be captured, and runs as it is" in "".join(warnings)


def capturing(monkeypatch):
    """A policy whose decoders take this for a GPU, in blocks of 16 positions."""
    init = LeanDecoder.__init__

    def on_gpu(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.captures = True

    monkeypatch.setattr(kv_cache, "BLOCK", 16)
    monkeypatch.setattr(LeanDecoder, "__init__", on_gpu)
    return replace(tiny.policy(), graphs=True)


def test_lean_decoder_is_used_only_where_it_is_right(warnings):
    assert not tiny.policy("gemma2").lean
    assert not tiny.policy("gemma").lean
    assert warnings == [], "known to be another architecture: nothing to say"
    odd = tiny.tiny("qwen3")
    # not what the configuration says
    vars(odd.get_submodule("model.layers.1.self_attn"))["scaling"] = 0.4
    assert lean_fits(odd), "the block's own scale is read"
    odd.get_submodule("model.layers.0.mlp").act_fn = torch.nn.GELU()
    assert not lean_fits(odd)
    assert "disagrees" in warnings[0]


@pytest.mark.long
def test_rounding_over_many_blocks_is_no_disagreement():
    config = LlamaConfig(**tiny.SHAPE | {"num_hidden_layers": 30})
    made = as_language_model(LlamaForCausalLM(config).bfloat16().eval(), tiny.tokenizer())
    assert made.lean
    assert made.packs


@pytest.mark.parametrize("noisy", [2, 3])
def test_rounding_that_a_model_amplifies_on_some_tokens_is_no_disagreement(noisy, warnings):
    """noisy: of the three trials those whose tokens are never computed alike twice."""
    model = tiny.tiny("qwen3")
    begin = trial_tokens(model)[:noisy]

    def amplify(_module, args, out):
        ids = args[0][..., None]
        hit = sum(
            ((ids >= first) & (ids < first + 8) for first in begin), torch.zeros_like(ids)
        ).bool()
        return out + hit * torch.randn_like(out)

    model.get_input_embeddings().register_forward_hook(amplify)
    assert packs(model, backbone(model)) == (noisy < 3)
    # the lean decoder reads tokens behind the prompt from the table itself: against it the trial is
    # as noisy
    assert lean_fits(model) == (noisy < 3)
    assert len(warnings) == (2 if noisy == 3 else 0)
    with nullcontext() if noisy < 3 else pytest.raises(ValueError, match="cannot branch"):
        require_branching(model)


# ── distribution

SETTINGS = [
    Sampling(),
    Sampling(temperature=1.0, top_k=0),
    Sampling(temperature=1.7, top_k=0, top_p=0.6),
    Sampling(temperature=0.5, top_k=9, top_p=0.9),
]


def warped(logits, s):
    """What transformers samples from: its processors in its order."""
    steps = [TemperatureLogitsWarper(s.temperature)]
    steps += [TopKLogitsWarper(s.top_k)] if s.top_k else []
    steps += [TopPLogitsWarper(s.top_p)] if s.top_p < 1 else []
    no_ids = torch.zeros(len(logits), 0, dtype=torch.long)
    return LogitsProcessorList(steps)(no_ids, logits.clone())


@pytest.mark.parametrize("s", SETTINGS)
@pytest.mark.parametrize("V", [97, WIDE])
def test_truncated_distribution_is_the_librarys(s, V):
    logits = 3 * torch.randn(50, V, generator=stream())
    want = warped(logits, s).softmax(-1)
    values, ids = candidates(logits, s)
    ids = torch.arange(V).expand(50, V) if ids is None else ids
    got = torch.zeros(50, V).scatter(1, ids, values.softmax(-1))
    assert torch.allclose(got, want, atol=1e-6)


@pytest.mark.parametrize("k", [1, 20, 1000])
def test_the_largest_of_a_wide_row_are_topks(k):
    logits = torch.randn(3, WIDE, generator=stream()).bfloat16()  # with many equals
    values, ids = largest(logits, k)
    assert torch.equal(values, logits.topk(k).values)
    assert torch.equal(values, logits.gather(1, ids))
    assert all(len(set(row)) == k for row in ids.tolist())


def test_draw_is_the_inverse_cdf():
    """A fine grid of noise reproduces the probabilities; its ends stay inside the support, where fp32 sums of many
    small probabilities fall short of 1 or pass it too: the last candidate may have probability 0."""
    logits = torch.tensor([[0.5, -1.0, 2.0, 0.0, 1.0]])
    u = torch.cat([(torch.arange(20_000) + 0.5) / 20_000, torch.tensor([0.0, 1 - 2**-24])])
    drawn = draw(logits.expand(len(u), 5), u, Sampling(temperature=0.8, top_k=3))
    p = torch.tensor([0.5, -math.inf, 2.0, -math.inf, 1.0]).div(0.8).softmax(-1)
    assert torch.allclose(torch.bincount(drawn, minlength=5) / len(u), p, atol=2e-4)
    many, s = (
        torch.randn(64, 5000, generator=stream()),
        Sampling(temperature=1.0, top_k=0, top_p=0.5),
    )
    drawn = draw(many, torch.full((64,), 1 - 2**-24), s)
    assert (warped(many, s).gather(1, drawn[:, None]) > -math.inf).all()


def test_first_tokens_follow_the_models_distribution():
    policy = tiny.policy()
    (answers,) = sample(policy, PROMPTS[:1], 4000, Sampling(temperature=1.0, top_k=0), 1, stream())
    expected = 4000 * policy.model(torch.tensor([PROMPTS[0]])).logits[0, -1].softmax(-1)
    counts = torch.bincount(torch.tensor([a.ids[0] for a in answers]), minlength=97)
    # 96 degrees of freedom: mean 96, standard deviation 14; five of them
    assert float(((counts - expected) ** 2 / expected).sum()) < 96 + 5 * 14


@pytest.mark.parametrize("family", first_quick(["qwen3-padded", "gemma2-padded"]))
def test_only_the_tokenizers_ids_have_a_probability(family, monkeypatch):
    """Sampled, learnt from and compared is one distribution, though the head has rows for more."""
    policy = tiny.policy(family)
    tiny.shake(policy.adapter, 0.3)
    answers = run(policy, 6, Sampling(temperature=1.0, top_k=0))
    flat = [(p, a) for p, of_prompt in zip(PROMPTS, answers, strict=True) for a in of_prompt]
    assert max(i for _, a in flat for i in a.ids) < 97
    own = []
    for p, a in flat:
        logp = (
            policy.model(torch.tensor([[*p, *a.ids]]))
            .logits[0, len(p) - 1 : -1, :97]
            .log_softmax(-1)
        )
        own += logp.gather(1, torch.tensor(a.ids)[:, None])[:, 0].tolist()
    assert [x for _, a in flat for x in a.logp] == pytest.approx(own, abs=1e-5)
    prompts, completions = [p for p, _ in flat], [a.ids for _, a in flat]
    # at once, or in parts: then through the head's own function, without its bias
    for budget in (2**24, 128 * 5):
        monkeypatch.setitem(logprobs.HEAD_BUDGET, "cpu", budget)
        longest = max(len(p) + len(c) for p, c in zip(prompts, completions, strict=True))
        with per_rollout_grads(policy.adapter, 1) as probe:
            n = longest * len(flat)
            probe.announce([(0, slice(0, n))], n)
            logp, mask = policy.logprobs(prompts, completions)
            logp.sum().backward()
        assert logp[mask].tolist() == pytest.approx(own, abs=1e-5)
    kl = policy.kl_to_base(prompts, completions)
    assert 0 < kl.max() < 50
    assert kl.isfinite().all()


def test_ids_between_the_tokenizers_may_have_no_token():
    model, some = tiny.tiny("gemma2"), {*range(97)} - {50, 60}
    logprobs.mark_foreign(model, some)
    drawn = HfDecoder(model).prefill(PROMPTS, 3, 1).softmax(-1)
    assert drawn[:, [50, 60]].sum() == 0
    assert logprobs.tokens(model) == len(some)


# ── bookkeeping


def test_answers_end_with_eos_or_are_cut():
    policy = tiny.policy(pad=None)
    assert policy.pad_id in policy.eos_ids, "pad == eos must work"
    answers = [a for of_prompt in run(policy, 12, max_new=20) for a in of_prompt]
    assert {a.finished for a in answers} == {True, False}
    for a in answers:
        assert (a.ids[-1] in policy.eos_ids) == a.finished
        assert not any(t in policy.eos_ids for t in a.ids[:-1])
        assert a.finished or len(a.ids) == 20
        assert len(a.ids) == len(a.logp)
        shown = [i for i in a.ids if i not in policy.eos_ids]
        assert a.text == policy.tok.decode(shown)
        assert max(a.logp) <= 0


@pytest.mark.parametrize("family", FAMILIES)
def test_the_callback_comes_once_per_row_as_it_ends(family):
    policy, seen = tiny.policy(family), []
    answers = run(policy, [3, 0, 4], on_finish=lambda *row: seen.append(row))
    every = [(p, i, a) for p, of_prompt in enumerate(answers) for i, a in enumerate(of_prompt)]
    assert sorted(seen, key=lambda row: row[:2]) == every
    assert [len(of_prompt) for of_prompt in answers] == [3, 0, 4]
    lengths = [len(answer.ids) for *_, answer in seen]
    assert lengths == sorted(lengths), "in the order in which they end"
    assert run(policy, 0) == [[], [], []]


@pytest.mark.parametrize("whole", [True, False])
def test_a_prompts_answers_may_be_asked_for_on_one_rank(whole, monkeypatch):
    """A function that grades a group is called once for all of it, however many ranks there are."""
    policy = tiny.policy()
    alone = run(policy, n=4)
    at = {"rank": 0}
    ranks_of = {}

    def merged(make):
        found = {}
        for at["rank"] in (0, 1):
            found |= make()
        return found

    monkeypatch.setattr(ranks, "own", lambda costs: ranks._part(costs, at["rank"], 2))
    monkeypatch.setattr(ranks, "merged", merged)
    answers = run(
        policy,
        n=4,
        on_finish=lambda prompt, _, __: ranks_of.setdefault(prompt, set()).add(at["rank"]),
        whole_prompts=whole,
    )
    assert tokens(answers) == tokens(alone)
    assert sorted(map(len, ranks_of.values())) == ([1, 1, 1] if whole else [1, 1, 2])
    assert set.union(*ranks_of.values()) == {0, 1}


def test_the_stream_and_the_adapters_present_view_decide():
    policy = tiny.policy()
    torch.manual_seed(1)
    base = run(policy)
    torch.manual_seed(2)
    assert base == run(policy), "the global generator is not read"
    assert tokens(base) != tokens(sample(policy, PROMPTS, 5, Sampling(), 30, stream(1)))
    tiny.shake(policy.adapter, 0.3)
    moved = run(policy)
    assert tokens(moved) != tokens(base)
    with policy.adapter.reference():
        assert run(policy) == base
    assert run(policy) == moved


@given(st.lists(st.integers(0, 9), max_size=9))
def test_children_stay_where_their_parent_was(parents):
    slots = placed(parents)
    assert sorted(slots) == [*range(len(parents))]
    stayed = {slot for slot, parent in zip(slots, parents, strict=True) if slot == parent}
    assert stayed == {parent for parent in parents if parent < len(parents)}


@pytest.mark.parametrize("greedy", ["--temperature 0", "--top-k 1"])
def test_equal_answers_are_refused(greedy, here, capsys):
    assert train(["smoke", *greedy.split()]) == 2
    error = capsys.readouterr().err
    assert greedy in error
    assert "all answers to a prompt would be the same" in error
    assert list(here.iterdir()) == []


# ── policy


def test_a_template_that_writes_the_date_is_named(warnings):
    tok = tiny.tokenizer()
    try_template(tok)
    assert warnings == []
    tok.chat_template += "{{ strftime_now('%d %b %Y') }}"
    try_template(tok)
    assert "reads the clock" in warnings[0]


# ── conversations

# What published templates do with the think blocks of earlier answers, in their own words in
# miniature.
_SAYS = (
    "{{% for m in messages %}}<{{{{ m.role }}}}>{said}<eos>{{% endfor %}}"
    "{{% if add_generation_prompt %}}<assistant>"
)
# Qwen 3: earlier thoughts are cut out; thinking off opens an empty block
_ANSWER = "{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}"
STRIPS = (
    _SAYS.format(said=_ANSWER) + "{% if not enable_thinking %}<think></think>{% endif %}{% endif %}"
)
# DeepSeek R1: the template itself opens the block, always
OPENS = _SAYS.format(said="{{ m.content.split('</think>')[-1].strip() }}") + "<think>{% endif %}"
PLAIN = _SAYS.format(said="{{ m.content }}") + "{% endif %}"  # Llama 3: knows of no thinking
FORGETS = "<user>{{ messages[-1].content }}<eos><assistant>"


def chatty(template, preserve=True):
    policy = replace(tiny.policy(), preserve_thinking=preserve)
    policy.tok.chat_template = template
    return policy


def turns(*contents):
    roles = ["system", *["user", "assistant"] * len(contents)]
    return [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]


@pytest.mark.parametrize("template", [tiny.TEMPLATE, STRIPS, OPENS, PLAIN])
def test_a_conversation_extends_every_earlier_prompt_and_answer(template):
    policy = chatty(template)
    ids = ()
    messages = turns("be brief", "one")
    for answer, question in (("so", "two"), ("it is", "three"), ("", "four")):
        prompt = policy.render(messages)
        assert prompt[: len(ids)] == ids
        ids = (*prompt, *policy.encode_completion(answer))
        messages += turns("", "", answer, question)[2:]
    last = policy.render(messages)
    assert last[: len(ids)] == ids
    assert "four" in policy.tok.decode(list(last))


@pytest.mark.parametrize("template", [tiny.TEMPLATE, STRIPS, OPENS, PLAIN])
def test_earlier_thoughts_are_kept_once_and_whole(template):
    """Answers known as text, with a think block of their own: in the prompt as they stand, after no second opening."""
    answer = "<think>because</think>so"
    messages = turns("", "one", answer, "two", answer, "three")
    kept = chatty(template).prompt_text(messages)
    assert kept.count(answer) == 2
    assert kept.count("because") == kept.count("<think>because</think>") == 2
    assert "<think></think><think>" not in kept.removesuffix("<think>")
    assert kept.replace(answer, "").count("<eos>") == 6
    assert chatty(template).tok.decode(list(chatty(template).render(messages))) == kept
    dropped = chatty(template, preserve=False).prompt_text(messages)
    assert ("because" in dropped) == (template in (tiny.TEMPLATE, PLAIN)), "what the flag is for"


def test_one_question_is_rendered_the_same_either_way_and_a_template_that_forgets_is_refused():
    for template in (tiny.TEMPLATE, STRIPS, OPENS, PLAIN, FORGETS):
        one = turns("be brief", "one")
        assert chatty(template).render(one) == chatty(template, preserve=False).render(one)
    with pytest.raises(
        ValueError, match="--preserve-thinking: the model's chat template leaves out"
    ):
        chatty(FORGETS).render(turns("", "one", "so", "two"))
