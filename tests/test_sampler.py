"""Sampling: the distribution, the bookkeeping, and that no lever (dropping, sharing, the lean decoder) changes it."""

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessorList
from transformers.generation.logits_process import (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import tiny
from vgrout.config.sampling import Sampling
from vgrout.iterative_dpo import main as iterative_dpo
from vgrout.model import decoder, sampler, sampling
from vgrout.model import policy as policies
from vgrout.model.decoder import HfDecoder, LeanDecoder, lean_fits
from vgrout.model.policy import Policy, load_policy
from vgrout.model.sampler import draw, placed, sample
from vgrout.model.sampling import candidates, support
from vgrout.teacher.__main__ import main as teacher
from vgrout.tools.substrate import main as substrate
from vgrout.train import main as train
from vgrout.types import Completion

PROMPTS = ((2, 79, 76, 83, 1, 4), (9,), (2, 40, 41, 42, 43, 44, 45, 46, 1, 4))
FAMILIES = ["qwen3", "llama", "qwen2-bias", "gemma2"]


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def run(
    policy: Policy, n: Any = 5, sampling: Sampling | None = None, max_new: int = 30, **kw: Any
) -> list[list[Completion]]:
    return sample(policy, PROMPTS, n, sampling or Sampling(), max_new, stream(), **kw)


def tokens(answers: list[list[Completion]]) -> list[list[tuple[int, ...]]]:
    return [[a.ids for a in of_prompt] for of_prompt in answers]


def flat(answers: list[list[Completion]]) -> list[Completion]:
    return [a for of_prompt in answers for a in of_prompt]


# ── levers change nothing ───────────────────────────────────────────────────────────────────────────────────────────


def test_sampling_in_turns_changes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny.policy()
    at_once = run(policy, [4, 0, 5])
    row = sampler.KV_BUDGET["cpu"] // sampler.rows_at_once(policy, 10 + 30)
    monkeypatch.setitem(sampler.KV_BUDGET, "cpu", 2 * row + 1)
    assert sampler.rows_at_once(policy, 10 + 30) == 2
    assert tokens(run(policy, [4, 0, 5])) == tokens(at_once)


@pytest.mark.parametrize("family", FAMILIES)
def test_dropping_finished_rows_changes_no_token(family: str) -> None:
    policy = tiny.policy(family)
    dropped, kept = run(policy, 7), run(policy, 7, drop_finished=False)
    lengths = {len(a.ids) for of_prompt in dropped for a in of_prompt}
    assert len(lengths) > 2, "rows end at different times, or nothing was dropped"
    assert tokens(dropped) == tokens(kept)
    for a, b in zip(flat(dropped), flat(kept), strict=True):
        assert a.logp_full == pytest.approx(b.logp_full, abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_with_the_same_tokens_so_far_are_computed_once(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers' tree, node by node: as many slots a step as there are prefixes; the answers are those without it."""
    policy, widths = tiny.policy(family), []
    kind = HfDecoder if family == "gemma2" else LeanDecoder
    step = kind.step
    monkeypatch.setattr(kind, "step", lambda self, tokens: widths.append(len(tokens)) or step(self, tokens))
    few = Sampling(temperature=0.2, top_k=2)
    together = run(policy, 9, few, max_new=20)
    shared, widths[:] = list(widths), []
    apart = run(policy, 9, few, max_new=20, share_prefixes=False)
    assert tokens(together) == tokens(apart)
    for a, b in zip(flat(together), flat(apart), strict=True):
        assert a.logp_full == pytest.approx(b.logp_full, abs=1e-5)
        assert a.logp_sampled == pytest.approx(b.logp_sampled, abs=1e-5)
    open_at = [
        {(p, a.ids[: t + 1]) for p, of in enumerate(together) for a in of if len(a.ids) > t + 1}
        for t in range(len(shared))
    ]
    if policy.lean:  # transformers' cache is copied whole when a slot leaves: a few stay that nobody reads
        assert shared == [len(nodes) for nodes in open_at]
    assert sum(shared) < 0.9 * sum(widths), "they do begin alike, or nothing was tested"


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2-bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", ["small", "large", "large, no oneDNN"])
def test_the_lean_decoder_computes_what_transformers_does(
    family: str, dtype: torch.dtype, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of prefill and ten steps; slots branch, swap places and leave on the way; two prompts end."""
    monkeypatch.setattr(decoder, "SMALL", 2**26 if size == "small" else 0)
    monkeypatch.setattr(decoder, "READ_CPU", 12 if size == "large" else 512)  # prompts one by one, or all at once
    if size == "large, no oneDNN":  # has no bf16 on a CPU without AVX-512
        monkeypatch.setattr(decoder, "_prepacks", lambda _: False)
    model = tiny.tiny(family, dtype=dtype)
    moves = {0: [0, 2, 1, 0, 2, 2], 4: [0, 5, 2, 3], 6: [1, 0, 0], 8: [2, 1, 2, 1]}
    noise = torch.randint(1, 97, (10, 6), generator=stream())
    decoders = HfDecoder(model), LeanDecoder(model)
    with torch.no_grad():
        logits = [d.prefill(PROMPTS, 6, 20) for d in decoders]
        for t in range(10):
            want, got = logits
            # fp32: order of summation; bf16: every product is rounded to 2^-9
            assert (got - want).abs().max() <= want.abs().max() * {2: 5e-2, 4: 1e-5}[dtype.itemsize]
            for d in decoders:
                d.keep(moves.get(t, range(len(want))))
            logits = [d.step(noise[t, : len(moves.get(t, want))]) for d in decoders]


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2-bias"])
@pytest.mark.parametrize("large", [False, True])
def test_lean_policy_samples_the_same_tokens(family: str, large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "SMALL", 0 if large else 2**26)
    policy = tiny.policy(family)
    assert policy.lean
    assert tokens(run(policy)) == tokens(run(replace(policy, lean=False)))


def test_lean_decoder_is_used_only_where_it_is_right(warnings: list[str]) -> None:
    assert not tiny.policy("gemma2").lean
    assert not tiny.policy("gemma").lean
    assert warnings == [], "known to be another architecture: nothing to say"
    odd = tiny.tiny("qwen3")
    vars(odd.get_submodule("model.layers.1.self_attn"))["scaling"] = 0.4  # not what the configuration says
    assert lean_fits(odd), "the block's own scale is read"
    odd.get_submodule("model.layers.0.mlp").act_fn = torch.nn.GELU()
    assert not lean_fits(odd)
    assert "disagrees" in warnings[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rounding_over_many_blocks_is_no_disagreement(dtype: torch.dtype) -> None:
    model = LlamaForCausalLM(LlamaConfig(**tiny.SHAPE | {"num_hidden_layers": 30})).to(dtype).eval()
    made = policies.as_language_model(model, tiny.tokenizer())
    assert made.lean
    assert made.packs


def test_a_prompt_is_prefilled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny.policy()
    batches: list[tuple[int, ...]] = []
    policy.model.register_forward_pre_hook(
        lambda _m, _a, kw: batches.append(tuple(kw["input_ids"].shape)), with_kwargs=True
    )
    run(policy, 8)
    assert batches == [(3, 10)], "one forward of the three prompts; the lean decoder does the rest"


# ── distribution ────────────────────────────────────────────────────────────────────────────────────────────────────

SETTINGS = [
    Sampling(),
    Sampling(temperature=1.0, top_k=0),
    Sampling(temperature=1.7, top_k=0, top_p=0.6),
    Sampling(temperature=0.5, top_k=9, top_p=0.9),
]


def warped(logits: Tensor, s: Sampling) -> Tensor:
    """What transformers samples from: its processors in its order."""
    steps: list[Any] = [TemperatureLogitsWarper(s.temperature)]
    steps += [TopKLogitsWarper(s.top_k)] if s.top_k else []
    steps += [TopPLogitsWarper(s.top_p)] if s.top_p < 1 else []
    no_ids = torch.zeros(len(logits), 0, dtype=torch.long)
    return LogitsProcessorList(steps)(no_ids, logits.clone())  # ty: ignore[invalid-argument-type]


@pytest.mark.parametrize("s", SETTINGS)
@pytest.mark.parametrize("V", [97, sampling.WIDE])
def test_truncated_distribution_is_the_librarys(s: Sampling, V: int) -> None:
    logits = 3 * torch.randn(50, V, generator=stream())
    want = warped(logits, s).softmax(-1)
    values, ids = candidates(logits, s)
    ids = torch.arange(V).expand(50, V) if ids is None else ids
    got = torch.zeros(50, V).scatter(1, ids, values.softmax(-1))
    assert torch.allclose(got, want, atol=1e-6)
    assert torch.equal(support(logits, s), want > 0)


@pytest.mark.parametrize("k", [1, 20, 1000])
def test_the_largest_of_a_wide_row_are_topks(k: int) -> None:
    logits = torch.randn(3, sampling.WIDE, generator=stream()).bfloat16()  # with many equals
    values, ids = sampling.largest(logits, k)
    assert torch.equal(values, logits.topk(k).values)
    assert torch.equal(values, logits.gather(1, ids))
    assert all(len(set(row)) == k for row in ids.tolist())


def test_draw_is_the_inverse_cdf() -> None:
    """A fine grid of noise reproduces the probabilities; its ends stay inside the support."""
    logits = torch.tensor([[0.5, -1.0, 2.0, 0.0, 1.0]])
    s = Sampling(temperature=0.8, top_k=3)
    u = torch.cat([(torch.arange(20_000) + 0.5) / 20_000, torch.tensor([0.0, 1 - 2**-24])])
    drawn, logp = draw(logits.expand(len(u), 5), u, s)
    p = torch.tensor([0.5, -math.inf, 2.0, -math.inf, 1.0]).div(0.8).softmax(-1)
    share = torch.bincount(drawn, minlength=5) / len(u)
    assert torch.allclose(share, p, atol=2e-4)
    assert torch.allclose(logp.exp(), p[drawn], atol=1e-6)


def test_draw_never_leaves_the_support_at_the_end_of_the_noise() -> None:
    """fp32 sums of many small probabilities fall short of 1 or pass it: the last candidate may have probability 0."""
    logits = torch.randn(64, 5000, generator=stream())
    u = torch.full((64,), 1 - 2**-24)
    s = Sampling(temperature=1.0, top_k=0, top_p=0.5)
    drawn, logp = draw(logits, u, s)
    assert logp.isfinite().all()
    assert support(logits, s).gather(1, drawn[:, None]).all()


def test_greedy() -> None:
    policy = tiny.policy()
    answers = run(policy, 2, Sampling(temperature=0.0), max_new=6)
    for prompt, (a, b) in zip(PROMPTS, answers, strict=True):
        ids = list(prompt)
        for token in a.ids:
            assert token == int(policy.model(torch.tensor([ids])).logits[0, -1].argmax())
            ids.append(token)
        assert a == b
        assert set(a.logp_sampled) == {0.0}


def test_first_tokens_follow_the_models_distribution() -> None:
    policy = tiny.policy()
    s = Sampling(temperature=1.0, top_k=0)
    (answers,) = sample(policy, PROMPTS[:1], 4000, s, 1, stream())
    p = policy.model(torch.tensor([PROMPTS[0]])).logits[0, -1].softmax(-1)
    counts = Counter(a.ids[0] for a in answers)
    chi2 = sum((counts[i] - 4000 * float(q)) ** 2 / (4000 * float(q)) for i, q in enumerate(p))
    # 96 degrees of freedom: mean 96, standard deviation 14; five of them
    assert chi2 < 96 + 5 * 14


# ── bookkeeping ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_answers_end_with_eos_or_are_cut() -> None:
    policy = tiny.policy(pad=None)
    assert policy.pad_id in policy.eos_ids, "pad == eos must work"
    answers = flat(run(policy, 12, max_new=20))
    assert {a.finished for a in answers} == {True, False}
    for a in answers:
        assert (a.ids[-1] in policy.eos_ids) == a.finished
        assert not any(t in policy.eos_ids for t in a.ids[:-1])
        assert a.finished or len(a.ids) == 20
        assert len(a.ids) == len(a.logp_full) == len(a.logp_sampled)
        assert a.text == policy.tok.decode(list(a.ids), skip_special_tokens=True)
        assert all(f <= 0 and s <= 0 for f, s in zip(a.logp_full, a.logp_sampled, strict=True))


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_the_callback_comes_once_per_row_as_it_ends(family: str) -> None:
    policy = tiny.policy(family)
    seen: dict[tuple[int, int], Completion] = {}
    lengths: list[int] = []

    def on_finish(p: int, i: int, answer: Completion) -> None:
        assert (p, i) not in seen
        seen[p, i] = answer
        lengths.append(len(answer.ids))

    answers = run(policy, [3, 0, 4], on_finish=on_finish)
    assert seen == {(p, i): a for p, of_prompt in enumerate(answers) for i, a in enumerate(of_prompt)}
    assert [len(a) for a in answers] == [3, 0, 4]
    assert lengths == sorted(lengths), "in the order in which they end"
    assert run(policy, 0) == [[], [], []]


def test_the_stream_alone_decides() -> None:
    policy = tiny.policy()
    torch.manual_seed(1)
    a = run(policy)
    torch.manual_seed(2)
    assert a == run(policy), "the global generator is not read"
    assert tokens(a) != tokens(sample(policy, PROMPTS, 5, Sampling(), 30, stream(1)))


def test_each_call_sees_the_adapters_present_view() -> None:
    policy = tiny.policy()
    base = run(policy)
    with torch.no_grad():
        policy.adapter.δS.normal_(0, 0.3, generator=stream())
    policy.adapter.merge()
    moved = run(policy)
    assert tokens(moved) != tokens(base)
    with policy.adapter.reference():
        assert run(policy) == base
    assert run(policy) == moved


def test_children_stay_where_their_parent_was() -> None:
    assert placed([0, 2, 3]) == [0, 2, 1]
    assert placed([0, 0, 3]) == [0, 1, 2]
    assert placed([2, 4]) == [0, 1]
    assert placed([]) == []
    noise = stream()
    for n in range(1, 9):
        parents = torch.randint(0, 9, (n,), generator=noise).tolist()
        slots = placed(parents)
        assert sorted(slots) == list(range(n))
        stayed = {slot for slot, parent in zip(slots, parents, strict=True) if slot == parent}
        assert stayed == {parent for parent in parents if parent < n}


@pytest.mark.parametrize(
    "bad", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -1}, {"top_p": 0.5, "temperature": 0.0}]
)
def test_settings_out_of_range_or_not_read_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad)).replace("_", "-")):
        Sampling(**bad)


@pytest.mark.parametrize("greedy", [["--temperature", "0"], ["--top-k", "1"]])
@pytest.mark.parametrize(
    ("main", "argv"),
    [
        (train, ["smoke"]),
        (teacher, ["--model", "organism"]),
        (substrate, ["--model", "organism"]),
        (iterative_dpo, ["--base-model", "organism", "--output-dir", "out"]),
    ],
)
def test_equal_answers_are_refused(
    main: Any, argv: list[str], greedy: list[str], tmp_path: Any, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*argv, *greedy]) == 2
    error = capsys.readouterr().err
    assert " ".join(greedy) in error
    assert "all answers to a prompt would be the same" in error
    assert list(tmp_path.iterdir()) == []


def test_nobody_samples_by_settings_of_his_own() -> None:
    """Whoever samples is given the run's settings. MiniLLM's expectations are over the whole distribution; the
    organism's shipped files have the usual settings."""
    source = Path(sampling.__file__).parents[1]
    made = {str(f.relative_to(source)) for f in source.rglob("*.py") if "Sampling(" in f.read_text(encoding="utf-8")}
    assert made == {"imitation/distill_methods.py", "imitation/distill_config.py", "organism/build.py"}


# ── policy ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_render_is_the_chat_template_with_thinking_off() -> None:
    policy = tiny.policy()
    ids = policy.render([{"role": "system", "content": "a"}, {"role": "user", "content": "bc"}])
    text = "<system>a<eos><user>bc<eos><assistant><think></think>"
    assert policy.tok.decode(list(ids)) == text
    assert policy.decode([*ids, 1]) == "abc"
    assert policy.window == 256


def test_load_from_a_folder_is_the_same_policy(tmp_path: Path) -> None:
    policy = tiny.policy()
    policy.model.save_pretrained(tmp_path / "m")
    policy.tok.save_pretrained(tmp_path / "m")
    loaded = load_policy(tmp_path / "m", device="cpu", dtype=torch.float32, cache_dir=tmp_path / "svd")
    assert loaded.model.config._attn_implementation == "sdpa"
    assert loaded.eos_ids == policy.eos_ids == frozenset({1})
    assert loaded.pad_id == policy.pad_id == 0
    assert not loaded.model.training
    assert tokens(run(loaded)) == tokens(run(policy))
    assert not any(p.requires_grad for p in loaded.model.parameters())


@pytest.mark.parametrize("name", ["absent", "empty"])
def test_missing_model_is_one_line(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="give a Hugging Face model folder") as error:
        load_policy(tmp_path / name, device="cpu", dtype=torch.float32, cache_dir=None)
    assert "\n" not in str(error.value)


# ── conversations ───────────────────────────────────────────────────────────────────────────────────────────────────

# What published templates do with the think blocks of earlier answers, in their own words in miniature.
STRIPS = (  # Qwen 3: earlier thoughts are cut out; thinking off opens an empty block
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if not enable_thinking %}<think></think>{% endif %}{% endif %}"
)
OPENS = (  # DeepSeek R1: the template itself opens the block, always
    "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1].strip() }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>{% endif %}"
)
PLAIN = (  # Llama 3: knows of no thinking
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FORGETS = "<user>{{ messages[-1].content }}<eos><assistant>"


def chatty(template: str, preserve: bool = True) -> Policy:
    policy = replace(tiny.policy(), preserve_thinking=preserve)
    policy.tok.chat_template = template
    return policy


def turns(*contents: str) -> list[dict[str, str]]:
    roles = ["system", *["user", "assistant"] * len(contents)]
    return [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]


@pytest.mark.parametrize("template", [tiny.TEMPLATE, STRIPS, OPENS, PLAIN])
def test_a_conversation_extends_every_earlier_prompt_and_answer(template: str) -> None:
    """Answers as sampled with thinking off, ids that the tokenizer itself would never give among them."""
    policy = chatty(template)
    ids: tuple[int, ...] = ()
    sampled: list[tuple[int, ...]] = []
    messages = turns("be brief", "one")
    for answer, question in (("so", "two"), ("it</think> is", "three"), ("", "four")):
        prompt = policy.render(messages, sampled)
        assert prompt[: len(ids)] == ids
        raw = (*policy.tok(answer, add_special_tokens=False)["input_ids"], 6, 5)  # "</think><think>" as tokens
        ids = (*prompt, *raw, 1)  # what was sampled, end token included
        sampled.append(raw)
        messages += turns("", "", policy.decode(raw), question)[2:]
    last = policy.render(messages, sampled)
    assert last[: len(ids)] == ids
    assert "four" in policy.tok.decode(list(last))


@pytest.mark.parametrize("template", [tiny.TEMPLATE, STRIPS, OPENS, PLAIN])
def test_earlier_thoughts_are_kept_once_and_whole(template: str) -> None:
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


def test_one_question_is_rendered_the_same_either_way() -> None:
    for template in (tiny.TEMPLATE, STRIPS, OPENS, PLAIN):
        messages = turns("be brief", "one")
        assert chatty(template).render(messages) == chatty(template, preserve=False).render(messages)


def test_a_template_that_forgets_is_refused() -> None:
    with pytest.raises(ValueError, match="--preserve-thinking: the model's chat template leaves out"):
        chatty(FORGETS).render(turns("", "one", "so", "two"))
    assert chatty(FORGETS).render(turns("", "one"))
