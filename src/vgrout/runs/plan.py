"""What a run says of itself beforehand: its method, its problems, its memory. `--dry-run` prints all of it."""

import shutil
import textwrap
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

from vgrout.config.method import MethodConfig
from vgrout.config.run import Config
from vgrout.config.specs import INTERVENTIONS, MONITORS
from vgrout.envs.base import Grader
from vgrout.ground.errors import Refused
from vgrout.ground.files import existing
from vgrout.ground.gpus import free_bytes, visible
from vgrout.model.load.memory import GIB
from vgrout.model.load.shapes import Shapes, find_shapes
from vgrout.model.load.source import LLAMAS, configuration, model_folder
from vgrout.runs.inputs import Inputs
from vgrout.runs.preflight import Prompts, device_of, disk_needed, dtype_of, memory_plan, svd_cache
from vgrout.runs.run_dir import where_from

HEAD = 14  # columns of a plan's first words


def first_lines(cfg: Config, *, named: bool = True) -> list[str]:
    """What runs, for the head of its output. named: somebody chose the intervention."""
    s, method, shapes = cfg.scale, cfg.method, find_shapes(cfg.model_path)
    n = shapes.parameters if shapes else 0
    size = f" ({f'{n / 1e9:.1f} B' if n >= 1e9 else f'{n / 1e6:.1f} M'} weights)" if shapes else ""
    problems = "1 problem" if s.prompts_per_step == 1 else f"{s.prompts_per_step} problems"
    what, *more = method_lines(cfg, named, settings=False)
    run = [
        f"{s.model}{size} · seed {cfg.run.seed} · {s.steps} steps of {problems} × {s.group} answers"
    ]
    of_method = [f"method: {what}", *(f"  {line}" for line in more)]
    control = [f"control: {method.control_name}: {method.control_what}"] * (
        method.control_name != "none"
    )
    return [*run, *of_method, *control] if named else [*of_method, *run, *control]


def method_lines(cfg: Config, named: bool = True, settings: bool = True) -> list[str]:
    """What is flagged and what is done about it, in lines of at most 78 characters: the method, its settings beside
    those of the documents, what was given in vain. settings: whether these are said."""
    method = cfg.method
    monitor = (
        f" · monitor\xa0{monitored(method)}" if method.monitor_name not in ("", "none") else ""
    )
    which = _which(method) if named else ", the default"
    title = textwrap.wrap(f"{method.intervention}{which}: {method.spec.what}{monitor}", 72)
    lines = [line.replace("\xa0", " ") for line in title]
    if not named:
        others = [name for name in INTERVENTIONS if name != method.intervention and ":" not in name]
        lines.append(f"others: {', '.join(others)} (--intervention NAME)")
    lines += [*(recommended_settings(method) if settings else ()), *method.ignored]
    if method.monitor_name == "gate" and not cfg.mixes:
        lines += [
            "no demonstrations: known hacks are only answers that the weak detector flags;",
            "until the first, their mean counts as 0"
            if method.gate_as_documented
            else "before the first there is no threshold, and nothing is routed",
        ]
    return lines


def monitored(method: MethodConfig) -> str:
    """The monitor, the one that seeds it, and the flaws of which they are given labels."""
    known = ", ".join(method.modes_known) or "all flaws"
    rates = ""
    if method.label_recall < 1 or method.label_false_flags > 0:
        recall, false_flags = method.label_recall, method.label_false_flags
        rates = f" (recall {recall:g}, false flags {false_flags:g})"
    named: list[str] = []
    for name in method.acting:
        of_labels = f" of {known}" if MONITORS[name].sees_labels else ""
        named.append(f"{name}{of_labels}{rates if name == 'labels' else ''}")
    return ", seeded by ".join(named)


def judge_line(method: MethodConfig) -> str:
    """Which language model judges, and how long it may take."""
    where = method.llm_judge_model or f"{method.llm_judge_name} at {method.llm_judge_url}"
    return f"{where}, at most {method.llm_judge_timeout:g} s a step"


def recommended_settings(method: MethodConfig) -> list[str]:
    """The settings in which the recommended method is another than the documents', whose values are in brackets."""
    parts = list[str]()
    for name, (value, documents) in beside_documents(method).items():
        own, theirs = _said(value), _said(documents)
        theirs = (
            f" ({theirs if any('(' in part for part in parts) else f'documents: {theirs}'})"
            * (own != theirs)
        )
        parts.append(f"{name.replace('_', '-')} {own}{theirs}".replace(" ", "\xa0"))
    said = f"with {' · '.join(parts)}" if parts else ""
    return [line.replace("\xa0", " ") for line in textwrap.wrap(said, 78, break_on_hyphens=False)]


def beside_documents(method: MethodConfig) -> dict[str, tuple[object, object]]:
    """The settings by which the recommended method differs from that of the documents: this run's value, theirs."""
    read, found = method.resolved_settings, {}
    for name, documents in method.spec.documents.items():
        if documents != method.spec.usual[name] and read[name] is not None:
            found[name] = read[name], documents
    return found


def _said(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else f"{value}"


def _which(method: MethodConfig) -> str:
    """Whose settings these are: the recommended ones, the documents', or one's own; "": the method has one set."""
    if not (documents := method.spec.documents):
        return ""
    meant = method.resolved_settings
    for name, settings in (("recommended", method.spec.usual), ("the documents'", documents)):
        if all(meant[k] in (v, None) for k, v in settings.items()):
            return f", {name} settings"
    return ", settings of its own"


def memory_lines(cfg: Config, shapes: Shapes, prompts: Prompts) -> list[str]:
    """The plan on what is free here, and on a GPU the least that the run can do with."""
    lines = memory_plan(cfg, shapes, prompts, free_bytes()).lines()
    if device_of(cfg) == "cuda":
        unbound = replace(cfg, run=replace(cfg.run, memory_gib=0.0))
        least = memory_plan(unbound, shapes, prompts, 0).peak
        lines += _headed("", f"at least {least / GIB:.1f} GiB")
    return lines


def guard_line(cfg: Config) -> str:
    """What the kill switch does in this run."""
    match cfg.guard_mode:
        case "off":
            return "off"
        case "log":
            if cfg.guard_warning:
                return f"log: {cfg.guard_warning}"
            blind = f" (it cannot fire: {cfg.guard_blind})" if cfg.guard_blind else ""
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

        try:
            linears, bare = outline(folder)
        except Refused as e:
            raise Refused(f"--model {cfg.scale.model}: {str(e)[:160]}") from None
        adapted, R = sum(a * b for a, b in linears), sum(map(min, linears))
    if not R:
        return []
    cache = f"; SVD cache {svd_cache(cfg, shapes) / 2**30:.2f} GiB on disk" if shapes else ""
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
    lines += _work_lines(cfg)
    lines += _machine_lines(cfg, inputs, folder)
    for head, line in of_environment.items():
        lines += _headed(head, line)
    if pool := inputs.pool:
        rollouts = sum(map(len, pool.demos.values()))
        lines += _headed("pool", f"{len(pool.ids)} problems, {rollouts} rollouts")
    if inputs.pairs:
        lines += _headed("pairs", f"{len(inputs.pairs)} from {inputs.pairs.source}")
    if cfg.method.in_shadow:
        watching = ", ".join(cfg.method.in_shadow)
        lines += _headed("shadow", f"{watching}: they flag, and change nothing")
    if "llm_judge" in cfg.method.watching:
        lines += _headed("judge", judge_line(cfg.method))
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


def _work_lines(cfg: Config) -> list[str]:
    """How much is sampled."""
    scale = cfg.scale
    evaluations = sum(cfg.evaluates(step) for step in range(scale.steps))
    in_evaluations = evaluations * cfg.eval.eval_n_prompts * scale.group
    at_the_end = 4 * cfg.eval.final_n_prompts * cfg.eval.final_samples
    cached = ""
    if cfg.n_teacher:
        cached = f", {cfg.n_teacher} of {scale.group} cached where a problem is covered"
    return [
        *_headed(
            "run",
            f"{cfg.run_id}: {scale.steps} steps of {scale.prompts_per_step} problems × {scale.group} answers{cached}",
        ),
        *_headed(
            "answers",
            f"{cfg.generations * scale.steps:,} in training, {in_evaluations:,} in evaluations on the way, at most "
            f"{at_the_end:,} at the end; of at most {scale.max_new:,} tokens",
        ),
    ]


def _machine_lines(cfg: Config, inputs: Inputs, folder: Path) -> list[str]:
    """The model, the memory and disk space that it needs."""
    shapes = find_shapes(cfg.model_path)
    organism = f" in {cfg.scale.organism}" if cfg.scale.organism else ""
    lines = _headed("model", f"{cfg.scale.model}{organism}, {dtype_of(cfg)}")
    if cfg.preset in ("fast", "full") and not visible():
        lines += _headed("device", f"no GPU here; {cfg.preset} is made for one of 80 GB or more")
    lines += adapter_lines(cfg)
    if shapes:
        lines += memory_lines(cfg, shapes, inputs.environment.prompts)
    else:
        lines += _headed("memory", "no plan: the model is not here, or is of an unknown shape")
    needed = max(1, disk_needed(cfg) // 2**20)
    free = shutil.disk_usage(existing(folder)).free // 2**20
    lines += _headed("disk", f"about {needed} MiB; {free} MiB free")
    return lines
