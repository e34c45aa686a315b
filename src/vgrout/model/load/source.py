"""Find the model that a --model flag names, and say its sizes, window and dtype without loading it.

A flag names the organism, a folder, a hub id, or an adapter over one of them.
Torch-free. Nothing is fetched here: that is `vgrout download`.
"""

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

from jinja2.sandbox import ImmutableSandboxedEnvironment
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from vgrout.config.checks import Dtype
from vgrout.ground.data import Message
from vgrout.ground.io import Json, Refused, from_json, none_fits, once, one_line, read_text, regular
from vgrout.ground.thoughts import THINK, Marks, marks_of, opens

SVD_CACHE = Path("out/svd_cache")  # decomposed weights: minutes at 4B
# Architectures whose blocks are those of `Shapes`.
LLAMAS = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
)
# Names of the Linears that are adapted.
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def model_folder(model: str | Path) -> Path | None:
    """The folder of a local model, or of a hub id's cached snapshot.

    None: not on this machine. The network is not asked.
    """
    if Path(model).is_dir():
        return Path(model) if (Path(model) / "config.json").is_file() else None
    from huggingface_hub import errors, try_to_load_from_cache  # 0.3 s of CPU, for a hub id alone

    try:
        config = try_to_load_from_cache(str(model), "config.json")
    except errors.HFValidationError:  # neither a folder nor a possible id
        return None
    return Path(config).parent if isinstance(config, str) else None


@once
def require_model(model: str | Path, flag: str = "--model") -> Path:
    """The same folder, after a check of its files.

    Raises:
        Refused: one line that says what is wrong and what to run: no such model here, no
            configuration, or weights that are missing, cut short, pickled or quantised. What else a
            model needs shows when it is loaded.
    """
    folder = model_folder(model)
    if folder is not None:
        _check(folder, model, flag)
        return folder
    if Path(model).is_dir():
        why = "a folder without config.json; give a Hugging Face model folder"
    elif Path(model).suffix == ".gguf":
        why = f"no model folder; `vgrout download gguf {model}` makes one of it, once"
    elif Path(model).is_file():
        why = "a file; give the folder of a Hugging Face model"
        if Path(model).suffix == ".safetensors":
            why += "; of an adapter that was trained here, `vgrout export` makes one"
    elif looks_like_path(model):
        why = "no such model; give a Hugging Face model folder, or a hub id"
    else:
        why = (
            f"not on this machine; run `vgrout download model {model}` where there is a network, "
            "or give a local folder"
        )
    raise Refused(f"{flag} {model}: {why}")


def looks_like_path(model: str | Path) -> bool:
    """Whether this cannot be a hub id, NAME or OWNER/NAME, so that nothing could be downloaded."""
    if isinstance(model, Path) or Path(model).exists():
        return True
    return not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", model)


def advice(model: str | Path) -> str:
    """What to do about a model that cannot be used, for the end of an error message."""
    if looks_like_path(model):
        return "give a whole model folder"
    return f"run `vgrout download model {model}` again"


def configuration(folder: Path) -> dict[str, object]:
    """Read a model's config.json. Raises Refused, one line, where it cannot be read."""
    return _json_object(folder / "config.json")


def window_of(config: Mapping[str, object]) -> int | None:
    """Longest prompt + completion, in tokens, for which a model's numbers depend on a row alone.

    It is what the model was built for. But "longrope" has two sets of rotation factors, and the
    longest row of a forward decides which set all of its rows get, and keys that lie in a cache:
    the window of such a model ends where the first set does.

    None: no window is named.
    """
    window = config.get("max_position_embeddings")
    if type(window) is not int:
        return None
    rope = config.get("rope_parameters") or config.get("rope_scaling")  # the older name
    if not isinstance(rope, Mapping):
        return window
    for of_layers in (rope, *rope.values()):  # some models name parameters by kinds of layers
        if not isinstance(of_layers, Mapping):
            continue
        kind = of_layers.get("rope_type") or of_layers.get("type")
        first_set = config.get("original_max_position_embeddings")
        first_set = first_set or of_layers.get("original_max_position_embeddings")
        if kind in ("longrope", "su") and type(first_set) is int:
            window = min(window, first_set)
    return window


def require_fitting(
    prompts: Sequence[Sequence[Message]], folder: Path, max_new: int, source: str
) -> None:
    """Raises Refused, one line, if no prompt fits the window of the model in this folder.

    Only the tokens of a prompt's messages are counted; the template adds some. source: where the
    prompts come from, for the message.
    """
    config = configuration(folder)
    of_text = config.get("text_config")
    window = window_of(of_text if isinstance(of_text, dict) else config)
    if window is not None and window <= max_new:
        raise Refused(
            f"--max-new {max_new}: the model's window holds {window} tokens, prompt included"
        )
    tokenizer = read_tokenizer(folder)
    if not prompts or window is None or tokenizer is None:
        return
    room = window - max_new
    for messages in prompts:  # as a rule the first one fits
        lengths = [len(tokenizer.encode(message["content"]).ids) for message in messages]
        if sum(lengths) <= room:
            return
    raise none_fits(source, room)


def read_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a model folder's tokenizer.json; None: it has no such file.

    The file may keep the padding and the truncation of the tokenizer's last call, which would
    change every length: both are switched off.

    Raises:
        Refused: it cannot be read.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    at = file.stat()
    return _tokenizer(file, at.st_size, at.st_mtime_ns)


@lru_cache(maxsize=2)  # reading takes up to half a second, and checks ask for it several times
def _tokenizer(file: Path, size: int, mtime_ns: int) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as e:  # the library raises no other type
        raise Refused(f"{file}: is no usable tokenizer ({one_line(e, 160)})") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def safetensors_head(path: Path, flag: str) -> tuple[dict[str, list[int]], dict[str, str]]:
    """Every tensor's shape, and the metadata, of a safetensors file. No tensor is read.

    Raises:
        Refused: one line: the file cannot be read, is not a safetensors file, or is cut short.
    """
    try:
        with open(path, "rb", opener=regular), safe_open(path, framework="np") as file:
            shapes: dict[str, list[int]] = {}
            for name in file.keys():  # noqa: SIM118
                shapes[name] = file.get_slice(name).get_shape()
            return shapes, dict(file.metadata() or {})
    except (OSError, SafetensorError) as e:
        raise Refused(f"{flag} {path}: not a readable safetensors file ({e})") from None


def _check(folder: Path, model: str | Path, flag: str) -> None:
    """Raises Refused, one line, for a folder whose files run code, are torn, or hold no weights."""

    def wrong(why: str) -> Refused:
        return Refused(f"{flag} {model}: {why}; {advice(model)}")

    if configuration(folder).get("quantization_config"):
        raise wrong("its weights are quantised, which cannot be trained; give the full ones")
    files = {"model.safetensors"}
    if not (folder / "model.safetensors").is_file():
        weight_map = _json_object(folder / "model.safetensors.index.json").get("weight_map")
        files = {*weight_map.values()} if isinstance(weight_map, dict) else set()
    if not files:
        raise wrong(
            "no model.safetensors in it; pickled weights (.bin) can run code: "
            "save them as safetensors"
        )
    for name in files:
        safetensors_head(folder / str(name), flag)
    try:
        why = _tokenizer_fault(folder)
    except Refused as e:
        why = str(e)
    if why:
        raise wrong(why)


# Files of which one is a whole tokenizer. transformers makes an empty one where there is none.
TOKENIZERS = ("tokenizer.json", "*.model", "*.tiktoken", "tekken.json", "vocab.txt")
# Some of them transformers passes over, without a word, where they cannot be read.
SETTINGS = (
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)


def _tokenizer_fault(folder: Path) -> str:
    """What is wrong with the files of a folder's tokenizer, or "".

    Raises:
        Refused: one of them cannot be read.
    """
    found = any(list(folder.glob(name)) for name in TOKENIZERS)
    if not found and not all((folder / name).is_file() for name in ("vocab.json", "merges.txt")):
        return "no tokenizer.json in it"
    if not (folder / "tokenizer_config.json").is_file():  # it names the special tokens
        return "no tokenizer_config.json in it"
    for name in SETTINGS:
        _json_object(folder / name)
    read_tokenizer(folder)
    if not _chat_templates(folder):
        return "no chat template in it (chat_template.jinja, or in tokenizer_config.json)"
    return ""


def _chat_templates(folder: Path) -> list[str]:
    """A folder's chat templates: as a rule one."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return [read_text(file)]
    found: Json = _json_object(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(found, str):
        return [found]
    if isinstance(found, list):
        return [str(named) for named in found]
    return list(map(read_text, folder.glob("additional_chat_templates/*.jinja")))


# Messages on which a chat template is tried.
SYSTEM: Message = {"role": "system", "content": "(sys)"}
USER: Message = {"role": "user", "content": "(user)"}
ANSWER: Message = {"role": "assistant", "content": "(answer)"}


def require_thinking(folder: Path) -> None:
    """Raises Refused, one line, if a folder's chat template has no thoughts to switch on.

    Or if nothing tells between which marks its model thinks. Several templates are not tried.
    """
    templates = _chat_templates(folder)
    tokenizer = read_tokenizer(folder)
    tokens = {} if tokenizer is None else tokenizer.get_vocab()
    marks = marks_of("".join(templates), tokens)
    if len(templates) == 1 and not knows_thoughts(templates[0], marks or THINK):
        raise Refused(
            f"--thinking: the chat template of {folder} does not know enable_thinking, the prompt is "
            "the same with it and without; leave the flag out, or choose a model with thoughts"
        )
    if marks is None:
        raise Refused(
            f"--thinking: neither the chat template nor the tokenizer of {folder} has marks of a "
            "thought that are known here (as <think> and </think>), so thoughts would be graded; "
            "leave the flag out, or choose a model that thinks between known marks"
        )


def knows_thoughts(template: str, marks: Marks) -> bool:
    """Whether a template writes another prompt where thoughts are asked for, or opens one anyway.

    True of a template that fails, which shows where it is used.
    """
    like_transformers = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    like_transformers.filters["tojson"] = lambda value, **_: json.dumps(value)
    # a tag that transformers alone knows
    text = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)
    prompts: list[str] = []
    try:
        for thinking in (False, True):
            prompts.append(
                like_transformers.from_string(text).render(
                    messages=[USER],
                    add_generation_prompt=True,
                    enable_thinking=thinking,
                    strftime_now=time.strftime,
                )
            )
    except Exception:  # a template is a program, and may raise anything
        return True
    return prompts[0] != prompts[1] or opens(prompts[1], marks)


def _json_object(file: Path) -> dict[str, object]:
    """A JSON object; empty if there is no such file. Raises Refused where it cannot be read."""
    if not file.is_file():
        return {}
    data = from_json(read_text(file), str(file))
    if not isinstance(data, dict):
        raise Refused(f"{file}: is no JSON object")
    return data


# ── sizes, and the dtype

BF16, FP32 = 2, 4  # bytes
ITEMSIZE = {"bf16": BF16, "fp32": FP32}


@dataclass(frozen=True, slots=True)
class Shapes:
    """A decoder of the Llama family: attention with grouped queries, a gated MLP, no experts."""

    layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool  # the head is the embedding

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """One layer's adapted Linears: name → (d_out, d_in)."""
        q = self.heads * self.head_dim
        kv = self.kv_heads * self.head_dim
        return {
            "q_proj": (q, self.hidden),
            "k_proj": (kv, self.hidden),
            "v_proj": (kv, self.hidden),
            "o_proj": (self.hidden, q),
            "gate_proj": (self.mlp, self.hidden),
            "up_proj": (self.mlp, self.hidden),
            "down_proj": (self.hidden, self.mlp),
        }

    @property
    def adapted(self) -> int:
        """Weights in adapted Linears."""
        return self.layers * sum(d_out * d_in for d_out, d_in in self.linears.values())

    @property
    def parameters(self) -> int:
        """All weights but norms and biases (under a thousandth)."""
        embedding = self.vocab * self.hidden
        head = 0 if self.tied else embedding
        return self.adapted + embedding + head

    @property
    def R(self) -> int:
        """Σ r, the size of δS."""
        return self.layers * sum(map(min, self.linears.values()))

    def part(self, n: int) -> "Shapes":
        """What one of n ranks has that hold a model together: some heads, some of the MLP.

        Raises:
            Refused: n does not divide a size.
        """
        sizes = {"heads": self.heads, "key/value heads": self.kv_heads}
        for what, size in (sizes | {"width": self.hidden, "MLP's width": self.mlp}).items():
            if size % n:
                raise Refused(f"--tensor-parallel {n}: does not divide the model's {what}, {size}")
        return replace(self, heads=self.heads // n, kv_heads=self.kv_heads // n, mlp=self.mlp // n)

    @property
    def factors(self) -> int:
        """Entries of every U and Vh."""
        return self.layers * sum(sum(shape) * min(shape) for shape in self.linears.values())

    def svd_cache_bytes(self, itemsize: int) -> int:
        """Bytes of U and Vh in the weights' dtype, and of S in fp32."""
        return self.factors * itemsize + self.R * FP32

    def kv_bytes(self, itemsize: int) -> int:
        """Bytes of the keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize

    def activation_bytes(self, itemsize: int) -> int:
        """Bytes that autograd keeps of one token for a backward through frozen weights.

        The inputs of the adapted Linears are included. Counted from the Qwen3 of transformers: two
        norms (their input in fp32), the inputs of q/k/v and gate/up; queries and keys before their
        norms (fp32), queries, keys, values, what attention returns, the input of o; gate, its silu,
        up, and the input of down.
        """
        q = self.heads * self.head_dim
        kv = self.kv_heads * self.head_dim
        layer = (
            self.hidden * (2 * FP32 + 2 * itemsize)
            + q * (FP32 + 3 * itemsize)
            + kv * (FP32 + 2 * itemsize)
            + self.mlp * 4 * itemsize
        )
        return self.layers * layer


# Keys of a config.json that give the first sizes of `Shapes`; two more may be left out.
SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
)


# Public facts, so that a plan needs no download.
KNOWN = {
    "Qwen/Qwen3-0.6B": Shapes(28, 1024, 3072, 16, 8, 128, 151_936, tied=True),
    "Qwen/Qwen3-1.7B": Shapes(28, 2048, 6144, 16, 8, 128, 151_936, tied=True),
    "Qwen/Qwen3-4B": Shapes(36, 2560, 9728, 32, 8, 128, 151_936, tied=True),
    "Qwen/Qwen3-8B": Shapes(36, 4096, 12288, 32, 8, 128, 151_936, tied=False),
    "Qwen/Qwen3-14B": Shapes(40, 5120, 17408, 40, 8, 128, 151_936, tied=False),
    "Qwen/Qwen3-32B": Shapes(64, 5120, 25600, 64, 8, 128, 151_936, tied=False),
    "meta-llama/Llama-3.3-70B-Instruct": Shapes(80, 8192, 28672, 64, 8, 128, 128_256, tied=False),
}


def shapes_of(config: Mapping[str, Json]) -> Shapes | None:
    """Shapes from a config.json; None where it does not name the usual sizes, or has experts."""
    if config.get("num_experts") or config.get("num_local_experts"):
        return None
    sizes: list[Json] = [config.get(name) for name in SIZES]
    layers, hidden, mlp, heads, vocab = sizes
    kv_heads = config.get("num_key_value_heads")
    head_dim = config.get("head_dim")
    for size in (*sizes, kv_heads or 1, head_dim or 1):
        if type(size) is not int or size <= 0:
            return None
    return Shapes(
        layers=layers,
        hidden=hidden,
        mlp=mlp,
        heads=heads,
        kv_heads=kv_heads or heads,
        head_dim=head_dim or hidden // heads,
        vocab=vocab,
        tied=bool(config.get("tie_word_embeddings", False)),
    )


@once
def find_shapes(model: str | Path) -> Shapes | None:
    """Shapes of a local folder, a downloaded hub id, or a model known by name. None: of another."""
    folder = model_folder(model)
    try:
        if folder is not None:
            config: Json = configuration(folder)
            return shapes_of(config.get("text_config") or config)
    except (OSError, Refused):
        return None
    return KNOWN.get(str(model))


CPUINFO = Path("/proc/cpuinfo")


# A model with fewer weights is a miniature: it has other defaults, and a second thread only costs.
MINIATURE_BELOW = 2**24


def is_small(model: str | Path) -> bool:
    """Whether a folder or hub id is a miniature; False where its shapes are not known."""
    shapes = find_shapes(model)
    return shapes is not None and shapes.parameters < MINIATURE_BELOW


def resolved_dtype(dtype: Dtype, model: str | Path, *, gpu: bool) -> Literal["fp32", "bf16"]:
    """What --dtype means for this model here.

    On a CPU a miniature keeps fp32, whose numbers are exact.
    """
    if dtype != "auto":
        return dtype
    if gpu or (cpu_multiplies_bf16() and not is_small(model)):
        return "bf16"
    return "fp32"


def cpu_multiplies_bf16() -> bool:
    """Whether this CPU has AVX-512 BF16 or AMX; without them bf16 is slower than fp32.

    Only Linux says so.
    """
    if not CPUINFO.is_file():
        return False
    return re.search(r"\b(avx512_bf16|amx_bf16)\b", CPUINFO.read_text()) is not None
