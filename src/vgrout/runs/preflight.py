"""Before anything heavy is loaded: checks, the plan, and where a resumed run goes on."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from vgrout.config.run import Config
from vgrout.ground.data import Message
from vgrout.ground.errors import Refused
from vgrout.ground.files import existing, probe_writable, require_new
from vgrout.ground.gpus import visible
from vgrout.model.load.memory import GIB, PROMPT_TOKENS, MemoryPlan, plan_of
from vgrout.model.load.shapes import ITEMSIZE, Shapes, find_shapes, resolved_dtype
from vgrout.model.load.source import SVD_CACHE
from vgrout.runs import tracking
from vgrout.runs.inputs import Inputs, read_inputs
from vgrout.runs.run_dir import RUNS

Prompts = Sequence[Sequence[Message]]

# a line of rollouts.jsonl on the organism; a real model's answers are ~4 characters a token
ROLLOUT_BYTES = 3000


def device_of(cfg: Config) -> str:
    """Where the run will be, as far as can be said without torch."""
    return "cuda" if visible() or cfg.preset in ("fast", "full") else "cpu"


def dtype_of(cfg: Config) -> Literal["fp32", "bf16"]:
    """Of the weights there."""
    return resolved_dtype(cfg.run.dtype, cfg.model_path, gpu=device_of(cfg) == "cuda")


def svd_cache(cfg: Config, shapes: Shapes) -> int:
    """Bytes of the model's decomposed weights on disk."""
    return shapes.svd_cache_bytes(ITEMSIZE[dtype_of(cfg)])


def disk_needed(cfg: Config) -> int:
    """Bytes that a run writes, about, less what the cache of decompositions holds already, of whichever model."""
    answers = (
        cfg.generations * cfg.scale.steps + 4 * cfg.eval.final_n_prompts * cfg.eval.final_samples
    )
    need = answers * ROLLOUT_BYTES
    if shapes := find_shapes(cfg.model_path):
        every = cfg.eval.eval_ablate_every
        saved = (cfg.scale.steps // every if every and cfg.eval.save_eval_ckpts else 0) + 3
        checkpoints = 6 * (cfg.run.checkpoint_keep + 1)  # two vectors with two moments each
        cached = sum(p.stat().st_size for p in SVD_CACHE.glob("*.safetensors"))
        need += 4 * shapes.R * (saved + checkpoints) + max(0, svd_cache(cfg, shapes) - cached)
    return need


def require_disk(need: int, folder: Path, run: Path | None) -> None:
    """Raises Refused where less than `need` bytes are free. run: to resume; what it has written is subtracted."""
    written = sum(p.stat().st_size for p in run.rglob("*") if p.is_file()) if run else 0
    need, free = max(0, need - written), shutil.disk_usage(existing(folder)).free
    if free < need:
        raise Refused(
            f"{folder}: the run writes about {need // 2**20 + 1} MiB{' more' if run else ''}, {free // 2**20} MiB are "
            f"free; free some space, or {'move the run to' if run else 'start from a folder on'} another disk"
        )


def preflight(cfg: Config, run: Path | None = None) -> Inputs:
    """Read and check all inputs. Raises Refused, one line, for every mistake that shows without a model.

    run: the directory of the run to resume.
    """
    inputs, absent = read_inputs(cfg), list[str]()
    new = cfg.run.output_dir
    if run is None:
        require_new(new, "--output-dir")
    probe_writable(folder := run or (RUNS if new is None else new.parent))
    probe_writable(Path("logs"))
    for needed in (
        lambda: require_disk(disk_needed(cfg), folder, run),
        lambda: require_memory(cfg, inputs.environment.prompts),
        *(partial(tracking.require, name) for name in cfg.run.trackers),
    ):
        try:
            needed()
        except Refused as e:
            absent.append(str(e))
    missing = (*inputs.absent, *absent)
    if missing and not cfg.run.dry_run:
        more = (
            f" ({len(missing) - 1} more missing: --dry-run lists all)" if len(missing) > 1 else ""
        )
        raise Refused(missing[0] + more)
    return replace(inputs, absent=missing)


def memory_plan(cfg: Config, shapes: Shapes, prompts: Prompts, room: int | None) -> MemoryPlan:
    """room: bytes that are free for the run."""
    size = ITEMSIZE[dtype_of(cfg)]
    longest = max(
        (sum(len(m["content"]) for m in messages) for messages in prompts),
        default=4 * PROMPT_TOKENS,
    )
    prompt_tokens = longest // 4  # at four characters per token
    return plan_of(
        cfg, shapes, device=device_of(cfg), size=size, room=room, prompt_tokens=prompt_tokens
    )


def require_memory(cfg: Config, prompts: Prompts) -> None:
    """Raises Refused where --memory-gib does not hold a row at a time."""
    if cfg.run.memory_gib and (shapes := find_shapes(cfg.model_path)):
        least = memory_plan(cfg, shapes, prompts, 0).peak / GIB
        if least > cfg.run.memory_gib:
            raise Refused(
                f"--memory-gib {cfg.run.memory_gib:g}: a row at a time takes {least:.3g} GiB, by the plan; allow more, "
                "lower --max-new, or take a smaller --model"
            )
