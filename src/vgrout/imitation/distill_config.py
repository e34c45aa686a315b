"""Settings of a distillation, and every check that needs no model. No torch."""

import json
import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from vgrout import tracking
from vgrout.config.checks import Dtype, changed, check, flags, refuse, setting
from vgrout.config.run import Config, EvalConfig, OptConfig, RunConfig, merge_flags
from vgrout.config.sampling import Sampling
from vgrout.files import file_sha256, probe_writable
from vgrout.imitation import common
from vgrout.imitation.common import Learning, find_problems
from vgrout.model.memory import GIB
from vgrout.model.source import ITEMSIZE, Source, find_source, resolved_dtype
from vgrout.runs.preflight import ROLLOUT_BYTES, gpu_here, require_disk, unfinished

ROOT = Path("out/distill")
MAX_VOCABULARY = 262_144


@dataclass(frozen=True, kw_only=True)
class MiniLlmConfig:
    """Reverse KL on the student's own samples (arXiv 2306.08543)."""

    minillm_length_normalize: bool = True
    """The reward of the tokens still to come is their mean, not their sum."""
    minillm_teacher_mix_ratio: float = setting(0.3, low=0, high=1)
    """ρ: answers are sampled from ρ · teacher + (1 − ρ) · student; 0: from the student alone."""
    minillm_pretrain_anchor_weight: float = setting(0.0, low=0, below=math.inf)
    """Weight of the language-model loss on a text file; 0: none."""
    minillm_pretrain_anchor_path: Path | None = setting(None, needs="minillm_pretrain_anchor_weight")
    """The text file."""

    def __post_init__(self) -> None:
        check(self)
        if self.minillm_pretrain_anchor_weight and self.minillm_pretrain_anchor_path is None:
            raise ValueError("--minillm-pretrain-anchor-weight: needs --minillm-pretrain-anchor-path")


@dataclass(frozen=True, kw_only=True)
class UldConfig:
    """The teacher's answers across tokenizers: cross-entropy + λ · distance of the distributions (arXiv 2402.12030)."""

    uld_strategy: Literal["wasserstein", "topk_align"] = "wasserstein"
    """wasserstein: L1 distance of the two sorted probability vectors · topk_align: of tokens matched by their text, all
    others together as one."""
    uld_top_k: int | None = setting(None, low=1, high=MAX_VOCABULARY)
    """topk_align: how many of the teacher's likeliest tokens are matched."""
    uld_lambda: float = setting(1.5, low=0, below=math.inf)
    """λ, weight of the distance."""
    uld_ce_weight: float = setting(1.0, low=0, below=math.inf)
    """Weight of the cross-entropy on the teacher's answers."""

    def __post_init__(self) -> None:
        check(self)
        if not self.uld_lambda and not self.uld_ce_weight:
            raise ValueError("--uld-lambda 0 with --uld-ce-weight 0: the gradient is zero; raise one of them")
        if self.uld_strategy != "topk_align":
            refuse(self.uld_top_k is not None, "--uld-top-k: goes with --uld-strategy topk_align; leave it out")
            return
        refuse(self.uld_top_k is None, "--uld-strategy topk_align: needs --uld-top-k")
        refuse(not self.uld_lambda, "--uld-strategy topk_align: not read at --uld-lambda 0")


@dataclass(frozen=True, kw_only=True)
class DistillConfig(Learning):
    """Distil a teacher into a student."""

    teacher: str = ""
    """A model: a local folder, a downloaded hub id, 'organism'; or an adapter: a run directory or its .safetensors."""
    student: str = "organism"
    """Like --teacher; training starts from it."""
    method: Literal["minillm", "uld"] = "minillm"
    """minillm: reverse KL on the student's own samples, one tokenizer · uld: the teacher's answers, any tokenizers."""
    full: bool = False
    """Train all weights, not the adapter δS."""
    problems: str = ""
    """Problem file (JSONL), or 'organism'; none: the benchmark's, the organism's for a miniature."""
    steps: int = setting(60, low=1)
    """Optimiser steps."""
    prompts_per_step: int = setting(4, low=1)
    """P: prompts per step."""
    group: int = setting(8, low=1)
    """G: answers per prompt."""
    minillm: MiniLlmConfig = field(default_factory=MiniLlmConfig)
    uld: UldConfig = field(default_factory=UldConfig)
    eval_every: int = setting(10, low=0)
    """Evaluate and save the student every N steps and at the last; 0: only at the end."""
    eval_n_prompts: int = setting(12, low=1)
    """Held-out problems per evaluation, × G answers."""
    final_n_prompts: int = setting(192, low=1)
    """Held-out test problems of the final evaluation, and of student's and teacher's before the first step."""
    final_samples: int = setting(2, low=1)
    """Answers to each of these."""
    resume: str = ""
    """A run directory, or 'latest': continue from its last good checkpoint, with its own configuration."""
    checkpoint_every: int = 25
    """Steps between resume checkpoints."""
    checkpoint_keep: int = 3
    """Resume checkpoints kept."""
    out_tag: str = ""
    """Suffix of the run's name."""

    def __post_init__(self) -> None:
        Learning.__post_init__(self)
        RunConfig(out_tag=self.out_tag, checkpoint_every=self.checkpoint_every, checkpoint_keep=self.checkpoint_keep)
        refuse(
            self.full and self.dtype == "bf16",
            "--dtype bf16 with --full: a step on a weight is below bf16's rounding; leave one of them out",
        )
        if not self.teacher and not self.resume:
            raise ValueError("--teacher: whose answers? Give a model, or a run directory")
        idle = self.uld if self.method == "minillm" else self.minillm
        if names := [name for name, _ in changed(idle)]:
            raise ValueError(f"{flags(names)}: not read by --method {self.method}; leave it out")

    @property
    def run_id(self) -> str:
        """The run's name, without the time."""
        kind = self.uld.uld_strategy if self.method == "uld" else self.method
        return f"{kind}{'_full' if self.full else ''}_seed{self.seed}{self.out_tag}"

    def evaluates(self, step: int) -> bool:
        """Whether the student is evaluated after this step."""
        return self.eval_every > 0 and ((step + 1) % self.eval_every == 0 or step + 1 == self.steps)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return json.loads(json.dumps(asdict(self), default=str))


def from_dict(data: dict[str, Any]) -> DistillConfig:
    """The inverse of `as_dict`. Raises ValueError on settings of another version."""
    try:
        path = data["minillm"]["minillm_pretrain_anchor_path"]
        minillm = MiniLlmConfig(**data["minillm"] | {"minillm_pretrain_anchor_path": Path(path) if path else None})
        sampling = Sampling(**data.get("sampling", {}))
        values: dict[str, Any] = data | {"minillm": minillm, "uld": UldConfig(**data["uld"]), "sampling": sampling}
        return DistillConfig(**values)
    except (TypeError, KeyError) as e:
        raise ValueError(f"run.json: not the settings of a distillation of this version ({e})") from None


PROCESS = common.PROCESS | {"checkpoint_every", "checkpoint_keep"}


def find_resume(requested: DistillConfig) -> tuple[Path | None, DistillConfig]:
    """The run directory to continue (None: a new run), and the settings: those of the run, under this command line's
    process settings."""
    if not requested.resume:
        return None, requested
    path, config, _ = unfinished(requested.resume, "distill", "minillm", ROOT)
    stored = from_dict(config)
    merged, differing = merge_flags(*map(_flat, (requested, stored, DistillConfig(resume="-"))), free=PROCESS)
    if differing:
        raise ValueError(f"--resume {path}: differs in {', '.join(differing)}; drop these flags")
    return path, from_dict(stored.as_dict() | {name: merged[name] for name in PROCESS})


def _flat(cfg: DistillConfig) -> dict[str, Any]:
    values = cfg.as_dict()
    return values | values.pop("minillm") | values.pop("uld") | values.pop("sampling")


@dataclass(frozen=True)
class Task(common.Task):
    """A distillation whose input files were all found and checked; `source` is the student's."""

    cfg: DistillConfig
    teacher: Source
    anchor: str  # text of the anchor file, "" without

    @property
    def opt(self) -> OptConfig:
        """The optimiser's settings. Default lr: δS 3e-2 in a miniature, else 3e-3; all weights 1e-3, else 1e-5."""
        usual = (1e-3, 1e-5) if self.cfg.full else (3e-2, 3e-3)
        return self.cfg.optimiser(usual[not self.small])

    def described(self) -> Config:
        """The trainer's configuration for the saved files' metadata."""
        cfg = self.cfg
        scale = {"steps": cfg.steps, "group": max(2, cfg.group), "prompts_per_step": cfg.prompts_per_step}
        evaluation = EvalConfig(
            eval_ablate_every=cfg.eval_every,
            eval_n_prompts=cfg.eval_n_prompts,
            final_n_prompts=cfg.final_n_prompts,
            final_samples=cfg.final_samples,
        )
        return self.trainer_config("distill", scale, self.opt, evaluation, cfg.out_tag)

    @property
    def dtype(self) -> Dtype:
        """Of both models' weights."""
        return "fp32" if self.cfg.full else self.cfg.dtype

    def file_hashes(self) -> dict[str, str | None]:
        """sha256 of the input files; None where there is no such file."""
        path = self.cfg.minillm.minillm_pretrain_anchor_path
        return {
            "problems": file_sha256(self.problems),
            "student": self.source.identity()["adapter"],
            "teacher": self.teacher.identity()["adapter"],
            "anchor": file_sha256(path) if path else None,
        }

    def disk(self) -> int:
        """Bytes that the run writes, about."""
        cfg, shapes = self.cfg, self.source.shapes
        need = cfg.steps * cfg.prompts_per_step * cfg.group * ROLLOUT_BYTES
        if shapes is None:
            return need
        trained = 4 * (shapes.parameters if cfg.full else shapes.R)
        saved = (cfg.steps // cfg.eval_every if cfg.eval_every else 0) + 2
        return need + trained * (saved + 3 * (cfg.checkpoint_keep + 1))

    def plan(self) -> list[str]:
        """What the run would do and cost, as lines of text."""
        cfg, per_step = self.cfg, self.cfg.prompts_per_step * self.cfg.group
        evaluations = math.ceil(cfg.steps / cfg.eval_every) if cfg.eval_every else 0
        whose = {"minillm": f"{cfg.minillm.minillm_teacher_mix_ratio:g} teacher + student", "uld": "the teacher"}
        lines = [
            f"run id        {cfg.run_id}",
            f"student       {self.source.given}: {'all weights' if cfg.full else 'δS'}, lr {self.opt.lr:g}",
            f"teacher       {self.teacher.given}",
            f"answers       {per_step} a step (P {cfg.prompts_per_step} × G {cfg.group}) from {whose[cfg.method]}, at "
            f"most {self.max_new} tokens; {per_step * cfg.steps} in all",
            f"evaluation    {evaluations * cfg.eval_n_prompts * cfg.group} answers on the way, "
            f"{4 * cfg.final_n_prompts * cfg.final_samples} at most before and after",
            f"problems      {', '.join(f'{len(v)} {k}' for k, v in self.parts.items())} in {self.problems.name}",
        ]
        for who, source in (("student", self.source), ("teacher", self.teacher)):
            if shapes := source.shapes:
                itemsize = ITEMSIZE[resolved_dtype(self.dtype, self.source.folder, gpu=gpu_here())]
                bytes_ = shapes.parameters * itemsize * (4 if cfg.full and who == "student" else 1)
                what = "weights, gradient, moments" if cfg.full and who == "student" else "weights"
                lines.append(f"memory        {who}: {bytes_ / GIB:.2g} GiB of {what}")
        lines.append(f"disk          about {max(1, self.disk() // 2**20)} MiB")
        return lines


def not_token_by_token(teacher: str, why: str) -> ValueError:
    """The refusal of a teacher that MiniLLM cannot compare with the student."""
    return ValueError(f"--teacher {teacher}: has {why}; MiniLLM compares them token by token: choose --method uld")


def preflight(cfg: DistillConfig, run: Path | None = None) -> Task:
    """The checked task. run: the directory of the run to resume.

    Raises:
        ValueError: one line, for every mistake that shows without a model.
    """
    probe_writable(run or ROOT)
    probe_writable(Path("logs"))
    teacher, student = find_source(cfg.teacher, "--teacher"), find_source(cfg.student, "--student")
    same = teacher.folder.resolve() == student.folder.resolve() and teacher.identity() == student.identity()
    if same and cfg.method == "minillm" and not cfg.minillm.minillm_pretrain_anchor_weight:
        raise ValueError(
            f"--teacher {cfg.teacher}: is the student itself, so the gradient is zero; give another teacher or student"
        )
    for flag, source in (("--teacher", teacher), ("--student", student)):
        if source.shapes and source.shapes.vocab > MAX_VOCABULARY:
            raise ValueError(f"{flag} {source.given}: {source.shapes.vocab} tokens, more than {MAX_VOCABULARY}")
    if cfg.method == "minillm" and teacher.folder != student.folder:  # checked again on the loaded models
        own, other = student.vocabulary(), teacher.vocabulary()
        if own and other and own != other:
            raise not_token_by_token(cfg.teacher, f"another tokenizer than --student {cfg.student}")
        if student.shapes and teacher.shapes and student.shapes.vocab != teacher.shapes.vocab:
            what = f"{teacher.shapes.vocab} logits against the student's {student.shapes.vocab}"
            raise not_token_by_token(cfg.teacher, what)
    if teacher.shapes and (cfg.uld.uld_top_k or 0) > teacher.shapes.vocab:
        raise ValueError(f"--uld-top-k {cfg.uld.uld_top_k}: the teacher has {teacher.shapes.vocab} tokens")
    problems, parts = find_problems(cfg.problems, student, cfg.env_mode, cfg.max_new)
    anchor = ""
    if (path := cfg.minillm.minillm_pretrain_anchor_path) is not None:
        if not path.is_file():
            raise ValueError(f"--minillm-pretrain-anchor-path {path}: no such file")
        try:
            anchor = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as e:
            raise ValueError(f"--minillm-pretrain-anchor-path {path}: not UTF-8 text ({e.reason})") from None
        if not anchor.strip():
            raise ValueError(f"--minillm-pretrain-anchor-path {path}: no text in it")
    tracking.require(cfg.trackers)
    task = Task(replace(cfg, plan_only=False), student, problems, parts, teacher, anchor)
    require_disk(task.disk(), run or ROOT, run)
    return task
