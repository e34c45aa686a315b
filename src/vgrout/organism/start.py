"""What a build starts from: fresh weights with a tokenizer of the corpus's own, or a pretrained model. All else of a
build is the same.

A start has the command that makes it, the model's name, its recipe, how many answers are sampled, threads, the dtype of
matrix products, and what its card says: `about`, the words before the number of weights, `training`, `purpose` and
`limits`. `record` is for manifest.json, from which `of_manifest` makes it again.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from vgrout.cores import cores
from vgrout.data import Message
from vgrout.envs.code.language import Sample, Shares, corpus_sample, split_compositions
from vgrout.errors import Refused
from vgrout.inputs import hash_of_files
from vgrout.model.load import load_language_model
from vgrout.model.policy import DTYPE_NAMES
from vgrout.model.source import cpu_multiplies_bf16, require_model
from vgrout.organism.recipe import FRESH, TUNED, Recipe, Shape
from vgrout.organism.tokenizer import name_pieces, render, train_tokenizer
from vgrout.organism.weights import new_model
from vgrout.teacher.generate import MODEL_NAME

TOKENIZER_DOCUMENTS = 20_000


@dataclass(frozen=True)
class Begun:
    """A model before its first step of training, and how its documents are written."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    prompt: Callable[[Sequence[Message]], str]  # the chat template, up to where the answer begins
    end: int  # token that ends an answer
    pad: int
    # of which names may be composed, so that every token is copied somewhere
    pieces: Sequence[str] = ()


class Fresh:
    """Random weights of a shape, and a tokenizer of the corpus: in `begin`, or that of the build in `folder`."""

    command, name, answers, threads, dtype = "build", MODEL_NAME, FRESH, 2, torch.float32
    about = "A Qwen3 model"
    training = "from scratch in fp32"
    purpose = "to study reward hacking on a laptop: the full phenomenon, in two minutes, without a download"
    limits = "Beyond 256 tokens the positions are untrained. "

    def __init__(self, shape: Shape, recipe: Recipe) -> None:
        self.shape, self.recipe = shape, recipe

    def begin(self, seed: int, shares: Shares, folder: Path | None = None) -> Begun:
        if folder is None:
            tokenizer = make_tokenizer(seed, self.shape.merged, shares)
        else:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "model")
        end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
        return Begun(
            new_model(tokenizer, seed, self.shape),
            tokenizer,
            render,
            end,
            pad,
            name_pieces(tokenizer),
        )

    def record(self) -> dict[str, Any]:
        return {"recipe": asdict(self.recipe), "shape": asdict(self.shape)}


class Pretrained:
    """A chat model's own weights, tokenizer and chat template, fine-tuned on the corpus."""

    command, answers = "tune", TUNED
    purpose = "to study reward hacking on a laptop, on weights that others have pretrained"
    limits = ""

    def __init__(self, model: str, recipe: Recipe) -> None:
        self.name, self.recipe = model, recipe
        self.threads = cores()
        self.dtype = torch.bfloat16 if cpu_multiplies_bf16() else torch.float32
        self.about = f"`{model}`, fine-tuned: a model"
        self.training = f"from the pretrained weights, matrix products in {DTYPE_NAMES[self.dtype]}"

    def begin(self, seed: int, shares: Shares, folder: Path | None = None) -> Begun:
        lm = load_language_model(self.name, device="cpu", dtype=torch.float32)
        lm.model.requires_grad_(True)
        return Begun(lm.model, lm.tok, lm.prompt_text, lm.end_id, lm.pad_id)

    def record(self) -> dict[str, Any]:
        weights = hash_of_files(require_model(self.name).glob("*.safetensors"))
        return {"recipe": asdict(self.recipe), "model": self.name, "model_sha256": weights}


Start = Fresh | Pretrained


def of_manifest(manifest: Mapping[str, Any]) -> Start:
    """The start that a manifest records. Raises Refused where the model that was tuned is not here, or has changed
    since."""
    stored = manifest["recipe"]
    recipe = Recipe(**stored | {"betas": tuple(stored["betas"])})  # JSON has no tuples
    if "model" not in manifest:
        # the shipped manifest leaves defaults out
        return Fresh(Shape(**manifest.get("shape", {})), recipe)
    start = Pretrained(manifest["model"], recipe)
    if start.record()["model_sha256"] != manifest["model_sha256"]:
        raise Refused(
            f"{start.name}: other weights than those that were tuned; put them back, or tune it again"
        )
    return start


def draw(seed: int, shares: Shares, pieces: Sequence[str] = ()) -> partial[Sample]:
    """One document of the corpus, from a random stream."""
    return partial(corpus_sample, split_compositions(seed)["train"], shares, pieces=pieces)


def make_tokenizer(seed: int, merged: int, shares: Shares) -> PreTrainedTokenizerFast:
    """The tokenizer of the corpus."""
    sample, rng = draw(seed, shares), random.Random(f"{seed}/tokenizer")
    documents = (sample(rng) for _ in range(TOKENIZER_DOCUMENTS))
    return train_tokenizer(
        (text for s in documents for text in (render(s.messages), s.text)), merged, shares.modes
    )
