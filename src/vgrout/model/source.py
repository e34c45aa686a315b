"""What a --model flag names: the organism, a folder, a hub id, or an adapter over one of them; where it lies, its
shapes, and every check that needs no loading. Torch-free. Nothing is fetched here: that is
`python -m vgrout.download`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

from vgrout.config.checks import Dtype
from vgrout.config.run import ORGANISM, Config, from_dict
from vgrout.data import organism
from vgrout.files import file_sha256, from_json, read_text, regular

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tiktoken.model")
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # layers that are adapted
TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model's configuration says; None: nothing, or not under the usual name."""

    window: int | None  # longest prompt + completion, tokens
    blocks: int | None


def model_folder(model: str | Path) -> Path | None:
    """The folder of a local model, or the cached snapshot of a hub id; None: not on this machine. No network."""
    if Path(model).is_dir():
        return Path(model) if (Path(model) / "config.json").is_file() else None
    from huggingface_hub import try_to_load_from_cache  # 0.3 s of CPU, for nothing but a hub id
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(str(model), "config.json")
    except HFValidationError:  # neither a folder nor a possible id
        return None
    return Path(config).parent if isinstance(config, str) else None


def require_model(model: str | Path, flag: str = "--model") -> Path:
    """The same folder, after a check that its files are complete.

    Raises:
        ValueError: one line that says what is wrong and what to run: there is no such model here; no configuration,
            tokenizer, chat template or weights in it; or weights that are cut short.
    """
    if (folder := model_folder(model)) is not None:
        _check(folder, model, flag)
        return folder
    if Path(model).is_dir():
        raise ValueError(f"{flag} {model}: a folder without config.json; give a Hugging Face model folder")
    if looks_like_path(model):
        raise ValueError(f"{flag} {model}: no such folder; give a Hugging Face model folder, or a hub id")
    raise ValueError(
        f"{flag} {model}: not on this machine; run `vgrout download model {model}` where there is a network, "
        "or give a local folder"
    )


def looks_like_path(model: str | Path) -> bool:
    """Whether this is no hub id, NAME or OWNER/NAME: nothing that could be downloaded."""
    return isinstance(model, Path) or Path(model).exists() or not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", model)


def advice(model: str | Path) -> str:
    """What to do about a model that cannot be used: a local folder, or a download."""
    return "give a whole model folder" if looks_like_path(model) else f"run `vgrout download model {model}` again"


def configuration(folder: Path) -> dict[str, Any]:
    """A model's config.json. Raises ValueError, one line, where it cannot be read."""
    config = from_json(read_text(folder / "config.json"), str(folder / "config.json"))
    if not isinstance(config, dict):
        raise ValueError(f"{folder / 'config.json'}: is no JSON object")
    return config


def model_facts(folder: Path) -> ModelFacts:
    """The facts of the model in this folder. Raises ValueError, one line, where its config.json cannot be read."""
    config = configuration(folder)
    inner = config.get("text_config")

    def number(name: str) -> int | None:
        value = (inner if isinstance(inner, dict) else config).get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    return ModelFacts(number("max_position_embeddings"), number("num_hidden_layers"))


def safetensors_head(path: Path, flag: str) -> dict[str, Any]:
    """The head of a safetensors file: tensor → dtype, shape, data_offsets; and `__metadata__`.

    Raises:
        ValueError: one line: it cannot be read, is none, or is cut short.
    """
    try:
        with open(path, "rb", opener=regular) as f:
            size, there = int.from_bytes(f.read(8), "little"), path.stat().st_size
            if there < 8 or size > there - 8:
                raise ValueError("cut short")
            head = from_json(f.read(size), "its head", is_line=True)
            tensors = [t for name, t in head.items() if name != "__metadata__"] if isinstance(head, dict) else [None]
            if not all(isinstance(t, dict) and isinstance(t.get("shape"), list) and "dtype" in t for t in tensors):
                raise ValueError("its head is no table of tensors")
            end = max((t["data_offsets"][1] for name, t in head.items() if name != "__metadata__"), default=0)
            if 8 + size + end != there:
                raise ValueError(f"cut short: {there} bytes, its head speaks of {8 + size + end}")
    except (OSError, ValueError, KeyError, TypeError, IndexError) as e:
        raise ValueError(f"{flag} {path}: not a readable safetensors file ({e})") from None
    return head


def _check(folder: Path, model: str | Path, flag: str) -> None:
    """Raises ValueError, one line, at the first file that is missing, cut short, or does not fit the others."""

    def wrong(why: str) -> ValueError:
        return ValueError(f"{flag} {model}: {why}; {advice(model)}")

    if odd := [p.name for p in folder.iterdir() if p.exists() and not (p.is_file() or p.is_dir())]:
        raise wrong(f"{odd[0]} is not a regular file")
    try:
        config, tokens = configuration(folder), _largest_token(folder)
        settings = folder / "tokenizer_config.json"
        tokenizer = from_json(read_text(settings), str(settings)) if settings.is_file() else {}
        if not isinstance(tokenizer, dict):
            raise ValueError(f"{settings}: is no JSON object")
    except ValueError as e:
        raise wrong(str(e)) from None
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise wrong(f"no tokenizer in it ({TOKENIZERS[0]})")
    if not tokenizer.get("chat_template") and not any((folder / t).exists() for t in TEMPLATES):
        raise ValueError(f"{flag} {model}: its tokenizer has no chat template; choose an instruct model")
    single = folder / "model.safetensors"
    if single.is_file():
        weights = safetensors_head(single, flag)
    elif (index := folder / "model.safetensors.index.json").is_file():
        shards = from_json(read_text(index), f"{flag} {index}")
        named = shards.get("weight_map", {}) if isinstance(shards, dict) else {}
        if not isinstance(named, dict) or not named:
            raise wrong(f"{index.name} names no file")
        weights = {}
        for name in sorted({*map(str, named.values())}):
            if not (folder / name).is_file() or Path(name).name != name:
                raise wrong(f"no {name}, which {index.name} names")
            weights |= safetensors_head(folder / name, flag)
    elif any(folder.glob("*.bin*")):
        raise ValueError(
            f"{flag} {model}: its weights are pickled (.bin), which can run code; save them as safetensors"
        )
    else:
        raise wrong("no weights in it (model.safetensors)")
    if why := _misfit(config, tokens, {name: t for name, t in weights.items() if name != "__metadata__"}):
        raise wrong(why)


def _largest_token(folder: Path) -> int:
    """The largest id in tokenizer.json; -1 without that file. Raises ValueError, one line, where it cannot be read."""
    if not (file := folder / "tokenizer.json").is_file():
        return -1
    try:
        data = from_json(read_text(file), str(file))
        vocabulary = data["model"]["vocab"]
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        return max([*ids, *(token["id"] for token in data.get("added_tokens", ()))])
    except (KeyError, TypeError, AttributeError):
        raise ValueError(f"{file}: is no tokenizer") from None


def _misfit(config: dict[str, Any], largest_token: int, weights: Mapping[str, Any]) -> str:
    """What in a model's files does not fit this program or each other; "": nothing that shows without loading it."""
    if config.get("quantization_config"):
        return "its weights are quantised, which cannot be trained; give the full ones"
    kind = config.get("model_type")
    if not isinstance(kind, str):
        return "config.json names no model_type"
    if odd := {t["dtype"] for t in weights.values()} - {"F64", "F32", "F16", "BF16"}:
        return f"its weights are {min(odd)}, not floating-point numbers"
    if not any(name.endswith(f".{target}.weight") for name in weights for target in TARGETS):
        return f"unsupported architecture {kind!r}: it has no layer named {' or '.join(TARGETS)}"
    for name in SIZES:
        if (size := config.get(name)) is not None and not (type(size) is int and size > 0):
            return f"config.json has {name} {size!r}"
    shapes = shapes_of(config)
    layers = {int(m[1]) for name in weights if (m := re.search(r"\.layers\.(\d{1,9})\.", name))}
    if shapes is None:
        return ""
    if len(layers) != shapes.layers or max(layers) >= shapes.layers:
        return f"config.json has {shapes.layers} layers, the weights {len(layers)}"
    expected = shapes.linears | {"embed_tokens": (shapes.vocab, shapes.hidden)}
    for name, tensor in weights.items():
        needed = expected.get(name.removesuffix(".weight").rpartition(".")[2]) if name.endswith(".weight") else None
        if needed and tensor["shape"] != [*needed]:
            return f"{name} has shape {tensor['shape']}, config.json asks for {[*needed]}"
    if largest_token >= shapes.vocab:
        return f"its tokenizer has token {largest_token}, its embedding {shapes.vocab} rows"
    return ""


# ── shapes ───────────────────────────────────────────────────────────────────────────────────────────────────────────

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
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
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
        return self.layers * sum(a * b for a, b in self.linears.values())

    @property
    def parameters(self) -> int:
        """All weights but norms and biases (under a thousandth)."""
        return self.adapted + self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def R(self) -> int:
        """Σ r, the size of δS."""
        return self.layers * sum(map(min, self.linears.values()))

    @property
    def factors(self) -> int:
        """Entries of every U and Vh."""
        return self.layers * sum((a + b) * min(a, b) for a, b in self.linears.values())

    def svd_cache_bytes(self, itemsize: int) -> int:
        """U and Vh in the weights' dtype, S in fp32."""
        return self.factors * itemsize + self.R * FP32

    def kv_bytes(self, itemsize: int) -> int:
        """Keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize

    def activation_bytes(self, itemsize: int) -> int:
        """What autograd keeps of one token for a backward through frozen weights, the adapted Linears' inputs included.

        Counted from the Qwen3 of transformers: two norms (their input in fp32), the inputs of q/k/v and gate/up;
        queries and keys before their norms (fp32), queries, keys, values, what attention returns, the input of o;
        gate, its silu, up, and the input of down.
        """
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = (
            self.hidden * (2 * FP32 + 2 * itemsize)
            + q * (FP32 + 3 * itemsize)
            + kv * (FP32 + 2 * itemsize)
            + self.mlp * 4 * itemsize
        )
        return self.layers * layer


SIZES = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"),
    *("num_key_value_heads", "head_dim"),  # which may be left out
)

# Public facts, so that a plan needs no download.
KNOWN = {"Qwen/Qwen3-4B": Shapes(36, 2560, 9728, 32, 8, 128, 151_936, tied=True)}


def shapes_of(config: Mapping[str, Any]) -> Shapes | None:
    """Shapes from a config.json; None where it does not name the usual sizes, or has experts."""
    if config.get("num_experts") or config.get("num_local_experts"):
        return None
    sizes: list[Any] = [config.get(name) for name in SIZES]
    layers, d, mlp, heads, vocab, kv_heads, head_dim = sizes
    if not all(type(size) is int and size > 0 for size in (layers, d, mlp, heads, vocab)):
        return None
    tied = bool(config.get("tie_word_embeddings", False))
    return Shapes(layers, d, mlp, heads, kv_heads or heads, head_dim or d // heads, vocab, tied)


def find_shapes(model: str | Path) -> Shapes | None:
    """Shapes of a local folder, a downloaded hub id, or a model that is known by name; None of any other."""
    folder = model_folder(model)
    if folder is not None:
        try:
            return shapes_of(configuration(folder))
        except (OSError, ValueError):
            return None
    return KNOWN.get(str(model))


# ── a flag's value ───────────────────────────────────────────────────────────────────────────────────────────────────

CPUINFO = Path("/proc/cpuinfo")
SMALL = 2**24  # weights below which a model is a miniature: other defaults, and a second thread only costs


def is_small(model: str | Path) -> bool:
    """Whether a folder or hub id is a miniature; False where its shapes are not known."""
    shapes = find_shapes(model)
    return shapes is not None and shapes.parameters < SMALL


def resolved_dtype(dtype: Dtype, model: str | Path, *, gpu: bool) -> Literal["fp32", "bf16"]:
    """What --dtype means for this model here. On a CPU a miniature keeps fp32, whose numbers are exact."""
    if dtype != "auto":
        return dtype
    return "bf16" if gpu or (cpu_multiplies_bf16() and not is_small(model)) else "fp32"


def cpu_multiplies_bf16() -> bool:
    """Whether this CPU has AVX-512 BF16 or AMX; without them bf16 is slower than fp32. Linux alone says so."""
    return CPUINFO.is_file() and re.search(r"\b(avx512_bf16|amx_bf16)\b", CPUINFO.read_text()) is not None


@dataclass(frozen=True)
class Source:
    """A model that was found and checked, not loaded."""

    given: str
    name: str  # of the base: "organism", a hub id or a folder
    folder: Path  # where the base lies
    adapter: Path | None  # .safetensors
    cfg: Config | None  # of the run that trained the adapter

    @property
    def shapes(self) -> Shapes | None:
        """None where its configuration does not name the usual sizes."""
        return find_shapes(self.folder)

    @property
    def small(self) -> bool:
        """Whether it is a miniature; False where its shapes are not known."""
        return is_small(self.folder)

    def vocabulary(self) -> dict[str, int] | None:
        """Token → id, from the tokenizer's file alone; None where there is no such file."""
        file = self.folder / "tokenizer.json"
        return Tokenizer.from_file(str(file)).get_vocab() if file.is_file() else None

    def identity(self) -> dict[str, str | None]:
        """Name of the base and sha256 of the adapter's file, for a run's records."""
        return {"base": self.name, "adapter": file_sha256(self.adapter) if self.adapter else None}


def find_source(given: str, flag: str) -> Source:
    """The model that `given`, the value of `flag`, names.

    Raises:
        ValueError: one line: nothing of that name here, or not a model or an adapter of this program.
    """
    path = Path(given)
    adapter = path / "train.safetensors" if path.is_dir() and not (path / "config.json").is_file() else path
    if given != ORGANISM and adapter.suffix == ".safetensors":
        if not adapter.is_file():
            raise ValueError(f"{flag} {given}: neither a model folder nor a run with train.safetensors in it")
        metadata = read_metadata(adapter, flag)
        if "cfg" not in metadata:
            raise ValueError(f"{flag} {given}: {adapter.name} is not an adapter saved by a run; give a run directory")
        cfg = from_dict(from_json(metadata["cfg"], where := f"{flag} {adapter}", is_line=True), where)
        own = cfg.scale.model if cfg.scale.organism is None else cfg.model_path
        base = find_source(own, f"{flag} {given}: its base")
        return Source(given, base.name, base.folder, adapter, cfg)
    if given == ORGANISM:
        organism.EMBEDDED.require_sound(f"{flag} organism:")
    folder = require_model(organism.MODEL_DIR if given == ORGANISM else given, flag)
    return Source(given, given, folder, None, None)


def read_metadata(path: Path, flag: str) -> dict[str, str]:
    """The string metadata in the head of a safetensors file. Raises ValueError, one line, where it is none."""
    metadata = safetensors_head(path, flag).get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{flag} {path}: its metadata is no table of texts")
    return metadata
