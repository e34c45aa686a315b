"""Saved adapters: which file, of which configuration, on which base model; and loading them."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from vgrout.config.run import ORGANISM, Config, from_dict
from vgrout.data import organism
from vgrout.files import from_json
from vgrout.model.gguf import gguf_file
from vgrout.model.source import Source, read_metadata, require_model
from vgrout.problems import load_problems
from vgrout.types import Problem

if TYPE_CHECKING:  # torch takes seconds to import, and a wrong path never waits for it
    import torch

    import vgrout.model.policy

_CHECKPOINT = re.compile(r"ckpt_step(\d+)\.safetensors")


@dataclass(frozen=True)
class Saved:
    """An adapter file with what was written into it; nothing is loaded yet."""

    path: Path
    metadata: dict[str, str]
    cfg: Config  # of the run
    model: str | Path  # the base model's folder or id
    problems_file: Path
    test_file: Path | None = None  # of the run's evaluations, where they have a file of their own

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

        return {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(self.metadata.get("dtype", ""), torch.float32)

    def problems(self) -> list[Problem]:
        """The problems of `problems_file`. Raises ValueError as `load_problems`."""
        return load_problems(self.problems_file)


def find_adapter(run: Path, step: int | None = None, model: str | None = None, problems: Path | None = None) -> Saved:
    """The adapter of a run directory (train.safetensors, or the one saved after `step` steps), or a file as such.

    model, problems: in place of the run's own.

    Raises:
        ValueError: one line: no such file or step, not an adapter of this program, or its base model is not here.
    """
    if run.is_dir():
        path = run / ("train.safetensors" if step is None else f"ckpt_step{step:04d}.safetensors")
        if not path.is_file():
            there = sorted(int(m[1]) for p in run.iterdir() if (m := _CHECKPOINT.fullmatch(p.name)))
            if step is None:
                raise ValueError(f"{path}: not there; is {run} a run directory that got as far as a checkpoint?")
            raise ValueError(f"--step {step}: {run} has {', '.join(map(str, there)) or 'no evaluation checkpoint'}")
    else:
        if step is not None:
            raise ValueError(f"--step {step}: goes with a run directory, {run} is a file")
        path = run
    if not path.exists():
        raise ValueError(f"{run}: no such run or adapter; give a run's folder, or a file that it saved")
    metadata = read_metadata(path, "adapter")
    if "cfg" not in metadata:
        raise ValueError(f"{path}: not an adapter saved by a run (no configuration in its metadata)")
    cfg = from_dict(from_json(metadata["cfg"], str(path), is_line=True), str(path))
    if not re.fullmatch(r"\d{1,9}", metadata.get("step", "0")):
        raise ValueError(f"{path}: its step is {metadata['step'][:40]!r}")
    base: str | Path = organism.MODEL_DIR if model == ORGANISM else model or cfg.model_path
    folder = require_model(base)
    if gguf_file(base) is not None:
        base = folder
    return Saved(path, metadata, cfg, base, problems or cfg.problems_path, None if problems else cfg.test_problems_path)


def load_saved(saved: Saved, cache_dir: Path | None = None) -> "vgrout.model.policy.Policy":
    """The deployed model: the base in the run's dtype, on a GPU where there is one, δS loaded, the quarantine zero; it
    is prompted as it was in the run.

    Raises:
        ValueError: the adapter is of another model, or no numbers are in it.
    """
    import torch

    from vgrout.model.policy import SVD_CACHE, load_policy, pick_device
    from vgrout.model.svd_adapter import read_safetensors

    kinds = (torch.float32, torch.bfloat16, torch.float16)
    for name, x in read_safetensors(saved.path)[0].items():
        if x.dtype not in kinds or not x.isfinite().all():
            raise ValueError(f"{saved.path}: {name} holds a NaN, an infinity, or no floating-point numbers")
    device, _ = pick_device(saved.model, "auto")
    policy = load_policy(saved.model, device=device, dtype=saved.dtype, cache_dir=cache_dir or SVD_CACHE)
    policy.adapter.load(saved.path)
    return replace(policy, preserve_thinking=saved.cfg.env.preserve_thinking)


def load_source(
    source: Source, flag: str, device: "torch.device", dtype: "torch.dtype", *, adapter: bool = False
) -> "vgrout.model.policy.LanguageModel":
    """The base with its adapter merged into the weights; a Policy where it has an adapter or is to get one (`adapter`).

    Raises:
        ValueError: one line: no usable model, or the adapter is of another one.
    """
    from vgrout.model.policy import SVD_CACHE, adapted, load_language_model

    lm = load_language_model(source.folder, device=device, dtype=dtype, flag=flag)
    if source.adapter is None and not adapter:
        return lm
    policy = adapted(lm, SVD_CACHE)
    if source.adapter is not None:
        policy.adapter.load(source.adapter)
    return policy
