"""A distillation before its models are loaded.

Finds and checks the files, makes the plan, and finds the run to resume. No torch.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vgrout.config.run import Config
from vgrout.config.sampling import Sampling
from vgrout.config.stored import merge_flags
from vgrout.errors import Refused
from vgrout.files import file_sha256, read_text
from vgrout.imitation.settings import MAX_VOCABULARY, PROCESS, DistillSettings
from vgrout.model.saved import FoundModel, find_source
from vgrout.runs.inputs import Inputs
from vgrout.runs.preflight import disk_needed, preflight, require_disk
from vgrout.runs.run_dir import run_to_resume

ROOT = Path("out/distill")
# Settings that may differ when a run is resumed.
FREE = PROCESS | {"checkpoint_every", "checkpoint_keep"}


@dataclass(frozen=True)
class DistillTask:
    """Settings and files of a distillation, found and checked."""

    settings: DistillSettings
    cfg: Config  # the trainer's configuration, with every default resolved
    inputs: Inputs
    student: FoundModel
    teacher_model: FoundModel
    anchor: str  # text of the anchor file; "" without one

    def file_hashes(self) -> dict[str, str | None]:
        """sha256 of the input files; None where there is no such file."""
        path = self.settings.minillm_pretrain_anchor_path
        return {
            "problems": file_sha256(self.cfg.problems_path),
            "student": self.student.identity()["adapter"],
            "teacher": self.teacher_model.identity()["adapter"],
            "anchor": file_sha256(Path(path)) if path else None,
        }

    def disk(self) -> int:
        """About how many bytes the run writes; with --full, each saved student is a whole model."""
        need = disk_needed(self.cfg)
        shapes = self.student.shapes
        if not self.settings.full or shapes is None:
            return need
        every = self.cfg.eval.eval_ablate_every
        evaluations = self.cfg.scale.steps // every if every else 0
        saved_students = evaluations + 2
        # A checkpoint holds the weights and AdamW's two moments.
        checkpoints = 3 * (self.cfg.run.checkpoint_keep + 1)
        return need + 4 * shapes.parameters * (saved_students + checkpoints)

    def plan(self) -> dict[str, object]:
        """What the run would do, JSON-ready."""
        settings, cfg = self.settings, self.cfg
        models: dict[str, object] = {}
        for name, source in (("student", self.student), ("teacher", self.teacher_model)):
            models[name] = {"given": source.given, **source.identity()}
        problems: dict[str, object] = {"file": str(cfg.problems_path)}
        for split, part in self.inputs.environment.tasks().items():
            problems[split] = len(part)
        resolved = {"max_new": cfg.scale.max_new, "optimiser": asdict(cfg.opt)}
        return {
            "run": settings.run_id,
            "models": models,
            "problems": problems,
            "settings": settings.as_dict() | resolved,
            "answers": cfg.scale.steps * cfg.scale.prompts_per_step * settings.group,
            "disk_mib": max(1, self.disk() // 2**20),
        }


def prepare(settings: DistillSettings, run: Path | None) -> DistillTask:
    """Find and check everything. run: the directory of the run to resume.

    Raises:
        Refused: one line, for every mistake that shows without a model.
    """
    teacher_model = find_source(settings.teacher, "--teacher")
    student = find_source(settings.student, "--student")
    require_distillable(settings, student, teacher_model)
    cfg = settings.config(student)
    anchor = read_anchor(settings)
    inputs = preflight(cfg, run)
    if inputs.absent:  # of a plan, which is refused as the run would be
        raise Refused(inputs.absent[0])
    task = DistillTask(settings, cfg, inputs, student, teacher_model, anchor)
    if settings.full:
        require_disk(task.disk(), run or ROOT, run)
    return task


def require_distillable(
    settings: DistillSettings, student: FoundModel, teacher_model: FoundModel
) -> None:
    """Raise Refused if the files of the two models show that the method cannot use them.

    The loaded models are checked again, by the method's class.
    """
    minillm = settings.method == "minillm"
    same = (
        teacher_model.folder.resolve() == student.folder.resolve()
        and teacher_model.identity() == student.identity()
    )
    if same and minillm and not settings.minillm_pretrain_anchor_weight:
        raise zero_gradient(settings)
    for flag, source in (("--teacher", teacher_model), ("--student", student)):
        if source.shapes and source.shapes.vocab > MAX_VOCABULARY:
            raise Refused(
                f"{flag} {source.given}: {source.shapes.vocab} tokens, more than {MAX_VOCABULARY}"
            )
    if minillm and teacher_model.folder != student.folder:
        own, other = student.vocabulary(), teacher_model.vocabulary()
        if own and other and own != other:
            raise not_token_by_token(settings)


def read_anchor(settings: DistillSettings) -> str:
    """Text of the anchor file; "" without one.

    Raises:
        Refused: the anchor has a weight but no text.
    """
    path = settings.minillm_pretrain_anchor_path
    anchor = read_text(Path(path)) if Path(path).is_file() else ""
    if settings.minillm_pretrain_anchor_weight and not anchor.strip():
        flag = "--minillm-pretrain-anchor-path"
        if not path:
            raise Refused(f"{flag}: the weight needs a text file")
        raise Refused(f"{flag} {path}: no such file, or no text in it")
    return anchor


def not_token_by_token(settings: DistillSettings) -> Refused:
    """The refusal of a teacher whose tokens MiniLLM cannot compare with the student's."""
    return Refused(
        f"--teacher {settings.teacher}: has another tokenizer than --student {settings.student}, "
        "or logits for other tokens of it; MiniLLM compares them token by token: choose "
        "--method uld"
    )


def zero_gradient(settings: DistillSettings) -> Refused:
    """The refusal of a teacher that has the student's weights."""
    return Refused(
        f"--teacher {settings.teacher}: has the student's own weights, so the gradient is zero; "
        "give another teacher or student"
    )


# ── resuming


def find_resume(requested: DistillSettings) -> tuple[Path | None, DistillSettings]:
    """The run directory to continue and the settings; None and `requested` for a new run.

    A resumed run keeps its own settings, except those in FREE, which the command line may change.

    Raises:
        Refused: there is no such run, or the command line gives another setting than it had.
    """
    if not requested.resume:
        return None, requested
    path, config, _ = run_to_resume(requested.resume, "distill", "minillm_teacher_mix_ratio", ROOT)
    try:
        values: dict[str, Any] = config | {"sampling": Sampling(**config["sampling"])}
        stored = DistillSettings(**values)
    except (TypeError, KeyError) as e:
        raise Refused(
            f"run.json: not the settings of a distillation of this version ({e})"
        ) from None
    defaults = DistillSettings(resume="-")
    merged, differing = merge_flags(_flat(requested), _flat(stored), _flat(defaults), free=FREE)
    if differing:
        raise Refused(f"--resume {path}: differs in {', '.join(differing)}; drop these flags")
    return path, replace(stored, **{name: merged[name] for name in FREE})


def _flat(settings: DistillSettings) -> dict[str, object]:
    """The settings by name, those of sampling among the others."""
    values = settings.as_dict()
    return values | values.pop("sampling")
