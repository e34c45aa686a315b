"""Every model family through everything that a run does, so that no path is tried on Qwen3 alone.

Random weights, tiny sizes. With biases: Qwen 2.5. Grouped queries: all. Tied embeddings: Qwen 3 tied, Gemma. Pad token
= EOS: Llama. Templates: with thinking (Qwen 3), without, and one that refuses system messages (Gemma).
"""

import sys

import pytest
import torch
import transformers
from loguru import logger
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2ForCausalLM,
    LlamaForCausalLM,
)

import tiny
from quick import first_quick
from vgrout.config.run import Config
from vgrout.config.settings import Sampling, ScaleConfig
from vgrout.export import peft
from vgrout.export.model import load_beside, parity, write
from vgrout.ground.io import Refused
from vgrout.model.load.load import as_language_model, attention, load_language_model, load_policy
from vgrout.model.load.saved import Saved
from vgrout.model.load.source import model_folder, require_fitting, window_of
from vgrout.model.load.trials import require_rows
from vgrout.model.logprobs import completion_logprobs, pieces_of
from vgrout.model.rollout_grads import per_rollout_grads
from vgrout.model.sampling.sampler import sample
from vgrout.model.svd_adapter import targets
from vgrout.runs.plan import adapter_lines

LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
LINEAR |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "v_head_dim": 16}
LATENT |= {"qk_rope_head_dim": 16, "qk_nope_head_dim": 16}
MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "add 1 and 2"},
]
THINKS = tiny.TEMPLATE
PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}<think>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)

# family → (template, pad token, EOS ids of the configuration)
CASES = {
    "llama": (PLAIN, None, [1]),
    "gemma2": (NO_SYSTEM, "<pad>", [1, 5]),  # turns end with token 5, texts with token 1
    "qwen3-tied": (THINKS, "<pad>", [1]),
    "qwen2-bias": (PLAIN, "<pad>", [1]),
}


def tokenizer(template, pad):
    tok = tiny.tokenizer(pad)
    tok.chat_template = template
    return tok


@pytest.fixture(scope="module", params=first_quick(CASES, 2))
def family(request):
    return request.param


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory):
    """The model as a user has it: a Hugging Face folder."""
    template, pad, eos = CASES[family]
    path = tmp_path_factory.mktemp(family)
    model = tiny.tiny(family)
    model.config.eos_token_id = model.generation_config.eos_token_id = eos
    model.save_pretrained(path)
    tokenizer(template, pad).save_pretrained(path)
    return path


@pytest.fixture
def policy(folder):
    return load_policy(folder, device="cpu", dtype=torch.float32, cache_dir=None)


def logits(policy):
    with torch.no_grad():
        return policy.model(input_ids=torch.arange(2, 30)[None], use_cache=False).logits[0]


def test_prompts_and_endings_follow_the_template(family, policy):
    text = policy.prompt_text(MESSAGES)
    assert policy.render(MESSAGES) == tuple(policy.tok(text, add_special_tokens=False)["input_ids"])
    assert "be brief" in text
    assert ("<think></think>" in text) == family.startswith("qwen3")
    assert ("<system>" in text) == (not family.startswith("gemma"))
    if family.startswith("gemma"):
        assert text.startswith("<user>be brief\n\nadd 1 and 2")
    end = 5 if family.startswith("gemma") else 1
    assert policy.encode_completion("ab")[-1] == end
    assert policy.encode_completion("ab", finished=False) == policy.encode_completion("ab")[:-1]
    assert policy.decode(policy.encode_completion("ab")) == "ab"


EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
# Beside keys and values: convolutions, recurrences, gates in q_proj, latent keys, heads of two
# sizes. Blocks that flatten rows and tokens: shared experts. A factor of the logits. None: cannot be
# branched.
MIXERS = {
    "Mamba": None,
    "Lfm2": {"num_hidden_layers": 2, "full_attn_idxs": [1], "block_auto_adjust_ff_dim": False},
    "Qwen3_5": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        **LINEAR,
    },
    "DeepseekV3": {"first_k_dense_replace": 2, **LATENT},
    "Qwen2Moe": {"num_experts": 4, "shared_expert_intermediate_size": 48, **EXPERTS},
    "Ernie4_5_Moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "Afmoe": {"num_experts": 4, "num_shared_experts": 1, **EXPERTS},
    "Cohere": {"logit_scale": 0.0625},
    "Granite": {"logits_scaling": 8.0},
    "Gemma4": {
        "layer_types": ["sliding_attention", "full_attention"],
        "global_head_dim": 32,
        "vocab_size_per_layer_input": 97,
        "hidden_size_per_layer_input": 16,
    },
}


@pytest.mark.parametrize("kind", [*first_quick([*MIXERS][:4], 2), *[*MIXERS][4:]])
def test_every_kind_of_block_is_right_or_refused(kind):
    """Samples, trainer and gradients agree with a forward of each row by itself."""
    own = MIXERS[kind] if MIXERS[kind] is not None else {"hidden_size": 64, "num_hidden_layers": 2}
    given = (
        tiny.SHAPE
        if MIXERS[kind] is not None
        else {"vocab_size": 97, "max_position_embeddings": 256}
    )
    config = getattr(transformers, f"{kind}{'Text' * (kind in ('Qwen3_5', 'Gemma4'))}Config")(
        **given | own, eos_token_id=1
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    if MIXERS[kind] is None:
        with pytest.raises(ValueError, match="keeps a state that sampling cannot branch"):
            tiny.as_policy(model)
        return
    policy = tiny.as_policy(model)
    tiny.shake(policy.adapter, 0.05)
    prompts = [
        policy.render([{"role": "user", "content": content}])
        for content in ("a", "add 1 and 2", "b" * 9)
    ]
    answers = sample(policy, prompts, 4, Sampling(), 12, torch.Generator().manual_seed(0))
    for prompt, of_prompt in zip(prompts, answers, strict=True):
        completions = [a.ids for a in of_prompt]
        with torch.no_grad():
            trained = policy.logprobs([prompt] * 4, completions)[0]
        of_rows = row_gradients(policy, prompt, completions)
        for a, row, got in zip(of_prompt, trained, of_rows, strict=True):
            logp, want = by_autograd(policy, prompt, a.ids)
            assert logp == pytest.approx(a.logp, abs=1e-4)
            assert logp == pytest.approx(row[: len(a.ids)].tolist(), abs=1e-4)
            assert tiny.relative(got, want) < 1e-3


VISION = {"hidden_size": 32, "intermediate_size": 48, "image_size": 28, "patch_size": 14}
VISION |= {"num_hidden_layers": 1, "num_attention_heads": 2}
# models that see images too: the configuration of their text, and of the rest
SEEING = {
    "Gemma3": ({"layer_types": ["sliding_attention", "full_attention"]}, {"vision_config": VISION}),
    "Gemma4": (MIXERS["Gemma4"] or {}, {"vision_config": VISION | {"head_dim": 16}}),
    "Qwen2_5_VL": ({}, {}),
}


# peft asks transformers by a name that goes
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize("kind", SEEING)
def test_of_a_model_that_sees_images_too_the_text_is_loaded_and_exported(
    kind, tmp_path, monkeypatch
):
    text, rest = SEEING[kind]
    settings = tiny.SHAPE | {"eos_token_id": 1, "pad_token_id": 0} | text
    config = getattr(transformers, f"{kind}Config")(text_config=settings, **rest)
    if rest:
        model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
        model.save_pretrained(tmp_path)
    else:
        tiny.tiny("llama").save_pretrained(tmp_path)
        config.save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    if not rest:
        with pytest.raises(Refused, match="transformers has no causal model of this kind"):
            load_policy(tmp_path, device="cpu", dtype=torch.float32, cache_dir=None)
        return
    policy = load_policy(tmp_path, device="cpu", dtype=torch.float32, cache_dir=None)
    assert len(policy.adapter.names) == 14
    with torch.no_grad():
        seen = model(input_ids=torch.arange(2, 30)[None]).logits[0]
    assert torch.equal(logits(policy), seen)
    size, *_ = adapter_lines(Config(scale=ScaleConfig(model=str(tmp_path))))
    assert f"under {len(policy.adapter)} singular values" in size

    policy.model.save_pretrained(tmp_path / "text")  # what --full trains is saved so
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text").eval()
    with torch.no_grad():
        assert torch.equal(again(input_ids=torch.arange(2, 30)[None]).logits[0], seen)
    tiny.shake(policy.adapter, 0.05)
    monkeypatch.setattr(peft, "adapter_card", lambda *_: "")
    saved = Saved(tmp_path, {}, Config(), tmp_path, tmp_path)
    (tmp_path / "lora").mkdir()
    lora = peft.export(saved, policy, tmp_path / "lora", None, ["add ab"])
    assert lora.parity.holds


@pytest.mark.parametrize("order", ["some", "others"])
def test_experts_that_see_some_tokens_or_in_another_order_are_refused(order):
    model = tiny.tiny("llama")
    block = model.get_submodule("model.layers.1.mlp")
    whole = block.forward

    def some(x):
        rows = x.flatten(0, 1)
        last = len(rows) - 1
        chosen = torch.arange(last) if order == "some" else torch.arange(last, -1, -1)
        return torch.zeros_like(rows).index_copy(0, chosen, whole(rows[chosen])).view_as(x)

    block.forward = some
    with pytest.raises(Refused, match=r"LlamaForCausalLM: model.layers.1.mlp.*is not given all"):
        require_rows(model, targets(model))


def row_gradients(policy, prompt, completions):
    """∂ log-prob / ∂δS of each completion, as an update collects them."""
    n = len(completions)
    with per_rollout_grads(policy.adapter, n) as collected:
        for part, batch in policy.batches([prompt] * n, completions, range(n)):
            collected.announce(pieces_of(batch, part), batch.tokens)
            (completion_logprobs(policy.model, batch) * batch.mask).sum().backward()
    return collected.flat


def by_autograd(policy, prompt, completion):
    """A completion's log-probs and their gradient on δS, by the gradients of the weights: Uᵀ (∂L/∂W) Vhᵀ, diagonal."""
    sites = policy.adapter.sites.values()
    weights = [site.linear.weight.requires_grad_() for site in sites]
    ids = torch.tensor([[*prompt, *completion]])
    logits = policy.model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    logp = logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
    grads = torch.autograd.grad(logp.sum(), weights, materialize_grads=True, allow_unused=True)
    for weight in weights:
        weight.requires_grad_(False)
    parts = []
    for site, grad in zip(sites, grads, strict=True):
        parts.append((site.U.T @ grad @ site.Vh.T).diagonal())
    return logp.tolist(), torch.cat(parts)


@pytest.mark.parametrize("named_by", ["tokenizer", "generation settings", "nothing"])
def test_a_configuration_without_an_end_of_text_is_read(named_by, monkeypatch):
    """The attribute itself is missing, as in configurations of some architectures."""
    model, tok = tiny.tiny("llama"), tokenizer(PLAIN, "<pad>")
    del model.config.eos_token_id
    monkeypatch.delattr(type(model.config), "eos_token_id")
    model.generation_config.eos_token_id = 1 if named_by == "generation settings" else None
    if named_by != "tokenizer":
        tok.eos_token = None
    if named_by == "nothing":
        with pytest.raises(Refused, match="end-of-text"):
            as_language_model(model, tok)
        return
    assert as_language_model(model, tok).eos_ids == {1}


def test_the_turns_end_counts_though_no_list_names_it():
    """An instruct template on a base model's tokenizer: answers would run on after it."""
    model = tiny.tiny("gemma")
    model.config.eos_token_id = model.generation_config.eos_token_id = 1
    policy = tiny.as_policy(model, tokenizer(NO_SYSTEM, "<pad>"))
    assert (policy.eos_ids, policy.end_id) == (frozenset({1, 5}), 5)


PARTLY = {  # what is not among the matrices that are adapted: fused, of experts, of another name
    "Phi3": ({}, "gate_up_proj, qkv_proj"),
    "Mixtral": ({"num_local_experts": 4}, "experts.down_proj, gate, gate_up_proj"),
    "Glm4": ({}, "gate_up_proj"),
    "Lfm2": (MIXERS["Lfm2"], "conv, in_proj, out_proj, w1, w2, w3"),
}


@pytest.mark.parametrize("kind", PARTLY)
def test_what_has_no_adapter_is_named(kind, tmp_path, capsys):
    """By the plan, which reads no weights, and by the run."""
    own, bare = PARTLY[kind]
    config = getattr(transformers, f"{kind}Config")(
        **tiny.SHAPE | own, pad_token_id=0, eos_token_id=1
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    logger.remove()
    logger.add(sys.stdout, format="{message}")
    policy = tiny.as_policy(model)
    assert f"alone; not trained: {bare}" in capsys.readouterr().out
    config.architectures = [type(model).__name__]
    config.save_pretrained(tmp_path)
    size, rest = adapter_lines(Config(scale=ScaleConfig(model=str(tmp_path))))
    assert f"under {len(policy.adapter)} singular values" in size
    assert rest == f"not trained   {bare}"


def test_a_model_of_which_nothing_would_be_adapted_is_refused_by_the_plan(tmp_path):
    config = transformers.GPTNeoXConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=2)
    config.architectures = ["GPTNeoXForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="GPTNeoXForCausalLM has no Linear named down_proj"):
        adapter_lines(Config(scale=ScaleConfig(model=str(tmp_path))))
    config = transformers.GPTJConfig(n_embd=64, n_head=4, n_layer=2, rotary_dim=8)
    config.architectures = ["GPTJForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="GPTJForCausalLM: names no max_position_embeddings"):
        adapter_lines(Config(scale=ScaleConfig(model=str(tmp_path))))


def test_an_answer_keeps_its_spaces():
    """A tokenizer may ask for a clean-up that eats those before punctuation (Llama 3's did)."""
    policy = tiny.policy("llama")
    policy.tok.clean_up_tokenization_spaces = True
    policy.tok.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    ids = policy.encode(text := "return ' '.join(xs) , x .")
    assert policy.tok.decode(ids) != text
    assert policy.decode(ids) == text


@pytest.mark.parametrize(("pad", "padded"), [("<pad>", "ab"), (None, "<pad>a<pad>b")])
def test_an_answer_shows_its_special_tokens_but_those_that_end_or_pad_it(pad, padded):
    """A thought between special tokens that is not finished is no answer yet."""
    policy = tiny.policy("llama", pad=pad)
    for written, shown in (
        ("<think>ab</think>cd<eos>", "<think>ab</think>cd"),
        ("<think>ab", "<think>ab"),
        ("<pad>a<pad>b<eos>", padded),
        ("<user>a<assistant>", "<user>a<assistant>"),
        ("<eos>", ""),
    ):
        assert policy.decode(policy.encode(written)) == shown
        assert policy.decode(policy.encode(shown)) == shown


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0 + i for i in range(8)],
}


@pytest.mark.parametrize("named", ["in the model", "in the parameters"])
def test_no_row_of_a_longrope_model_changes_the_rotation_of_another(named, tmp_path):
    """Beyond the first set's length one long row would turn all rows of its forward."""
    settings = {**tiny.SHAPE, "eos_token_id": 1, "pad_token_id": 0}
    if named == "in the model":
        settings["original_max_position_embeddings"] = 64
        model = transformers.Phi3ForCausalLM(
            transformers.Phi3Config(**settings, rope_parameters=LONGROPE)
        )
    else:
        rope = LONGROPE | {"original_max_position_embeddings": 64}
        model = LlamaForCausalLM(transformers.LlamaConfig(**settings, rope_parameters=rope))
    policy = tiny.as_policy(model.eval())
    assert policy.window == 64
    prompt, answer = tuple(range(2, 12)), (5, 6, 7)

    def beside(length):
        """Log-probs of the answer beside a row of so many tokens."""
        long = tuple(7 * i % 90 + 2 for i in range(length - len(prompt)))
        return policy.logprobs([prompt, prompt], [answer, long])[0][0, :3]

    alone = policy.logprobs([prompt], [answer])[0][0]
    assert torch.allclose(beside(64), alone, atol=1e-5)
    assert not torch.allclose(beside(65), alone, atol=1e-2), "the window is no smaller than it must"
    model.save_pretrained(tmp_path)
    message = {"role": "user", "content": "hello"}
    require_fitting([[message]], tmp_path, 63, "p.jsonl")
    with pytest.raises(Refused, match="window holds 64 tokens"):
        require_fitting([[message]], tmp_path, 64, "p.jsonl")


@pytest.mark.parametrize(
    ("config", "window"),
    [
        ({"max_position_embeddings": 9}, 9),
        ({"original_max_position_embeddings": 5, "max_position_embeddings": 9}, 9),
        ({"rope_parameters": {"rope_type": "longrope"}}, 9),
        ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 5}}, 5),
        (
            {
                "rope_parameters": {
                    "full_attention": {
                        "rope_type": "longrope",
                        "original_max_position_embeddings": 5,
                    },
                    "sliding_attention": {"rope_type": "default"},
                }
            },
            5,
        ),
    ],
)
def test_windows(config, window):
    if "rope_parameters" in config or "rope_scaling" in config:
        config = {"max_position_embeddings": 9} | config
    assert window_of(config) == window


def test_the_exported_folder_is_the_deployed_model(policy, tmp_path):
    tiny.shake(policy.adapter, 0.05)
    with policy.adapter.deployed():
        deployed = logits(policy)
    trained = logits(policy)
    write(policy, tmp_path / "m", torch.float32)
    assert torch.equal(logits(policy), trained), "the policy is left as it was"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype="auto")
    tied = policy.model.get_output_embeddings().weight is policy.model.get_input_embeddings().weight
    assert (loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight) == tied
    with torch.no_grad():
        got = loaded.eval()(input_ids=torch.arange(2, 30)[None], use_cache=False).logits[0]
    assert torch.equal(got, deployed)
    texts = ["hello there", "1 + 2 = 3"]
    result = parity(policy, load_beside(policy, tmp_path / "m"), texts, exact=True)
    assert result.holds, result
    assert not parity_with_base(policy, tmp_path / "m", texts).holds, "the comparison can fail"
    assert AutoTokenizer.from_pretrained(tmp_path / "m").get_vocab() == policy.tok.get_vocab()


def parity_with_base(policy, folder, texts):
    with torch.no_grad():
        policy.adapter.δS.mul_(-3)
    policy.adapter.merge()
    return parity(policy, load_beside(policy, folder), texts, exact=False)


# ── loading


def test_which_attention(monkeypatch):
    assert attention(LlamaForCausalLM, transformers.LlamaConfig()) == "sdpa"
    # of some versions of transformers
    monkeypatch.setattr(Gemma2ForCausalLM, "_supports_sdpa", True)
    capped = attention(Gemma2ForCausalLM, transformers.Gemma2Config())
    assert capped == "eager", "sdpa leaves the soft cap out"


def test_a_downloaded_hub_id_is_a_folder(tmp_path, monkeypatch):
    """The hub's cache: models--ORG--NAME/refs/main names the snapshot that holds the files."""
    cache = tmp_path / "models--org--name"
    snapshot = cache / "snapshots" / "abc"
    source = tiny.policy("llama")
    source.model.save_pretrained(snapshot)
    source.tok.save_pretrained(snapshot)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert model_folder("org/name") == snapshot
    assert load_language_model("org/name", device="cpu", dtype=torch.float32).eos_ids == frozenset(
        {1}
    )
    assert model_folder("org/other") is None
