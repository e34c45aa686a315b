"""Weights: a model that model/source.py has found, loaded, frozen, checked; under an adapter where one is wanted."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Set
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from loguru import logger
from torch import Tensor
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

from vgrout import ranks
from vgrout.cli import out_of_memory
from vgrout.config.checks import Dtype
from vgrout.config.run import Config
from vgrout.cores import cores
from vgrout.errors import Refused
from vgrout.gpus import visible
from vgrout.model import template_probe
from vgrout.model.attention import kernel_name
from vgrout.model.logprobs import backbone, check_head, mark_foreign, tokens
from vgrout.model.memory import CONTEXT, USUAL, Budget, plan_of
from vgrout.model.policy import DTYPES, LanguageModel, Policy, apply_template
from vgrout.model.source import (
    SVD_CACHE,
    FoundModel,
    Saved,
    advice,
    is_small,
    require_model,
    resolved_dtype,
    shapes_of,
    tokenizing,
)
from vgrout.model.svd_adapter import SvdAdapter, left_out, targets
from vgrout.model.template_probe import ANSWER, BYTES, SECONDS, SYSTEM, USER
from vgrout.model.trials import lean_fits, packs, require_branching

# ── of a run, of a flag


def run_policy(cfg: Config) -> Policy:
    """The run's model, frozen, under an adapter whose two vectors are zero.

    Raises:
        Refused: a model that this trainer cannot use; one line.
    """
    device, dtype = device_and_dtype(cfg)
    policy = load_policy(cfg.model_path, device=device, dtype=dtype, cache_dir=SVD_CACHE)
    if cfg.loss.drops and cfg.loss.ratio_support == "full":
        s = cfg.sampling
        logger.info(
            f"sampled at temperature {s.temperature:g}, top-k {s.top_k}, top-p {s.top_p:g}; {cfg.loss.loss} compares "
            "full softmaxes at temperature 1 (--ratio-support sampled: what was sampled from)"
        )
    return replace(
        policy, preserve_thinking=cfg.env.preserve_thinking, budget=budget_of(cfg, policy)
    )


def budget_of(cfg: Config, policy: LanguageModel, **more: Any) -> Budget:
    """What this process may have on its device, less what stands there. more: of `plan_of`."""
    kind, shapes, room = policy.device.type, shapes_of(policy.model.config.to_dict()), None
    if kind == "cuda":
        room = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() + CONTEXT[kind]
    if shapes is None or (room is None and not cfg.run.memory_gib):
        return policy.budget
    made = plan_of(cfg, shapes, device=kind, size=policy.model.dtype.itemsize, room=room, **more)
    logger.debug("\n".join(made.lines()))
    return made.budget


def run_teacher(cfg: Config, policy: Policy) -> LanguageModel | None:
    """The model of --teacher-model, for its log-probs alone: no weight of it is decomposed. None without one.

    Raises:
        Refused: its tokenizer is another one than the policy's, or its head has no logits for some of the tokens.
    """
    if not cfg.loss.teacher_model:
        return None
    device, dtype = policy.device, policy.model.dtype
    teacher = load_language_model(
        cfg.teacher_model_path, device=device, dtype=dtype, flag="--teacher-model"
    )
    if teacher.tokenizer_sha256 != policy.tokenizer_sha256 or tokens(teacher.model) != tokens(
        policy.model
    ):
        raise Refused(
            f"--teacher-model {cfg.loss.teacher_model}: has another tokenizer than --model {cfg.scale.model}, or "
            "logits for other tokens of it"
        )
    return teacher


def load_saved(saved: Saved) -> Policy:
    """The deployed model: the base in the run's dtype, on a GPU where there is one, δS loaded, the quarantine zero; it
    is prompted as it was in the run.

    Raises:
        Refused: the adapter is of another model, or no numbers are in it.
    """
    device, _ = pick_device(saved.model, "auto")
    policy = load_policy(saved.model, device=device, dtype=saved.dtype, cache_dir=SVD_CACHE)
    policy.adapter.load(saved.path)
    return replace(policy, preserve_thinking=saved.cfg.env.preserve_thinking)


def load_source(
    source: FoundModel,
    flag: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    adapter: bool = False,
) -> LanguageModel:
    """The base with its adapter merged into the weights; a Policy where it has an adapter or is to get one (`adapter`).

    Raises:
        Refused: one line: no usable model, or the adapter is of another one.
    """
    lm = load_language_model(source.folder, device=device, dtype=dtype, flag=flag)
    if source.adapter is None and not adapter:
        return lm
    policy = adapted(lm, SVD_CACHE)
    if source.adapter is not None:
        policy.adapter.load(source.adapter)
    return policy


def device_and_dtype(cfg: Config) -> tuple[torch.device, torch.dtype]:
    """Where the run's model is, and in which dtype."""
    # Matrices of 128 × 256 lose by a second thread, by far on a machine that is shared: grading has
    # the other cores. torch goes by OMP_NUM_THREADS, which is 1 for each run of a sweep; a launcher
    # of ranks sets it for other reasons.
    of_rank = cores() // ranks.here() if ranks.here() > 1 else min(cores(), torch.get_num_threads())
    usual = 1 if is_small(cfg.model_path) else max(1, of_rank)
    return pick_device(cfg.model_path, cfg.run.dtype, cfg.run.threads or usual)


def pick_device(
    model: str | Path, dtype: Dtype, threads: int = 0
) -> tuple[torch.device, torch.dtype]:
    """The GPU if there is one, else the CPU with so many threads (0: as they are); `dtype` as it is meant there."""
    gpu = torch.cuda.is_available()
    if gpu != bool(visible()):
        said = f"GPUs {', '.join(visible())}" if visible() else "no GPU"
        logger.warning(
            f"nvidia-smi lists {said}, torch {torch.__version__} sees {torch.cuda.device_count()}"
        )
    if threads and not gpu:
        torch.set_num_threads(threads)
    # cuDNN plans anew for every new length, a token of decoding included, and its backward under a
    # mask can give NaN (pytorch #196678); torch puts it first on sm_90
    torch.backends.cuda.enable_cudnn_sdp(False)
    return torch.device("cuda" if gpu else "cpu"), DTYPES[resolved_dtype(dtype, model, gpu=gpu)]


# ── from files


def load_policy(
    model: str | Path, *, device: str | torch.device, dtype: torch.dtype, cache_dir: Path | None
) -> Policy:
    """As `load_language_model`, under an adapter of zeros. cache_dir: of decomposed weights (minutes at 4B); None: no
    cache."""
    return adapted(load_language_model(model, device=device, dtype=dtype), cache_dir)


def load_language_model(
    model: str | Path, *, device: str | torch.device, dtype: torch.dtype, flag: str = "--model"
) -> LanguageModel:
    """Load a local folder or a downloaded hub id, frozen. Nothing is fetched.

    Raises:
        Refused: no such model here, or one this trainer cannot use; one line that says what to do.
    """
    folder, device = require_model(model, flag), torch.device(device)
    set_verbosity_error()  # what is wrong with a model is said in one line
    if not sys.stderr.isatty():
        disable_progress_bar()
    here: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}

    def unusable(why: str, then: str = "") -> Refused:
        return Refused(f"{flag} {model}: no usable model in {folder} ({why}){then}")

    try:
        tok: Any = AutoTokenizer.from_pretrained(folder, **here)
        try_template(tok)
        config = AutoConfig.from_pretrained(folder, **here)
        architecture: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=attention(device, dtype, architecture, config),
            use_safetensors=True,
            output_loading_info=True,
            **here,
        )
        loaded, info = loaded
        # transformers would go on with random numbers in their place
        if missing := sorted(info["missing_keys"]):
            raise Refused(f"{len(missing)} weights are missing, first {missing[0]}")
    except (KeyboardInterrupt, SystemExit):
        raise
    # whatever the libraries raise on damaged files: a panic is no Exception
    except BaseException as error:
        if out_of_memory(error):
            raise
        why = " ".join(str(error).split())[:160] or type(error).__name__
        if "trust_remote_code" in why or "custom code" in why:
            why = "it needs code of its own, which is never run"
        raise unusable(why, f"; {advice(model)}") from error
    net = loaded.to(device)
    if broken := [name for name, p in net.named_parameters() if not p.isfinite().all()]:
        raise unusable(f"{broken[0]} holds a NaN or an infinity", f"; {advice(model)}")
    try:
        return as_language_model(net, tok)
    except Refused as error:  # its files are whole; any other exception is a fault
        raise unusable(str(error)[:160]) from error


def attention(
    device: torch.device,
    dtype: torch.dtype,
    architecture: type[PreTrainedModel],
    config: PreTrainedConfig,
) -> str:
    """flash-attention 2 on CUDA in half precision, where the package is installed, else sdpa wherever the
    architecture has it and no soft cap (Gemma 2's), which sdpa leaves out. Never what config.json asks for: it may
    name a kernel on a hub."""
    if kernel_name(device, dtype) == "flash_attn":
        return "flash_attention_2"
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    return "sdpa" if architecture._supports_sdpa and not capped else "eager"


# ── in memory


def adapted(lm: LanguageModel, cache_dir: Path | None) -> Policy:
    """The same model under an adapter of zeros; a warning names matrices of its blocks that have none. Raises
    Refused as `SvdAdapter`."""
    adapter = SvdAdapter(lm.model, cache_dir)
    if bare := left_out(lm.model, adapter.names):
        kinds = {name.rpartition(".")[2] for name in adapter.names}
        logger.warning(f"adapted: {', '.join(sorted(kinds))} alone; not trained: {', '.join(bare)}")
    return Policy(**vars(lm), adapter=adapter)


def outline(folder: Path) -> tuple[list[tuple[int, int]], list[str]]:
    """Of a model whose weights are not read: the shapes of the Linears that would be adapted, and what else its blocks
    hold of matrices.

    Raises:
        Refused: as `SvdAdapter`; or with what the libraries raise on damaged files.
    """
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as e:  # whatever the libraries raise
        raise Refused(" ".join(str(e).split())) from e
    linears = targets(model)
    return [(m.out_features, m.in_features) for m in linears.values()], left_out(model, linears)


def as_language_model(model: PreTrainedModel, tok: PreTrainedTokenizerBase) -> LanguageModel:
    """A model that is already in memory, frozen, without dropout, and checked.

    Raises:
        Refused: its head is more than a matrix product, no end-of-text token is named anywhere, a token of every
            prompt has no row in the embedding, no window is known, or its cache cannot be branched.
    """
    check_head(model.eval().requires_grad_(False))
    eos: set[int] = set()
    for source in (
        tok.eos_token_id,
        model.config.eos_token_id,
        getattr(model.generation_config, "eos_token_id", None),
    ):
        eos |= (
            set(source)
            if isinstance(source, list | tuple)
            else {source}
            if source is not None
            else set()
        )
    if any(type(token) is not int for token in eos):
        raise Refused(f"{type(model).__name__}: its end-of-text tokens are no numbers: {eos}")
    if not eos or not isinstance(getattr(model.config, "max_position_embeddings", None), int):
        raise Refused(
            f"{type(model).__name__}: names no end-of-text token, or no max_position_embeddings"
        )
    rows = int(cast(Tensor, model.get_input_embeddings().weight).shape[0])
    text = apply_template(tok, [USER])
    with tokenizing("its tokenizer"):
        prompt = tok(text, add_special_tokens=False)["input_ids"]
    pad_id = tok.pad_token_id if tok.pad_token_id is not None else min(eos)
    given = sorted([*eos, *prompt, pad_id])
    if strange := [token for token in (given[0], given[-1]) if not 0 <= token < rows]:
        raise Refused(
            f"{type(model).__name__}: it would be given token {strange[0]}, its embedding has "
            f"{rows} rows"
        )
    end = turn_end(tok, eos)
    eos_ids = frozenset(eos if end is None else {*eos, end})
    if not (lean := lean_fits(model)):
        require_branching(model)
    packed = packs(model, backbone(model))
    mark_foreign(model, tok.get_vocab().values())  # after the trials, which compare logits
    return LanguageModel(
        model=model,
        tok=tok,
        eos_ids=eos_ids,
        end_id=end
        if end is not None
        else tok.eos_token_id
        if tok.eos_token_id in eos_ids
        else min(eos_ids),
        pad_id=pad_id,
        lean=lean,
        system_role=takes_system(tok),
        preserve_thinking=False,
        packs=packed,
        graphs=model.device.type == "cuda",
        budget=usual_budget(model.device),
    )


def usual_budget(device: torch.device) -> Budget:
    """Of a GPU at most half of what is free: an adapter's factors and merged weights may be yet to come."""
    if device.type == "cpu":
        return USUAL["cpu"]
    half = (
        torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    ) // 2
    return replace(
        USUAL["cuda"],
        activations=min(USUAL["cuda"].activations, half),
        kv=min(USUAL["cuda"].kv, half),
    )


# ── chat templates


def try_template(tok: PreTrainedTokenizerBase) -> None:
    """Raises Refused where there is no chat template, or one that does not end, fails, or leaves out a user's
    message; warns of one that writes today's date."""
    text = (
        tok.chat_template if isinstance(tok.chat_template, str) else json.dumps(tok.chat_template)
    )
    if not ends(text):
        raise Refused(f"its chat template takes more than {SECONDS} s or {BYTES >> 30} GiB")
    if "(user)" not in apply_template(tok, [USER]):
        raise Refused("its chat template leaves out the user's message")
    if "strftime_now" in text:
        logger.warning(
            "the chat template reads the clock: a run that is resumed on another day has other prompts"
        )


@cache
def ends(template: str) -> bool:
    """Whether a template comes to its end, tried in a process of its own."""
    command = [sys.executable, "-I", template_probe.__file__]
    try:
        return (
            subprocess.run(command, input=template.encode(), timeout=10 * SECONDS).returncode == 0
        )
    except subprocess.TimeoutExpired:
        return False


def takes_system(tok: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template accepts a system message and keeps its text."""
    try:
        return "(sys)" in apply_template(tok, [SYSTEM, USER])
    except Refused:
        return False


def turn_end(tok: PreTrainedTokenizerBase, eos: Set[int]) -> int | None:
    """The token of `eos`, or else the special one, that the template writes directly after an answer: it need not be
    the tokenizer's end of text (Gemma: <end_of_turn>), nor be in any list. None: it writes none."""
    with contextlib.suppress(Refused):
        after = apply_template(tok, [USER, ANSWER], prompt=False).rpartition("(answer)")[2].lstrip()
        ids = tok(after, add_special_tokens=False)["input_ids"]
        special = {
            i: token.content for i, token in tok.added_tokens_decoder.items() if token.special
        }
        if ids and (ids[0] in eos or (ids[0] in special and after.startswith(special[ids[0]]))):
            return int(ids[0])
    return None
