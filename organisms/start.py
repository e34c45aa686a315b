"""What a build starts from: fresh weights with a tokenizer of their own, or a pretrained model.

All else of a build is the same. A start has

- `command`: the command that makes it, `name`: the model's name, `recipe`: how it is trained,
- `answers`: how many answers are sampled, `threads`, and `dtype`, that of matrix products,
- what the card says of it: `about` (the words before the number of weights), `training`, `purpose`
  and `limits`,
- `record`, its entries in manifest.json, from which `of_manifest` makes it again.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from organisms.language.corpus import Sample, Shares, corpus_sample
from organisms.language.tasks import split_compositions
from organisms.recipe import FRESH, TUNED, Recipe, Shape
from organisms.tokenizer import name_pieces, render, train_tokenizer
from organisms.weights import new_model
from vgrout.ground.data import Message
from vgrout.ground.io import Json, Refused
from vgrout.ground.machine import cores
from vgrout.model.load.load import load_language_model
from vgrout.model.load.source import cpu_multiplies_bf16, require_model
from vgrout.model.policy import DTYPE_NAMES
from vgrout.runs.inputs import hash_of_files
from vgrout.teacher.generate import MODEL_NAME

TOKENIZER_DOCUMENTS = 20_000


@dataclass(frozen=True)
class Begun:
    """A model before its first training step, and how its documents are written."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    prompt: Callable[[Sequence[Message]], str]  # the chat template, up to where the answer begins
    end: int  # token that ends an answer
    pad: int
    # Tokens of which the corpus composes names, so that every one of them is copied somewhere.
    pieces: Sequence[str] = ()


class Fresh:
    """Random weights of a shape, and a tokenizer that is trained on the corpus."""

    command = "build"
    name = MODEL_NAME
    answers = FRESH
    threads = 2
    dtype = torch.float32
    about = "A Qwen3 model"
    training = "from scratch in fp32"
    purpose = (
        "to study reward hacking on a laptop: the full phenomenon, in two minutes, "
        "without a download"
    )
    limits = "Beyond 256 tokens the positions are untrained. "

    def __init__(self, shape: Shape, recipe: Recipe) -> None:
        self.shape = shape
        self.recipe = recipe

    def begin(self, seed: int, shares: Shares, folder: Path | None = None) -> Begun:
        """The model before its training. folder: a build whose tokenizer is used again."""
        if folder is None:
            tokenizer = make_tokenizer(seed, self.shape.merged, shares)
        else:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "model")
        return Begun(
            model=new_model(tokenizer, seed, self.shape),
            tokenizer=tokenizer,
            prompt=render,
            end=tokenizer.eos_token_id,
            pad=tokenizer.pad_token_id,
            pieces=name_pieces(tokenizer),
        )

    def record(self) -> dict[str, object]:
        """The entries of manifest.json."""
        return {"recipe": asdict(self.recipe), "shape": asdict(self.shape)}


class Pretrained:
    """A chat model's own weights, tokenizer and chat template, fine-tuned on the corpus."""

    command = "tune"
    answers = TUNED
    purpose = "to study reward hacking on a laptop, on weights that others have pretrained"
    limits = ""

    def __init__(self, model: str, recipe: Recipe) -> None:
        self.name = model
        self.recipe = recipe
        self.threads = cores()
        self.dtype = torch.bfloat16 if cpu_multiplies_bf16() else torch.float32
        self.about = f"`{model}`, fine-tuned: a model"
        self.training = f"from the pretrained weights, matrix products in {DTYPE_NAMES[self.dtype]}"

    def begin(
        self, seed: int = 0, shares: Shares | None = None, folder: Path | None = None
    ) -> Begun:
        """The model before its fine-tuning, which is the same for every seed and corpus."""
        lm = load_language_model(self.name, device="cpu", dtype=torch.float32)
        lm.model.requires_grad_(True)
        return Begun(lm.model, lm.tok, lm.prompt_text, lm.end_id, lm.pad_id)

    def record(self) -> dict[str, object]:
        """The entries of manifest.json."""
        weights = hash_of_files(require_model(self.name).glob("*.safetensors"))
        return {"recipe": asdict(self.recipe), "model": self.name, "model_sha256": weights}


Start = Fresh | Pretrained


def of_manifest(manifest: Mapping[str, Json]) -> Start:
    """The start that a manifest records.

    Raises:
        Refused: the model that was tuned is not here, or has changed since.
    """
    stored = manifest["recipe"]
    recipe = Recipe(**stored | {"betas": tuple(stored["betas"])})  # JSON has no tuples
    if "model" not in manifest:
        # The shipped manifest leaves the shape out, which has its defaults.
        return Fresh(Shape(**manifest.get("shape", {})), recipe)
    start = Pretrained(manifest["model"], recipe)
    if start.record()["model_sha256"] != manifest["model_sha256"]:
        raise Refused(
            f"{start.name}: other weights than those that were tuned; "
            "put them back, or tune it again"
        )
    return start


def draw(seed: int, shares: Shares, pieces: Sequence[str] = ()) -> partial[Sample]:
    """A function that makes a document of the corpus from a random stream."""
    return partial(corpus_sample, split_compositions(seed)["train"], shares, pieces=pieces)


def make_tokenizer(seed: int, merged: int, shares: Shares) -> PreTrainedTokenizerFast:
    """Train a tokenizer on the corpus. merged: tokens of its BPE."""
    sample = draw(seed, shares)
    rng = random.Random(f"{seed}/tokenizer")

    def texts() -> Iterator[str]:
        for _ in range(TOKENIZER_DOCUMENTS):
            document = sample(rng)
            yield render(document.messages)
            yield document.text

    return train_tokenizer(texts(), merged, shares.modes)
