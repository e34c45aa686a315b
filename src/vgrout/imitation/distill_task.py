"""A distillation before its models are loaded: its files, found and checked; its plan; which run goes on. No torch."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vgrout.config.run import Config, merge_flags
from vgrout.config.sampling import Sampling
from vgrout.errors import Refused
from vgrout.files import file_sha256, read_text
from vgrout.imitation.settings import MAX_VOCABULARY, PROCESS, DistillSettings
from vgrout.inputs import Inputs
from vgrout.model.source import FoundModel, find_source
from vgrout.runs.preflight import disk_needed, preflight, require_disk, unfinished

ROOT = Path("out/distill")
FREE = PROCESS | {"checkpoint_every", "checkpoint_keep"}  # may differ when a run is resumed


@dataclass(frozen=True)
class DistillTask:
    """Settings and files, found and checked."""

    settings: DistillSettings
    cfg: Config  # the trainer's, with every default resolved
    inputs: Inputs
    student: FoundModel
    teacher: FoundModel
    anchor: str  # text of the anchor file, "" without

    def file_hashes(self) -> dict[str, str | None]:
        """sha256 of the input files; None where there is no such file."""
        path = self.settings.minillm_pretrain_anchor_path
        return {
            "problems": file_sha256(self.cfg.problems_path),
            "student": self.student.identity()["adapter"],
            "teacher": self.teacher.identity()["adapter"],
            "anchor": file_sha256(Path(path)) if path else None,
        }

    def disk(self) -> int:
        """Bytes that the run writes, about; with --full each saved student is the whole model."""
        need, shapes, every = (
            disk_needed(self.cfg),
            self.student.shapes,
            self.cfg.eval.eval_ablate_every,
        )
        if not self.settings.full or shapes is None:
            return need
        saved = (self.cfg.scale.steps // every if every else 0) + 2
        return need + 4 * shapes.parameters * (saved + 3 * (self.cfg.run.checkpoint_keep + 1))

    def plan(self) -> dict[str, Any]:
        """What the run would do, JSON-ready."""
        settings, cfg = self.settings, self.cfg
        sources = {"student": self.student, "teacher": self.teacher}
        parts = self.inputs.environment.tasks()
        return {
            "run": settings.run_id,
            "models": {
                who: {"given": source.given, **source.identity()} for who, source in sources.items()
            },
            "problems": {
                "file": str(cfg.problems_path),
                **{split: len(part) for split, part in parts.items()},
            },
            "settings": settings.as_dict()
            | {"max_new": cfg.scale.max_new, "optimiser": asdict(cfg.opt)},
            "answers": cfg.scale.steps * cfg.scale.prompts_per_step * settings.group,
            "disk_mib": max(1, self.disk() // 2**20),
        }


def prepare(settings: DistillSettings, run: Path | None) -> DistillTask:
    """Find and check everything. run: the directory of the run to resume.

    Raises:
        Refused: one line, for every mistake that shows without a model.
    """
    teacher, student = (
        find_source(settings.teacher, "--teacher"),
        find_source(settings.student, "--student"),
    )
    minillm = settings.method == "minillm"
    same = (
        teacher.folder.resolve() == student.folder.resolve()
        and teacher.identity() == student.identity()
    )
    if same and minillm and not settings.minillm_pretrain_anchor_weight:
        raise zero_gradient(settings)
    for flag, source in (("--teacher", teacher), ("--student", student)):
        if source.shapes and source.shapes.vocab > MAX_VOCABULARY:
            raise Refused(
                f"{flag} {source.given}: {source.shapes.vocab} tokens, more than {MAX_VOCABULARY}"
            )
    if minillm and teacher.folder != student.folder:  # checked again on the loaded models
        own, other = student.vocabulary(), teacher.vocabulary()
        if own and other and own != other:
            raise not_token_by_token(settings)
    cfg = settings.config(student)
    path = settings.minillm_pretrain_anchor_path
    anchor = read_text(Path(path)) if Path(path).is_file() else ""
    if settings.minillm_pretrain_anchor_weight and not anchor.strip():
        wrong = (
            f" {path}: no such file, or no text in it" if path else ": the weight needs a text file"
        )
        raise Refused(f"--minillm-pretrain-anchor-path{wrong}")
    task = DistillTask(settings, cfg, preflight(cfg, run), student, teacher, anchor)
    if settings.full:
        require_disk(task.disk(), run or ROOT, run)
    return task


def not_token_by_token(settings: DistillSettings) -> Refused:
    """The refusal of a teacher that MiniLLM cannot compare with the student."""
    return Refused(
        f"--teacher {settings.teacher}: has another tokenizer than --student {settings.student}, or logits for other "
        "tokens of it; MiniLLM compares them token by token: choose --method uld"
    )


def zero_gradient(settings: DistillSettings) -> Refused:
    """The refusal of a student that is its own teacher."""
    return Refused(
        f"--teacher {settings.teacher}: has the student's own weights, so the gradient is zero; give another teacher "
        "or student"
    )


# ── resuming


def find_resume(requested: DistillSettings) -> tuple[Path | None, DistillSettings]:
    """The run directory to continue (None: a new run), and the settings: those of the run, under this command line's
    process settings."""
    if not requested.resume:
        return None, requested
    path, config, _ = unfinished(requested.resume, "distill", "minillm_teacher_mix_ratio", ROOT)
    try:
        values: dict[str, Any] = config | {"sampling": Sampling(**config["sampling"])}
        stored = DistillSettings(**values)
    except (TypeError, KeyError) as e:
        raise Refused(
            f"run.json: not the settings of a distillation of this version ({e})"
        ) from None
    merged, differing = merge_flags(
        *map(_flat, (requested, stored, DistillSettings(resume="-"))), free=FREE
    )
    if differing:
        raise Refused(f"--resume {path}: differs in {', '.join(differing)}; drop these flags")
    return path, replace(stored, **{name: merged[name] for name in FREE})


def _flat(settings: DistillSettings) -> dict[str, Any]:
    values = settings.as_dict()
    return values | values.pop("sampling")
