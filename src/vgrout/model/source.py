"""What a --model flag names: the organism, a folder, a GGUF file, a hub id, or an adapter over one; where it lies, its
shapes, and what can be said of it without loading it. Torch-free. Nothing is fetched here: that is
`python -m vgrout.download`."""

import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from vgrout import embedded as organism
from vgrout.config.checks import Dtype
from vgrout.config.run import ORGANISM, Config, from_dict
from vgrout.data import Message
from vgrout.envs.base import none_fits
from vgrout.errors import Refused
from vgrout.files import file_sha256, from_json, read_text, regular
from vgrout.model.gguf import gguf_file, unpack, unpacked

if TYPE_CHECKING:  # torch takes seconds to import, and a wrong path never waits for it
    import torch

SVD_CACHE = Path("out/svd_cache")  # decomposed weights: minutes at 4B
# architectures whose blocks are those of `Shapes`
LLAMAS = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
)
# layers that are adapted
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def model_folder(model: str | Path) -> Path | None:
    """The folder of a local model, a GGUF file's once converted, or the cached snapshot of a hub id; None: not on this
    machine. No network."""
    if (file := gguf_file(model)) is not None:
        model = unpacked(file)
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
    """The same folder, after a check of its weights' files; a GGUF file is converted where it was not yet.

    Raises:
        Refused: one line that says what is wrong and what to run: no such model here, no configuration, or weights
            that are missing, cut short, pickled or quantised. What else a model needs shows when it is loaded.
    """
    if (file := gguf_file(model)) is not None:
        unpack(file, flag)
    if (folder := model_folder(model)) is not None:
        _check(folder, model, flag)
        return folder
    why = f"not on this machine; run `vgrout download model {model}` where there is a network, or give a local folder"
    if Path(model).is_dir():
        why = (
            "a folder without config.json, and not with one .gguf; give a Hugging Face model folder"
        )
    elif looks_like_path(model):
        why = "no such model; give a Hugging Face model folder, a .gguf file, or a hub id"
    raise Refused(f"{flag} {model}: {why}")


def looks_like_path(model: str | Path) -> bool:
    """Whether this is no hub id, NAME or OWNER/NAME: nothing that could be downloaded."""
    if isinstance(model, Path) or Path(model).exists() or model.endswith(".gguf"):
        return True
    return not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", model)


def advice(model: str | Path) -> str:
    """What to do about a model that cannot be used: a local folder, another conversion, or a download."""
    if (file := gguf_file(model)) is not None:
        return f"delete {unpacked(file)}, and it is converted again"
    return (
        "give a whole model folder"
        if looks_like_path(model)
        else f"run `vgrout download model {model}` again"
    )


def configuration(folder: Path) -> dict[str, Any]:
    """A model's config.json. Raises Refused, one line, where it cannot be read."""
    config = from_json(read_text(folder / "config.json"), str(folder / "config.json"))
    if not isinstance(config, dict):
        raise Refused(f"{folder / 'config.json'}: is no JSON object")
    return config


def config_number(
    folder: Path, name: Literal["max_position_embeddings", "num_hidden_layers"]
) -> int | None:
    """A number of a model's configuration: its window in tokens, or its blocks; None: not there under the usual name.
    Raises as `configuration`."""
    config = configuration(folder)
    inner = config.get("text_config")
    value = (inner if isinstance(inner, dict) else config).get(name)
    return value if type(value) is int else None


def require_fitting(
    prompts: Sequence[Sequence[Message]], folder: Path, max_new: int, source: str
) -> None:
    """Raises Refused, one line, if no prompt fits the window of the model in this folder, by the tokens of its
    messages alone: the template adds some. source: where the prompts come from, for the message."""
    window = config_number(folder, "max_position_embeddings")
    if window is not None and window <= max_new:
        raise Refused(
            f"--max-new {max_new}: the model's window holds {window} tokens, prompt included"
        )
    file = folder / "tokenizer.json"
    if not prompts or window is None or not file.is_file():
        return
    with tokenizing(file):
        tokenizer = Tokenizer.from_file(str(file))
        for messages in prompts:  # as a rule the first one fits
            tokens = sum(len(tokenizer.encode(m["content"]).ids) for m in messages)
            if tokens <= window - max_new:
                return
    raise none_fits(source, window - max_new)


@contextmanager
def tokenizing(where: str | Path) -> Generator[None]:
    """Raises Refused, one line, for whatever the tokenizers library raises: a panic is no Exception."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as e:
        raise Refused(
            f"{where}: is no usable tokenizer ({' '.join(str(e).split())[:160]})"
        ) from None


def safetensors_head(path: Path, flag: str) -> tuple[dict[str, list[int]], dict[str, str]]:
    """Every tensor's shape, and the metadata, of a safetensors file of which no tensor is read.

    Raises:
        Refused: one line: it cannot be read, is none, or is cut short.
    """
    try:
        with open(path, "rb", opener=regular), safe_open(path, framework="np") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
            return shapes, dict(file.metadata() or {})
    except (OSError, SafetensorError) as e:
        raise Refused(f"{flag} {path}: not a readable safetensors file ({e})") from None


def _check(folder: Path, model: str | Path, flag: str) -> None:
    """Raises Refused, one line, for files that would hang a reader, run code, or hold no weights to train on."""

    def wrong(why: str) -> Refused:
        return Refused(f"{flag} {model}: {why}; {advice(model)}")

    if odd := [p.name for p in folder.iterdir() if p.exists() and not (p.is_file() or p.is_dir())]:
        raise wrong(f"{odd[0]} is not a regular file")
    if configuration(folder).get("quantization_config"):
        raise wrong("its weights are quantised, which cannot be trained; give the full ones")
    index = folder / "model.safetensors.index.json"
    if (single := folder / "model.safetensors").is_file():
        files = {single.name}
    elif index.is_file():
        shards = from_json(read_text(index), f"{flag} {index}")
        of = shards.get("weight_map") if isinstance(shards, dict) else None
        files = {*map(str, of.values())} if isinstance(of, dict) else set[str]()
    else:
        raise wrong(
            "no model.safetensors in it; pickled weights (.bin) can run code: save them as safetensors"
        )
    tensors = sum(len(safetensors_head(folder / name, flag)[0]) for name in files)
    blocks = config_number(folder, "num_hidden_layers") or 0
    if blocks > tensors:  # transformers would make as many first
        raise wrong(f"config.json has {blocks} layers, its weights are {tensors} tensors")


# ── shapes

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
    if not all(
        type(size) is int and size > 0
        for size in (layers, d, mlp, heads, vocab, kv_heads or 1, head_dim or 1)
    ):
        return None
    tied = bool(config.get("tie_word_embeddings", False))
    return Shapes(layers, d, mlp, heads, kv_heads or heads, head_dim or d // heads, vocab, tied)


def find_shapes(model: str | Path) -> Shapes | None:
    """Shapes of a local folder, a downloaded hub id, or a model that is known by name; None of any other."""
    folder = model_folder(model)
    if folder is not None:
        try:
            return shapes_of(configuration(folder))
        except (OSError, Refused):
            return None
    return KNOWN.get(str(model))


# ── a flag's value

CPUINFO = Path("/proc/cpuinfo")
# weights below which a model is a miniature: other defaults, and a second thread only costs
SMALL = 2**24


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
    return (
        CPUINFO.is_file()
        and re.search(r"\b(avx512_bf16|amx_bf16)\b", CPUINFO.read_text()) is not None
    )


# ── an adapter over a model

_CHECKPOINT = re.compile(r"ckpt_step(\d+)\.safetensors")


@dataclass(frozen=True)
class Saved:
    """An adapter's file with what was written into it; nothing is loaded yet."""

    path: Path
    metadata: dict[str, str]
    cfg: Config  # of the run
    model: str | Path  # the base model's folder or id, as other programs can load it
    folder: Path  # where it lies

    @property
    def step(self) -> int:
        """Optimiser steps behind it."""
        return int(self.metadata.get("step", 0))

    @property
    def final(self) -> bool:
        """Whether it is the run's last, and the run came to its last step."""
        return self.path.name == "train.safetensors" and self.step == self.cfg.scale.steps

    @property
    def dtype(self) -> "torch.dtype":
        """dtype of the weights that it was trained on: their singular vectors, rounded to it, are its basis."""
        import torch

        return torch.bfloat16 if self.metadata.get("dtype") == "bfloat16" else torch.float32


def find_adapter(
    run: Path, step: int | None = None, model: str | None = None, flag: str = "adapter"
) -> Saved:
    """The adapter of a run directory (train.safetensors, or the one saved after `step` steps), or a file as such.

    model: in place of the run's own. flag: that named it.

    Raises:
        Refused: one line: no such file or step, not an adapter of this program, or its base model is not here.
    """
    path = run
    if run.is_dir() or step is not None:
        path = run / ("train.safetensors" if step is None else f"ckpt_step{step:04d}.safetensors")
        there = sorted(int(m[1]) for p in run.glob("*") if (m := _CHECKPOINT.fullmatch(p.name)))
        if step not in (None, *there):
            raise Refused(
                f"--step {step}: {run} has {', '.join(map(str, there)) or 'no evaluation checkpoint'}"
            )
    metadata = safetensors_head(path, flag)[1]
    if "cfg" not in metadata or not re.fullmatch(r"\d{1,9}", metadata.get("step", "0")):
        raise Refused(f"{flag} {path}: not an adapter saved by a run")
    cfg = from_dict(from_json(metadata["cfg"], where := f"{flag} {path}"), where)
    base = organism.MODEL_DIR if model == ORGANISM else model or cfg.model_path
    folder = require_model(base)
    return Saved(path, metadata, cfg, folder if gguf_file(base) else base, folder)


@dataclass(frozen=True)
class FoundModel:
    """A model that was found and checked, not loaded: a base, or a base under an adapter."""

    given: str
    name: str  # of the base: "organism", a hub id or a folder
    folder: Path  # where the base lies
    adapter: Path | None  # .safetensors

    @property
    def shapes(self) -> Shapes | None:
        """None where its configuration does not name the usual sizes."""
        return find_shapes(self.folder)

    @property
    def small(self) -> bool:
        """Whether it is a miniature; False where its shapes are not known."""
        return is_small(self.folder)

    @property
    def numbers(self) -> int:
        """In memory: its weights; under an adapter U, Vh and merged weights too. 0 where its shapes are not known."""
        s = self.shapes
        return s.parameters + (s.factors + s.adapted if self.adapter else 0) if s else 0

    def vocabulary(self) -> dict[str, int] | None:
        """Token → id, from the tokenizer's file alone; None where there is no such file."""
        file = self.folder / "tokenizer.json"
        with tokenizing(file):
            return Tokenizer.from_file(str(file)).get_vocab() if file.is_file() else None

    def identity(self) -> dict[str, str | None]:
        """Name of the base and sha256 of the adapter's file, for a run's records."""
        return {"base": self.name, "adapter": file_sha256(self.adapter) if self.adapter else None}


def find_source(given: str, flag: str) -> FoundModel:
    """The model that `given`, the value of `flag`, names.

    Raises:
        Refused: one line: nothing of that name here, or not a model or an adapter of this program.
    """
    path = Path(given)
    if given == ORGANISM:
        organism.EMBEDDED.require_sound(f"{flag} organism:")
    elif path.suffix == ".safetensors" or (path / "train.safetensors").is_file():
        saved = find_adapter(path, flag=flag)
        name = saved.cfg.scale.model if saved.cfg.scale.organism is None else str(saved.model)
        return FoundModel(given, name, saved.folder, saved.path)
    return FoundModel(
        given, given, require_model(organism.MODEL_DIR if given == ORGANISM else given, flag), None
    )
