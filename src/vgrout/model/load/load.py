"""Load a model that source.py has found: frozen, checked, and under an adapter if wanted."""

from collections.abc import Set
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from vgrout.config.checks import Dtype
from vgrout.config.run import Config
from vgrout.ground import ranks
from vgrout.ground.io import Refused, one_line, out_of_memory
from vgrout.ground.machine import cores, visible
from vgrout.ground.thoughts import THINK, marks_of
from vgrout.model.load.memory import CONTEXT, USUAL, Budget, room_of, step_of
from vgrout.model.load.saved import FoundModel, Saved
from vgrout.model.load.source import (
    ANSWER,
    SVD_CACHE,
    SYSTEM,
    USER,
    configuration,
    is_small,
    model_folder,
    require_model,
    resolved_dtype,
    shapes_of,
    window_of,
)
from vgrout.model.load.trials import lean_fits, packs, require_branching, require_rows, token_bytes
from vgrout.model.logprobs import backbone, check_head, mark_foreign, tokens
from vgrout.model.policy import (
    DTYPES,
    LanguageModel,
    Policy,
    apply_template,
)
from vgrout.model.svd_adapter import SvdAdapter, cut, cuts, left_out, targets

# Nothing is fetched, and no code of a model's own is run.
LOCAL: dict[str, object] = {"local_files_only": True, "trust_remote_code": False}
# Names of the weights of text in a model that sees images too → their names in the model of text.
OF_TEXT = {
    r"^(model\.)?language_model\.lm_head": "lm_head",
    r"^(model\.)?language_model\.(model\.)?": "model.",
}

# ── for a run, for a flag


def run_policy(cfg: Config) -> Policy:
    """Load the run's model, frozen, under an adapter whose two vectors are zero.

    Raises:
        Refused: a model that this trainer cannot use; one line.
    """
    device, dtype = device_and_dtype(cfg)
    ranks.share_model(cfg.run.tensor_parallel)
    shared = ranks.shards() > 1
    policy = load_policy(cfg.model_path, device=device, dtype=dtype, shared=shared)
    # ranks that hold one model together have to do the same at once, whatever else is on their GPUs
    budgets = ranks.gather(lambda: budget_of(cfg, policy))
    return replace(
        policy,
        thinking=cfg.env.thinking,
        preserve_thinking=cfg.env.preserve_thinking,
        budget=min(budgets, key=astuple),
    )


def room_on_gpu() -> int:
    """Bytes of the GPU that this process may have: what it holds, and what is free."""
    free, _ = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved() + CONTEXT["cuda"]


def budget_of(cfg: Config, policy: LanguageModel, *, beside: int = 0, full: bool = False) -> Budget:
    """Tokens that a forward may have, and what is held beside them, in this process's memory on its device.

    beside: as of `Step`. full: all weights learn.
    """
    kind = policy.device.type
    shapes = shapes_of(policy.model.config.to_dict())
    room = room_on_gpu() if kind == "cuda" else None
    if shapes is None or (room is None and not cfg.run.memory_gib):
        return policy.budget
    step = step_of(cfg, shapes, device=kind, size=policy.model.dtype.itemsize, beside=beside)
    made = step.plan(room_of(cfg, room), full=full)
    logger.debug("\n".join(made.lines()))
    return made.budget


def run_teacher(cfg: Config, policy: Policy) -> LanguageModel | None:
    """Load the model of --teacher-model for its log-probs; None without that flag.

    No weight of it is decomposed.

    Raises:
        Refused: its tokenizer is another one than the policy's, or its head has logits for other
            tokens.
    """
    if not cfg.loss.teacher_model:
        return None
    teacher = load_language_model(
        cfg.teacher_model_path,
        device=policy.device,
        dtype=policy.model.dtype,
        flag="--teacher-model",
    )
    same_tokenizer = teacher.tokenizer_sha256 == policy.tokenizer_sha256
    if not same_tokenizer or tokens(teacher.model) != tokens(policy.model):
        raise Refused(
            f"--teacher-model {cfg.loss.teacher_model}: has another tokenizer than "
            f"--model {cfg.scale.model}, or logits for other tokens of it"
        )
    return teacher


def load_saved(saved: Saved) -> Policy:
    """Load the deployed model of a run, on a GPU where there is one.

    It is the base in the run's dtype with δS; the quarantine is zero. It is prompted as in the run.

    Raises:
        Refused: the adapter is of another model, or its numbers are not finite.
    """
    device, _ = pick_device(saved.model, "auto")
    # of the weights that it was trained on: their singular vectors, rounded to it, are its basis
    dtype = torch.bfloat16 if saved.metadata.get("dtype") == "bfloat16" else torch.float32
    policy = load_policy(saved.model, device=device, dtype=dtype)
    policy.adapter.load(saved.path)
    env = saved.cfg.env
    return replace(policy, thinking=env.thinking, preserve_thinking=env.preserve_thinking)


def load_source(
    source: FoundModel,
    flag: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    adapter: bool = False,
) -> LanguageModel:
    """Load the base with its adapter, if it has one, merged into the weights.

    It is a Policy if it has an adapter, or is to get one (`adapter`).

    Raises:
        Refused: one line: no usable model, or the adapter is of another one.
    """
    lm = load_language_model(source.folder, device=device, dtype=dtype, flag=flag)
    if source.adapter is None and not adapter:
        return lm
    policy = adapted(lm)
    if source.adapter is not None:
        policy.adapter.load(source.adapter)
    return policy


def device_and_dtype(cfg: Config) -> tuple[torch.device, torch.dtype]:
    """The device and dtype of a run's model. On a CPU it sets torch's number of threads, too."""
    if is_small(cfg.model_path):
        # Matrices of 128 × 256 lose by a second thread, by far on a machine that is shared: grading
        # has the other cores.
        usual = 1
    elif ranks.here() > 1:
        usual = max(1, cores() // ranks.here())  # a launcher of ranks sets OMP_NUM_THREADS to 1
    else:
        # torch goes by OMP_NUM_THREADS, which is 1 for each run of a sweep
        usual = max(1, min(cores(), torch.get_num_threads()))
    return pick_device(cfg.model_path, cfg.run.dtype, cfg.run.threads or usual)


def pick_device(
    model: str | Path, dtype: Dtype, threads: int = 0
) -> tuple[torch.device, torch.dtype]:
    """The GPU if there is one, else the CPU; and what `dtype` means for this model there.

    threads: of torch on a CPU; 0 leaves their number as it is.
    """
    gpu = torch.cuda.is_available()
    listed = visible()
    if gpu != bool(listed):
        said = f"GPUs {', '.join(listed)}" if listed else "no GPU"
        logger.warning(
            f"nvidia-smi lists {said}, torch {torch.__version__} sees {torch.cuda.device_count()}"
        )
    if threads and not gpu:
        torch.set_num_threads(threads)
    # torch prefers cuDNN's attention on sm_90. But cuDNN plans anew for every new length, and so
    # for every token of decoding, and its backward under a mask can give NaN (pytorch #196678).
    torch.backends.cuda.enable_cudnn_sdp(False)
    return torch.device("cuda" if gpu else "cpu"), DTYPES[resolved_dtype(dtype, model, gpu=gpu)]


# ── from files


def load_policy(
    model: str | Path,
    *,
    device: str | torch.device,
    dtype: torch.dtype,
    cache_dir: Path | None = SVD_CACHE,
    shared: bool = False,
) -> Policy:
    """As `load_language_model`, under an adapter of zeros.

    cache_dir: cache of decomposed weights, which take minutes at 4B. None: no cache.
    """
    lm = load_language_model(model, device=device, dtype=dtype, shared=shared)
    return adapted(lm, cache_dir)


def load_language_model(
    model: str | Path,
    *,
    device: str | torch.device,
    dtype: torch.dtype,
    flag: str = "--model",
    shared: bool = False,
) -> LanguageModel:
    """Load a local folder or a downloaded hub id, frozen. Nothing is fetched.

    shared: this rank holds its part alone (`Shard`).

    Raises:
        Refused: no such model here, or one this trainer cannot use; one line that says what to do.
    """
    folder = require_model(model, flag)
    device = torch.device(device)
    set_verbosity_error()  # what is wrong with a model is said in one line
    disable_progress_bar()
    try:
        tok, net = _read(folder, dtype)
        try_template(tok)
        if shared:
            cut(net)
        return as_language_model(net.to(device), tok)
    except Refused as error:
        raise Refused(
            f"{flag} {model}: no usable model in {folder} ({str(error)[:160]})"
        ) from error


def _read(folder: Path, dtype: torch.dtype) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """Tokenizer and weights: of a model that sees images too (Gemma 3, Mistral 3), those of its text.

    Raises Refused if the libraries cannot read them, or some are missing.
    """
    try:
        tok: Any = AutoTokenizer.from_pretrained(folder, **LOCAL)
        config = text_config(folder)
        architecture: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=attention(architecture, config),
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            key_mapping=OF_TEXT if "text_config" in configuration(folder) else None,
            **LOCAL,
        )
    except Exception as error:  # the libraries raise all sorts of things on damaged files
        if out_of_memory(error):
            raise
        why = one_line(error, 160) or type(error).__name__
        if "trust_remote_code" in why or "custom code" in why:
            why = "it needs code of its own, which is never run"
        raise Refused(why) from error
    net, info = loaded
    # else save_pretrained turns the new names around, which it cannot: what it writes is the model of text
    own = [c for c in net._weight_conversions or () if c.source_patterns[0] not in OF_TEXT]
    net._weight_conversions = own or None
    # transformers would go on with random numbers in their place
    for name, in_file, in_config in sorted(info["mismatched_keys"]):
        raise Refused(
            f"{name} is {tuple(in_file)} in its files and {tuple(in_config)} by config.json"
        )
    missing = sorted(info["missing_keys"])
    if missing:
        raise Refused(f"{len(missing)} weights are missing, first {missing[0]}")
    return tok, net


def text_config(folder: Path) -> PreTrainedConfig:
    """The configuration of a folder's model of text. Raises Refused where transformers has none for it."""
    config = AutoConfig.from_pretrained(folder, **LOCAL).get_text_config()
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise Refused(f"{config.model_type}: transformers has no causal model of this kind")
    return config


def attention(architecture: type[PreTrainedModel], config: PreTrainedConfig) -> str:
    """Name of the attention that transformers should use: sdpa if the architecture has it.

    sdpa would leave out a soft cap, as Gemma 2 has it. What config.json asks for is ignored: it may
    name a kernel on a hub.
    """
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    return "sdpa" if architecture._supports_sdpa and not capped else "eager"


# ── in memory


def adapted(lm: LanguageModel, cache_dir: Path | None = SVD_CACHE) -> Policy:
    """Put a model under an adapter of zeros; a warning names matrices of its blocks without one.

    Raises Refused as `SvdAdapter` and `require_rows`.
    """
    require_rows(lm.model, targets(lm.model))
    adapter = SvdAdapter(lm.model, cache_dir)
    bare = left_out(lm.model, adapter.names)
    if bare:
        kinds = {name.rpartition(".")[2] for name in adapter.names}
        logger.warning(f"adapted: {', '.join(sorted(kinds))} alone; not trained: {', '.join(bare)}")
    return Policy(**vars(lm), adapter=adapter)


def outline(folder: Path) -> tuple[list[tuple[int, int]], list[str]]:
    """What would be adapted, and what not, in a model whose weights are not read.

    Returns the shapes of the Linears that would be adapted, and the kinds of other matrices in its
    blocks, as `left_out`.

    Raises:
        Refused: as `SvdAdapter`, without a window, or with what the libraries raise on damaged
            files.
    """
    model = _without_weights(folder)
    if window_of(model.config.to_dict()) is None:
        raise Refused(f"{type(model).__name__}: names no max_position_embeddings")
    linears = targets(model)
    shapes = [(linear.out_features, linear.in_features) for linear in linears.values()]
    return shapes, left_out(model, linears)


def require_shards(cfg: Config) -> None:
    """Raises Refused, one line, where --tensor-parallel does not divide the model, or this machine's ranks."""
    n, folder = cfg.run.tensor_parallel, model_folder(cfg.model_path)
    if folder is not None:
        cuts(_without_weights(folder), n)
    if ranks.here() % n:
        raise Refused(
            f"--tensor-parallel {n}: takes a multiple of {n} processes on a machine, not {ranks.here()}; start with "
            f"`torchrun --standalone --nproc-per-node {n} -m -- vgrout.train …`, or give --tensor-parallel 1"
        )


def _without_weights(folder: Path) -> PreTrainedModel:
    """A folder's model, none of whose weights is read. Raises Refused with what the libraries raise."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(text_config(folder))
    except Exception as e:  # whatever the libraries raise
        if out_of_memory(e):
            raise
        raise Refused(one_line(e)) from e


def as_language_model(model: PreTrainedModel, tok: PreTrainedTokenizerBase) -> LanguageModel:
    """Freeze and check a model that is already in memory, and switch its dropout off.

    Raises:
        Refused: its head is more than a matrix product, no end-of-text token is named anywhere, a
            token of every prompt has no row in the embedding, no window is known, or its cache
            cannot be branched.
    """
    check_head(model.eval().requires_grad_(False))
    eos = _end_of_text(model, tok)
    window = window_of(model.config.to_dict())
    if not eos or window is None:
        raise Refused(
            f"{type(model).__name__}: names no end-of-text token, or no max_position_embeddings"
        )
    pad_id = tok.pad_token_id if tok.pad_token_id is not None else min(eos)
    end_id = turn_end(tok, eos)
    if end_id is not None:
        eos.add(end_id)
    elif tok.eos_token_id in eos:
        end_id = tok.eos_token_id
    else:
        end_id = min(eos)
    lean = lean_fits(model)
    if not lean:
        require_branching(model)
    packed = packs(model, backbone(model))
    vocabulary = tok.get_vocab()
    mark_foreign(model, vocabulary.values())  # after the trials, which compare logits
    lm = LanguageModel(
        model=model,
        tok=tok,
        eos_ids=frozenset(eos),
        end_id=end_id,
        pad_id=pad_id,
        lean=lean,
        system_role=takes_system(tok),
        preserve_thinking=False,
        thinking=False,
        marks=marks_of(str(tok.chat_template), vocabulary) or THINK,
        packs=packed,
        graphs=model.device.type == "cuda",
        budget=usual_budget(model.device),
        token_bytes=token_bytes(model),
    )
    if not lm.render([USER]):
        raise Refused(f"{type(model).__name__}: its tokenizer makes no tokens of a prompt")
    return lm


def _end_of_text(model: PreTrainedModel, tok: PreTrainedTokenizerBase) -> set[int]:
    """The end-of-text tokens that tokenizer, configuration or generation settings name."""
    eos: set[int] = set()
    named = (
        tok.eos_token_id,
        getattr(model.config, "eos_token_id", None),  # some configurations lack the attribute
        getattr(model.generation_config, "eos_token_id", None),
    )
    for ids in named:
        if isinstance(ids, list | tuple):
            eos.update(ids)
        elif ids is not None:
            eos.add(ids)
    return eos


def usual_budget(device: torch.device) -> Budget:
    """The usual budget, which on a GPU is at most half of what is free.

    An adapter's factors and merged weights may be yet to come.
    """
    if device.type == "cpu":
        return USUAL["cpu"]
    usual = USUAL["cuda"]
    free, _ = torch.cuda.mem_get_info()
    half = (free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()) // 2
    return replace(usual, activations=min(usual.activations, half), kv=min(usual.kv, half))


# ── chat templates


def try_template(tok: PreTrainedTokenizerBase) -> None:
    """Warns of a chat template that writes today's date.

    Raises:
        Refused: there is no chat template, or it fails, or leaves out a user's message.
    """
    if "(user)" not in apply_template(tok, [USER]):
        raise Refused("its chat template leaves out the user's message")
    if "strftime_now" in str(tok.chat_template):
        logger.warning(
            "the chat template reads the clock: "
            "a run that is resumed on another day has other prompts"
        )


def takes_system(tok: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template accepts a system message and keeps its text."""
    try:
        return "(sys)" in apply_template(tok, [SYSTEM, USER])
    except Refused:
        return False


def turn_end(tok: PreTrainedTokenizerBase, eos: Set[int]) -> int | None:
    """The token that the chat template writes directly after an answer; None: it writes none.

    It is one of `eos`, or another special token. It need not be the tokenizer's end of text, nor be
    in any list: Gemma's is <end_of_turn>.
    """
    try:
        text = apply_template(tok, [USER, ANSWER], prompt=False)
        after = text.rpartition(ANSWER["content"])[2].lstrip()
        ids = tok(after, add_special_tokens=False)["input_ids"]
    except Refused:
        return None
    if not ids:
        return None
    first = ids[0]
    added = tok.added_tokens_decoder.get(first)
    is_special = added is not None and added.special and after.startswith(added.content)
    return int(first) if first in eos or is_special else None
