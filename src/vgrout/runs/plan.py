"""What a run says of itself, and what is checked, before its first step: its method, its problems, its memory and disk.

`--dry-run` prints the plan, and the log of a run begins with it; lines on what was loaded follow there.
"""

import shutil
import textwrap
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Literal

from vgrout.config.method import MethodConfig
from vgrout.config.run import Config
from vgrout.config.settings import evaluations
from vgrout.config.specs import INTERVENTIONS, MONITORS
from vgrout.envs.base import Grader, Splits
from vgrout.ground.data import Message
from vgrout.ground.io import Refused, existing, probe_writable, require_new
from vgrout.ground.machine import free_bytes, visible
from vgrout.ground.metrics import Rate
from vgrout.model.load.memory import GIB, PROMPT_TOKENS, Step, room_of, step_of
from vgrout.model.load.source import (
    ITEMSIZE,
    LLAMAS,
    SVD_CACHE,
    Shapes,
    configuration,
    find_shapes,
    is_small,
    model_folder,
    resolved_dtype,
)
from vgrout.runs import tracking
from vgrout.runs.inputs import Inputs, read_inputs
from vgrout.runs.run_dir import RUNS, where_from
from vgrout.teacher.pools import Pool

Prompts = Sequence[Sequence[Message]]

HEAD = 14  # columns of a plan's first words
# a line of rollouts.jsonl on the organism; a real model's answers are ~4 characters a token
ROLLOUT_BYTES = 3000


# ── checks


def device_of(cfg: Config) -> str:
    """Where the run will be, as far as can be said without torch."""
    return "cuda" if visible() or cfg.preset in ("fast", "full") else "cpu"


def dtype_of(cfg: Config) -> Literal["fp32", "bf16"]:
    """Of the weights there."""
    return resolved_dtype(cfg.run.dtype, cfg.model_path, gpu=device_of(cfg) == "cuda")


def svd_cache(cfg: Config, shapes: Shapes) -> int:
    """Bytes of the model's decomposed weights on disk."""
    return shapes.svd_cache_bytes(ITEMSIZE[dtype_of(cfg)])


def cached() -> int:
    """Bytes of decomposed weights, of whichever model, that are on disk already."""
    return sum(p.stat().st_size for p in SVD_CACHE.glob("*.safetensors"))


def svd_seconds(shapes: Shapes) -> float:
    """About how long this machine decomposes a model's weights: one of 512 × 512 is timed."""
    import torch  # for this alone, and before the first run of a model alone

    n = 512
    weight = torch.randn(n, n, generator=torch.Generator().manual_seed(0))
    times: list[float] = []
    for _ in range(3):  # the first is slower
        began = time.monotonic()
        torch.linalg.svd(weight)
        times.append(time.monotonic() - began)
    work = sum(a * b * min(a, b) for a, b in shapes.linears.values())
    return min(times) * shapes.layers * work / n**3


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
        need += 4 * shapes.R * (saved + checkpoints) + max(0, svd_cache(cfg, shapes) - cached())
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
        partial(require_disk, disk_needed(cfg), folder, run),
        partial(require_memory, cfg, inputs.environment.prompts),
        partial(require_shards, cfg),
        *(partial(tracking.require, name) for name in cfg.run.trackers),
    ):
        try:
            needed()
        except Refused as e:
            absent.append(str(e))
    missing = (*inputs.absent, *absent)
    if missing and not cfg.run.dry_run:
        more = len(missing) - 1
        raise Refused(missing[0] + f" ({more} more missing: --dry-run lists all)" * (more > 0))
    return replace(inputs, absent=missing)


def step_here(cfg: Config, shapes: Shapes, prompts: Prompts) -> Step:
    """A step of the run on this machine."""
    lengths = [sum(len(m["content"]) for m in messages) for messages in prompts]
    return step_of(
        cfg,
        shapes,
        device=device_of(cfg),
        size=ITEMSIZE[dtype_of(cfg)],
        prompt_tokens=max(lengths) // 4 if lengths else PROMPT_TOKENS,  # of four characters each
    )


def require_shards(cfg: Config) -> None:
    """Raises Refused where --tensor-parallel does not divide the model, or this machine's ranks."""
    n = cfg.run.tensor_parallel
    if n > 1:
        if shapes := find_shapes(cfg.model_path):
            shapes.part(n)
        from vgrout.model.load import load  # torch, for this flag alone

        load.require_shards(cfg)


def require_memory(cfg: Config, prompts: Prompts) -> None:
    """Raises Refused where not even a row at a time fits the GPU, or --memory-gib."""
    room, shapes = room_of(cfg, free_bytes()), find_shapes(cfg.model_path)
    if room is None or shapes is None:
        return
    step = step_here(cfg, shapes, prompts)
    least = step.plan(0).peak
    if least <= room:
        return
    others = {"--quarantine block:-2": replace(step, quarantined=min(1, step.quarantined))}
    others["--intervention none"] = replace(step, quarantined=0, by_rollout=False)
    fit = {flag: other.plan(0).peak for flag, other in others.items()}
    for n in (2, 4, 8):
        if step.shards < n <= (8 if cfg.run.dry_run else len(visible())):
            with suppress(Refused):  # n does not divide the model
                fit[f"--tensor-parallel {n}"] = replace(step, shards=n).plan(0).peak
    enough = [f"{flag} ({n / GIB:.3g} GiB)" for flag, n in fit.items() if n <= room]
    where = f"--memory-gib {cfg.run.memory_gib:g}" if cfg.run.memory_gib else "--model"
    raise Refused(
        f"{where}: a row at a time takes {least / GIB:.3g} GiB, by the plan, and {room / GIB:.3g} are free; "
        + (
            f"what fits: {' or '.join(enough)}"
            if enough
            else "lower --max-new, or take a smaller --model"
        )
    )


# ── the plan


def first_lines(cfg: Config, *, named: bool = True) -> list[str]:
    """What runs, for the head of its output. named: somebody chose the intervention."""
    s, method, shapes = cfg.scale, cfg.method, find_shapes(cfg.model_path)
    size = ""
    if shapes:
        n = shapes.parameters
        size = f" ({n / 1e9:.1f} B weights)" if n >= 1e9 else f" ({n / 1e6:.1f} M weights)"
    problems = f"{s.prompts_per_step} problem{'s' * (s.prompts_per_step != 1)}"
    run = (
        f"{s.model}{size} · seed {cfg.run.seed} · {s.steps} steps of {problems} × {s.group} answers"
    )
    what, *more = method_lines(cfg, named)
    lines = [f"method: {what}", *(f"  {line}" for line in more)]
    lines.insert(0 if named else len(lines), run)
    if method.control_name != "none":
        lines.append(f"control: {method.control_name}: {method.control_what}")
    return lines


def method_lines(cfg: Config, named: bool = True) -> list[str]:
    """What is flagged and what is done about it, and what was given in vain, in lines of at most 78 characters."""
    method = cfg.method
    monitor = (
        f" · monitor\xa0{monitored(method)}" if method.monitor_name not in ("", "none") else ""
    )
    which = "" if named else ", the default"
    title = textwrap.wrap(f"{method.intervention}{which}: {method.spec.what}{monitor}", 72)
    lines = [line.replace("\xa0", " ") for line in title]
    if not named:
        others = [name for name in INTERVENTIONS if name != method.intervention and ":" not in name]
        lines.append(f"others: {', '.join(others)} (--intervention NAME)")
    lines += method.ignored
    if method.monitor_name == "gate" and not cfg.mixes:
        lines.append(
            "no demonstrations: known hacks are only answers that the weak detector flags;"
        )
        lines.append(
            "until the first, their mean counts as 0"
            if method.gate_as_documented
            else "before the first there is no threshold, and nothing is routed"
        )
    return lines


def monitored(method: MethodConfig) -> str:
    """The monitor, the one that seeds it, and the flaws of which they are given labels."""
    known = ", ".join(method.modes_known) or "all flaws"
    named: list[str] = []
    for name in method.acting:
        of_labels = f" of {known}" if MONITORS[name].sees_labels else ""
        false_flags = ""
        if name == "labels" and method.label_false_flags > 0:
            false_flags = f" (false flags {method.label_false_flags:g})"
        named.append(f"{name}{of_labels}{false_flags}")
    kept = f", {method.flags_kept:g} of its flags kept" if method.flags_kept < 1 else ""
    return ", seeded by ".join(named) + kept


def guard_line(cfg: Config) -> str:
    """What the kill switch does in this run."""
    match cfg.guard_mode:
        case "off":
            return "off"
        case "log":
            why = cfg.guard_cannot_halt
            blind = f" (it could not halt this run: {why})" if why else ""
            return f"log: a verdict is a warning{blind}"
        case "halt":
            rules = ", ".join(cfg.guard.halting)
            return (
                f"halt: rule {rules} ends the run after a last evaluation (exit 3); the others warn"
            )


def adapter_lines(cfg: Config) -> list[str]:
    """What of the model is adapted, and what is not. Raises Refused, one line, where nothing can be."""
    shapes, folder = find_shapes(cfg.model_path), model_folder(cfg.model_path)
    adapted, R, bare = (shapes.adapted, shapes.R, list[str]()) if shapes else (0, 0, [])
    named = configuration(folder).get("architectures") if folder else None
    if folder and named and not (isinstance(named, list) and LLAMAS.issuperset(map(str, named))):
        from vgrout.model.load.load import (
            outline,  # torch: of other blocks nothing is known without it
        )

        linears, bare = outline(folder)
        adapted, R = sum(a * b for a, b in linears), sum(map(min, linears))
    if not R:
        return []
    cache = ""
    if shapes:
        size = svd_cache(cfg, shapes)
        cache = f"; SVD cache {size / 2**30:.2f} GiB on disk"
        if cached() < size and folder and not is_small(folder) and not visible():
            cache += f", about {svd_seconds(shapes):.0f} s to make before step 0, once"
    size = (
        f"{adapted / 1e6:.2f} M weights under {R} singular values, two vectors of that size{cache}"
    )
    return [f"adapter       {size}", *([f"not trained   {', '.join(bare)}"] if bare else [])]


def plan_lines(
    cfg: Config,
    inputs: Inputs,
    grader: Grader,
    folder: Path,
    *,
    named: bool = True,
    resumes: bool = False,
) -> list[str]:
    """The plan, as lines: what is done, what it needs and reads, what is missing. folder: where the run is written.
    named: somebody chose the intervention. resumes: the folder is that of a run which goes on."""
    of_environment = dict(inputs.environment.plan())
    rewards = of_environment.pop("reward", None)
    lines = _headed("method", *method_lines(cfg, named))
    lines += _headed("resume", f"{folder}, {where_from(folder)}") if resumes else []
    lines += _work_lines(cfg, inputs)
    lines += _machine_lines(cfg, inputs, folder)
    for head, line in of_environment.items():
        lines += _headed(head, line)
    if inputs.pool:
        lines += _headed("pool", _pool_line(inputs.pool, grader.version))
    if inputs.pairs:
        lines += _headed("pairs", f"{len(inputs.pairs)} from {inputs.pairs.source}")
    if cfg.method.in_shadow:
        watching = ", ".join(cfg.method.in_shadow)
        lines += _headed("shadow", f"{watching}: they flag, and change nothing")
    if "llm_judge" in cfg.method.watching:
        method = cfg.method
        judge = method.llm_judge_model
        if method.llm_judge_url:
            judge += f" at {method.llm_judge_url}"
        lines += _headed("judge", f"{judge}, at most {method.llm_judge_timeout:g} s a step")
    if rewards:
        lines += _headed("reward", rewards)
    if cfg.method.control_name != "none":
        control = f"{cfg.method.control_name}: {cfg.method.control_what}"
        if inputs.placebo:
            control += f" ({len(inputs.placebo)} from {inputs.placebo.source})"
        lines += _headed("control", control)
    lines += _headed("guard", guard_line(cfg))
    lines.append(grader.description.replace("sandbox: ", "sandbox       ", 1))
    for line in inputs.absent:
        lines += _headed("missing", line)
    return lines


def _headed(head: str, *lines: str) -> list[str]:
    """Lines of the plan, with a head before the first."""
    return [
        f"{of_line:<{HEAD}}{line}" for of_line, line in zip_longest([head], lines, fillvalue="")
    ]


def _work_lines(cfg: Config, inputs: Inputs) -> list[str]:
    """How much is sampled."""
    scale, environment = cfg.scale, inputs.environment
    val, test = cfg.eval.eval_n_prompts, cfg.eval.final_n_prompts
    if environment.prompts:
        tasks = environment.tasks(inputs.pool)
        val, test = min(val, len(tasks["val"])), min(test, len(tasks["test"]))
    n_evaluations = len(evaluations(scale.steps, cfg.eval.eval_ablate_every))
    in_evaluations = n_evaluations * val * scale.group
    at_the_end = 4 * test * cfg.eval.final_samples
    run = f"{cfg.run_id}: {scale.steps} steps of {scale.prompts_per_step} problems × {scale.group} answers"
    if cfg.n_teacher:
        run += f", {cfg.n_teacher} of {scale.group} cached where a problem is covered"
    answers = (
        f"{cfg.generations * scale.steps:,} in training, {in_evaluations:,} in evaluations on the way, at most "
        f"{at_the_end:,} at the end; of at most {scale.max_new:,} tokens"
    )
    return _headed("run", run) + _headed("answers", answers)


def _machine_lines(cfg: Config, inputs: Inputs, folder: Path) -> list[str]:
    """The model, the memory and disk space that it needs."""
    shapes = find_shapes(cfg.model_path)
    organism = f" in {cfg.scale.organism}" if cfg.scale.organism else ""
    lines = _headed("model", f"{cfg.scale.model}{organism}, {dtype_of(cfg)}")
    if cfg.preset in ("fast", "full") and not visible():
        lines += _headed("device", f"no GPU here; {cfg.preset} is made for one of 80 GB or more")
    lines += adapter_lines(cfg)
    if shapes:
        prompts = inputs.environment.prompts
        step = step_here(cfg, shapes, prompts)
        lines += step.plan(room_of(cfg, free_bytes())).lines()
        if device_of(cfg) == "cuda":
            each = f" on each of {step.shards} GPUs" if step.shards > 1 else ""
            lines += _headed("", f"at least {step.plan(0).peak / GIB:.1f} GiB{each}")
    else:
        lines += _headed("memory", "no plan: the model is not here, or is of an unknown shape")
    needed = max(1, disk_needed(cfg) // 2**20)
    free = shutil.disk_usage(existing(folder)).free // 2**20
    lines += _headed("disk", f"about {needed} MiB; {free} MiB free")
    return lines


def _pool_line(pool: Pool, grader: str) -> str:
    """What the demonstrations are, by the labels that came with them. grader: fingerprint of this run's."""
    grades = [demonstration.grade for rows in pool.demos.values() for demonstration in rows]
    hacked = Rate.of(grade.hacked for grade in grades)
    passed = Rate.of(grade.gt_pass for grade in grades)
    another = "" if pool.grader == grader else f", this run has {grader}"
    return (
        f"{len(pool.ids)} problems, {len(grades)} rollouts; hacked {hacked.percent} %, gt_pass "
        f"{passed.percent} %; labels by grader {pool.grader}{another}"
    )


# ── what was loaded


def loaded_lines(inputs: Inputs, problems: Splits) -> list[str]:
    """What was loaded: a line for the console, the others for the log."""
    n_flaws = len(problems.trained_flaws)
    flaws = f"{n_flaws} flaw{'s' * (n_flaws != 1)}"
    return [
        f"problems: {len(problems.train)} to train on, {len(problems.test)} to test · {flaws}",
        *inputs.environment.ignored(inputs.pool),
    ]
