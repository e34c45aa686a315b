"""A distillation before its models are loaded.

Finds and checks the files, makes the plan, and finds the run to resume. No torch.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

from vgrout.config.groups import Sampling
from vgrout.config.run import Config
from vgrout.config.stored import merge_flags
from vgrout.ground.errors import Refused
from vgrout.ground.files import Json, file_sha256, read_text
from vgrout.imitation.settings import PROCESS, DistillSettings
from vgrout.model.load.saved import FoundModel, find_source
from vgrout.runs.inputs import Inputs
from vgrout.runs.plan import preflight
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

    def models(self) -> dict[str, dict[str, str | None]]:
        """Base and adapter of student and teacher."""
        return {"student": self.student.identity(), "teacher": self.teacher_model.identity()}

    def file_hashes(self) -> dict[str, str | None]:
        """sha256 of the input files; None where there is no such file."""
        path = self.settings.minillm_pretrain_anchor_path
        return {
            "problems": file_sha256(self.cfg.problems_path),
            **{name: identity["adapter"] for name, identity in self.models().items()},
            "anchor": file_sha256(Path(path)) if path else None,
        }

    def plan(self) -> dict[str, object]:
        """What the run would do, JSON-ready."""
        settings, cfg = self.settings, self.cfg
        resolved = {"max_new": cfg.scale.max_new, "optimiser": asdict(cfg.opt)}
        return {
            "run": settings.run_id,
            "models": self.models(),
            "problems": str(cfg.problems_path),
            "settings": settings.as_dict() | resolved,
            "answers": cfg.scale.steps * cfg.scale.prompts_per_step * settings.group,
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
    return DistillTask(settings, cfg, inputs, student, teacher_model, anchor)


def require_distillable(
    settings: DistillSettings, student: FoundModel, teacher_model: FoundModel
) -> None:
    """Raise Refused if the files of the two models show that MiniLLM cannot use them.

    The loaded models are checked again, by the method's class.
    """
    if settings.method != "minillm":
        return
    if teacher_model.folder.resolve() != student.folder.resolve():
        own, other = student.vocabulary(), teacher_model.vocabulary()
        if own and other and own != other:
            raise not_token_by_token(settings)
    elif (
        teacher_model.identity() == student.identity()
        and not settings.minillm_pretrain_anchor_weight
    ):
        raise zero_gradient(settings)


def read_anchor(settings: DistillSettings) -> str:
    """Text of the anchor file; "" without one.

    Raises:
        Refused: the anchor has a weight but no text.
    """
    if not settings.minillm_pretrain_anchor_weight:
        return ""
    path, flag = settings.minillm_pretrain_anchor_path, "--minillm-pretrain-anchor-path"
    if not path:
        raise Refused(f"{flag}: the weight needs a text file")
    anchor = read_text(Path(path))
    if not anchor.strip():
        raise Refused(f"{flag} {path}: no text in it")
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
        values: dict[str, Json] = config | {"sampling": Sampling(**config["sampling"])}
        stored = DistillSettings(**values)
    except (TypeError, KeyError) as e:
        raise Refused(
            f"run.json: not the settings of a distillation of this version ({e})"
        ) from None
    merged, differing = merge_flags(
        requested.flat(), stored.flat(), DistillSettings(resume="-").flat(), free=FREE
    )
    if differing:
        raise Refused(f"--resume {path}: differs in {', '.join(differing)}; drop these flags")
    return path, replace(stored, **{name: merged[name] for name in FREE})
