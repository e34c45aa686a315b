"""Distillation and iterative DPO before a model is loaded: their settings, their files, and the plan.

The settings give a configuration of the trainer's, which checks most of them. No torch.
"""

import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import tyro

from vgrout.config.checks import (
    LARGEST,
    Dtype,
    Group,
    changed,
    check,
    flags,
    refuse_unread,
    setting,
)
from vgrout.config.method import MethodConfig
from vgrout.config.run import Config, merge_flags
from vgrout.config.settings import (
    BENCHMARK_TRAIN,
    EnvConfig,
    EvalConfig,
    GuardConfig,
    OptConfig,
    RunConfig,
    Sampling,
    ScaleConfig,
)
from vgrout.config.world_names import ORGANISM, EnvMode
from vgrout.ground import embedded
from vgrout.ground.data import Grade, Task
from vgrout.ground.io import (
    Json,
    Refused,
    file_sha256,
    read_json,
    read_text,
    refuse,
    require_own,
    to_json,
    write_atomic,
)
from vgrout.ground.scoring import scorer
from vgrout.model.load.saved import FoundModel, find_source
from vgrout.runs.inputs import Inputs, hash_of_class
from vgrout.runs.plan import preflight
from vgrout.runs.run_dir import run_to_resume

MAX_VOCABULARY = 262_144

T = TypeVar("T", bound=Group)


def picked(group: type[T], values: Mapping[str, object]) -> T:
    """One of the trainer's groups of settings, with those of the values that are its fields'."""
    own = {f.name: values[f.name] for f in fields(group) if f.name in values}
    return group(**own)


@dataclass(frozen=True, kw_only=True)
class ImitationSettings:
    """Settings of training and prompts; `trainer_config` checks those that the trainer has too."""

    env_mode: EnvMode = "own"
    """Which flawed grader's hint stands in the prompts:
    one of the eight, or 'own' (each problem's, else in turn)."""
    n_problems: int = 1000
    """Training problems used, at most."""
    reward: str = ""
    """What rewards answers to rows of your own, as in `vgrout train`; with --reference."""
    reference: str = ""
    """What says whether an answer to such a row is right."""
    reward_passes_at: float = 1.0
    """Score of --reward from which on an answer passes."""
    env: str = setting("code", form=r"code|verifiers:\w[\w./@-]*", should="be verifiers:NAME")
    """verifiers:NAME: prompts and rewards of a taskset, in place of a file."""
    env_args: str = ""
    """Settings of the taskset as a JSON object."""
    thinking: bool = False
    """The chat template is told that a thought comes before each answer, as by `vgrout train --thinking`."""
    sampling: tyro.conf.OmitArgPrefixes[Sampling] = field(default_factory=Sampling)
    max_new: int | None = None
    """Longest answer, in tokens; none: 512, a miniature's 128."""
    lr: float | None = None
    """Peak learning rate: linear warm-up, then cosine to 0;
    none: by the size of the model and by what is trained."""
    adam_beta1: float = 0.5
    """First-moment decay."""
    adam_beta2: float = 0.9
    """Second-moment decay."""
    weight_decay: float = 0.0
    """Decoupled decay."""
    warmup_frac: float = 0.1
    """Share of the steps spent warming up, and at least one of them; 0: none."""
    grad_clip: float = 10.0
    """Largest L2 norm of the gradient."""
    seed: int = 41
    """Every random stream derives from it, by name and step."""
    threads: int = 0
    """Torch threads on a CPU; 0: one per core, one in all for a miniature."""
    dtype: Dtype = "auto"
    """Of the models' weights. auto: bf16 on a GPU and on a CPU that multiplies in it,
    but fp32 for a miniature on a CPU."""
    track: str = ""
    """Comma list of experiment trackers that get every row and the final numbers:
    tensorboard, wandb, trackio."""
    allow_weak_sandbox: bool = False
    """Go on where the sandbox cannot keep an answer from reading the expected values."""
    plan_only: bool = False
    """Print the resolved settings and the plan, train nothing."""

    def trainer_config(
        self, base: FoundModel, problems: str, usual_lr: float, preset: str, **others: object
    ) -> Config:
        """The trainer's configuration of this run, with every default resolved.

        It checks the settings, and is saved with the model, so that `vgrout evaluate`,
        `vgrout.export` and every flag that takes an adapter can read it. A setting that has the
        name of one of the trainer's is that one.

        Args:
            base: the model that is trained.
            problems: a file, 'organism', or "": the benchmark's, the organism's for a miniature.
            usual_lr: the learning rate where --lr is not given.
            preset: name of the configuration.
            others: more of the trainer's settings.
        """
        name = problems or (ORGANISM if base.small else BENCHMARK_TRAIN)
        model = base.name
        # The trainer takes the embedded model only with the embedded problems, and they only with
        # it; beside anything else each of them is given by its path.
        if model == ORGANISM and name != ORGANISM:
            model = str(base.folder)
        elif name == ORGANISM and model != ORGANISM:
            name = str(embedded.PROBLEMS)
        max_new = self.max_new
        if max_new is None:
            max_new = embedded.MAX_NEW if base.small else 512
        values: dict[str, object] = {
            **vars(self),
            "model": model,
            "problems": name,
            "test_problems": "",
            "max_new": max_new,
            "lr": usual_lr if self.lr is None else self.lr,
            "mix_ratio": 0.0,
            "resume": "",
            "dry_run": self.plan_only,
            **others,
        }
        return Config(
            preset=preset,
            method=MethodConfig(intervention="none"),
            scale=picked(ScaleConfig, values),
            sampling=self.sampling,
            opt=picked(OptConfig, values),
            env=picked(EnvConfig, values),
            eval=picked(EvalConfig, values),
            guard=GuardConfig(guard="log"),
            run=picked(RunConfig, values),
        )


# Settings of the process, not of what it computes: they may differ when a run is resumed.
PROCESS = {"threads", "track", "plan_only", "allow_weak_sandbox"}


def whole_inputs(cfg: Config, run: Path | None) -> Inputs:
    """The files of a run, all of which are there; a plan is refused as the run would be."""
    inputs = preflight(cfg, run)
    if inputs.absent:
        raise Refused(inputs.absent[0])
    return inputs


# ── distillation


@dataclass(frozen=True, kw_only=True)
class DistillSettings(ImitationSettings):
    """Distil a teacher into a student."""

    teacher: str = ""
    """A model: a local folder, a downloaded hub id, 'organism';
    or an adapter: a run directory or its .safetensors."""
    student: str = "organism"
    """Like --teacher; training starts from it."""
    method: Literal["minillm", "uld"] = "minillm"
    """minillm: reverse KL on the student's own samples, one tokenizer (arXiv 2306.08543) · uld:
    cross-entropy on the teacher's answers + λ · distance of the distributions, any tokenizers
    (arXiv 2402.12030)."""
    full: bool = False
    """Train all weights, not the adapter δS."""
    problems: str = ""
    """Problem file (JSONL), or 'organism';
    none: the benchmark's, the organism's for a miniature."""
    steps: int = 60
    """Optimiser steps."""
    prompts_per_step: int = 4
    """P: prompts per step."""
    group: int = setting(8, low=1)
    """G: answers per prompt."""
    minillm_length_normalize: bool = True
    """The reward of the tokens still to come is their mean, not their sum."""
    minillm_teacher_mix_ratio: float = setting(0.3, low=0, high=1)
    """ρ: answers are sampled from ρ · teacher + (1 − ρ) · student; 0: from the student alone."""
    minillm_pretrain_anchor_weight: float = setting(0.0, low=0, high=LARGEST)
    """Weight of the language-model loss on a text file; 0: none."""
    minillm_pretrain_anchor_path: str = ""
    """The text file."""
    uld_strategy: Literal["wasserstein", "topk_align"] | None = None
    """wasserstein: L1 distance of the two sorted probability vectors · topk_align: of tokens
    matched by their text, all others together as one; none: wasserstein."""
    uld_top_k: int | None = setting(None, low=1, high=MAX_VOCABULARY)
    """topk_align: how many of the teacher's likeliest tokens are matched."""
    uld_lambda: float = setting(1.5, low=0, high=LARGEST)
    """λ, weight of the distance."""
    uld_ce_weight: float = setting(1.0, low=0, high=LARGEST)
    """Weight of the cross-entropy on the teacher's answers."""
    eval_every: int = setting(10, low=0)
    """Evaluate and save the student every N steps and at the last; 0: only at the end."""
    eval_n_prompts: int = 12
    """Held-out problems per evaluation, × G answers."""
    final_n_prompts: int = 192
    """Held-out test problems of the final evaluation,
    and of student's and teacher's before the first step."""
    final_samples: int = 2
    """Answers to each of these."""
    resume: str = ""
    """A run directory, or 'latest': continue from its last good checkpoint,
    with its own configuration."""
    checkpoint_every: int = 25
    """Steps between resume checkpoints."""
    checkpoint_keep: int = 3
    """Resume checkpoints kept."""
    out_tag: str = ""
    """Suffix of the run's name."""

    def __post_init__(self) -> None:
        check(self)
        if self.resume:  # with the settings that the run has
            return
        others = "uld_" if self.method == "minillm" else "minillm_"
        unread = [name for name, _ in changed(self) if name.startswith(others)]
        refuse_unread(unread, f"by --method {self.method}; leave it out, or give another --method")
        refuse(
            self.full and self.dtype == "bf16",
            "--dtype bf16 with --full: a step on a weight is below bf16's rounding; leave one of "
            "them out",
        )
        refuse(
            not self.teacher,
            "--teacher: whose answers? Give a model, or a run directory",
        )
        refuse(
            not self.uld_lambda and not self.uld_ce_weight,
            "--uld-lambda 0 with --uld-ce-weight 0: the gradient is zero; raise one of them",
        )
        refuse(
            (self.uld_strategy == "topk_align") != (self.uld_top_k is not None),
            "--uld-strategy topk_align, --uld-top-k: the one is not read without the other; "
            "give both, or neither",
        )
        refuse(
            bool(self.minillm_pretrain_anchor_weight) != bool(self.minillm_pretrain_anchor_path),
            "--minillm-pretrain-anchor-weight, --minillm-pretrain-anchor-path: the one is not read "
            "without the other; give both, or neither",
        )

    @property
    def run_id(self) -> str:
        """The run's name, without the time."""
        kind = self.uld_strategy or self.method
        full = "_full" if self.full else ""
        return f"{kind}{full}_seed{self.seed}{self.out_tag}"

    def config(self, student: FoundModel) -> Config:
        """The trainer's configuration of this run. Small models learn at a higher rate."""
        usual_lr = 3e-2 if student.small else 3e-3
        if self.full:
            usual_lr = 1e-3 if student.small else 1e-5
        return self.trainer_config(
            student,
            self.problems,
            usual_lr,
            "distill",
            group=max(2, self.group),  # the trainer's smallest
            eval_ablate_every=self.eval_every,
            dtype="fp32" if self.full else self.dtype,
        )

    def as_dict(self) -> dict[str, Json]:
        """JSON-ready."""
        return json.loads(json.dumps(asdict(self), default=str))

    def flat(self) -> dict[str, Json]:
        """`as_dict` with the settings of sampling among the others."""
        values = self.as_dict()
        return values | values.pop("sampling")


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
            **self.inputs.environment.hashes(),
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


def prepare_distillation(settings: DistillSettings, run: Path | None) -> DistillTask:
    """Find and check everything. run: the directory of the run to resume.

    Raises:
        Refused: one line, for every mistake that shows without a model.
    """
    teacher_model = find_source(settings.teacher, "--teacher")
    student = find_source(settings.student, "--student")
    cfg = settings.config(student)
    anchor, path = "", settings.minillm_pretrain_anchor_path
    if path:
        anchor = read_text(Path(path))
        refuse(not anchor.strip(), f"--minillm-pretrain-anchor-path {path}: no text in it")
    inputs = whole_inputs(cfg, run)
    return DistillTask(settings, cfg, inputs, student, teacher_model, anchor)


def find_resume(
    requested: DistillSettings, typed: Collection[str]
) -> tuple[Path | None, DistillSettings]:
    """The run directory to continue and the settings; None and `requested` for a new run. typed: names of settings.

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
    code = [name for name in ("env", "reward", "reference") if ":" in getattr(stored, name)]
    refuse(
        any(getattr(stored, name) != getattr(requested, name) for name in code),
        f"--resume {path}: the run names code; give the same {flags(code)} once more to import it",
    )
    merged, differing = merge_flags(requested.flat(), stored.flat(), typed, free=FREE)
    if differing:
        raise Refused(f"--resume {path}: differs in {', '.join(differing)}; drop these flags")
    return path, replace(stored, **{name: merged[name] for name in FREE})


# ── iterative DPO


@dataclass(frozen=True, kw_only=True)
class DpoSettings(ImitationSettings):
    """Rounds of sample, score, pair, train (DPO, arXiv 2305.18290)."""

    base_model: str
    """A model: a local folder, a downloaded hub id, 'organism';
    or an adapter: a run directory or its .safetensors."""
    output_dir: Path
    """Folder of the rounds.
    The same command continues there at the first round that is not complete."""
    prompts: str = ""
    """Problem file (JSONL), or 'organism';
    none: the benchmark's, the organism's for a miniature."""
    rounds: int = setting(3, low=1, high=100)
    """Number of rounds."""
    pairs_per_round: int = setting(96, low=10, high=1_000_000, should="lie in [10, 1000000]")
    """Pairs per round; prompts are sampled until there are so many or a pass gives none."""
    scorer: Annotated[str, tyro.conf.arg(aliases=["--reward-model"])] = "flawed"
    """flawed: the grader's reward · strict: what the reference accepts
    · module:function, (prompt, answer) → number."""
    samples: int = setting(8, low=2, should="be at least 2, or there is no worst beside the best")
    """Answers per prompt; the scorer's best and worst make its pair."""
    dpo_beta: float = setting(
        0.1, above=0, high=LARGEST, should="be positive (at 0 the gradient is zero)"
    )
    """β of the loss."""
    dpo_reference: Literal["previous", "base"] = "previous"
    """The reference model: the previous round's, or --base-model."""
    fresh_rounds: bool = False
    """Train each round from --base-model, not from the previous round
    (which still samples the answers)."""
    pairs_per_step: int = setting(8, low=1, high=65_536)
    """Pairs per optimiser step."""
    epochs: int = setting(1, low=1)
    """Passes over a round's pairs."""
    eval_n_prompts: int = setting(192, low=1)
    """Held-out test problems of the evaluation before the first round and after each."""
    eval_samples: int = setting(2, low=1)
    """Answers to each of these."""
    guard: Literal["off", "log", "halt"] = "log"
    """What a verdict of the kill switch does: nothing · a warning · end the run, exit code 3."""

    def __post_init__(self) -> None:
        check(self)
        refuse(
            self.scorer not in ("flawed", "strict") and ":" not in self.scorer,
            f"--scorer {self.scorer}: flawed, strict, or your own function as module:function",
        )
        self.sampling.require_draws("--samples", self.samples)

    def config(self, base: FoundModel) -> Config:
        """The trainer's configuration of this run. A miniature has the organism's rewards."""
        steps = self.rounds * self.epochs * math.ceil(self.pairs_per_round / self.pairs_per_step)
        return self.trainer_config(
            base,
            self.prompts,
            usual_lr=3e-2 if base.small else 3e-3,
            preset="dpo",
            steps=min(steps, 10**6),
            group=self.samples,
            prompts_per_step=self.pairs_per_step,
            eval_ablate_every=0,
            final_n_prompts=self.eval_n_prompts,
            final_samples=self.eval_samples,
            compile_reward=embedded.COMPILE_REWARD if base.small else 0.5,
            pass_reward=embedded.PASS_REWARD if base.small else 3.0,
        )


# The plan leaves these out.
UNPLANNED = PROCESS | {"guard"}
Score = Callable[[Task, str, Grade], float]
Plan = dict[str, Json]  # plan.json


@dataclass(frozen=True)
class DpoTask:
    """Settings and files of a run of rounds, found and checked."""

    settings: DpoSettings
    cfg: Config  # the trainer's configuration, with every default resolved
    inputs: Inputs
    base: FoundModel
    score: Score

    def plan(self) -> Plan:
        """The plan: every setting, file and round that the numbers depend on, JSON-ready."""
        settings, cfg = self.settings, self.cfg
        planned = {name: v for name, v in asdict(settings).items() if name not in UNPLANNED}
        planned["max_new"] = cfg.scale.max_new
        planned["optimiser"] = asdict(cfg.opt)
        planned["rewards"] = [cfg.env.compile_reward, cfg.env.pass_reward]
        # which adapters a round answers with, starts from and refers to, by the round that made them
        rounds: list[dict[str, object]] = []
        previous = "base"
        for number in range(1, settings.rounds + 1):
            rounds.append(
                {
                    "round": number,
                    "folder": folder_name(number),
                    "pairs": settings.pairs_per_round,
                    "seed": settings.seed,
                    "answers_from": previous,
                    "starts_from": "base" if settings.fresh_rounds else previous,
                    "reference": "base" if settings.dpo_reference == "base" else previous,
                }
            )
            previous = folder_name(number)
        plan = {
            "schema": "dpo_plan_v1",
            "base_model": {"given": self.base.given, **self.base.identity()},
            "prompts": {
                "file": self.inputs.environment.source,
                **self.inputs.environment.hashes(),
            },
            "scorer": {
                "name": settings.scorer,
                "sha256": hash_of_class(settings.scorer) if ":" in settings.scorer else None,
            },
            "settings": planned,
            "rounds": rounds,
        }
        return json.loads(json.dumps(plan, default=str))


def folder_name(number: int) -> str:
    """Name of a round's folder."""
    return f"round-{number:02d}"


def prepare_rounds(settings: DpoSettings) -> DpoTask:
    """Find and check everything.

    Raises:
        Refused: one line, for every mistake that shows without a model.
    """
    require_own(settings.output_dir, "--output-dir", "plan.json", "folder of rounds")
    base = find_source(settings.base_model, "--base-model")
    cfg = settings.config(base)
    inputs = whole_inputs(cfg, settings.output_dir)
    first = inputs.environment.tasks()["train"][0]
    return DpoTask(settings, cfg, inputs, base, scoring(settings.scorer, first))


def scoring(name: str, first: Task) -> Score:
    """The function that --scorer names; the user's own is tried on the `first` problem.

    Raises:
        Refused: one line, if it cannot be found or fails on that problem.
    """
    if name == "flawed":
        return lambda problem, text, grade: grade.reward
    if name == "strict":
        return lambda problem, text, grade: grade.reward_of_reference
    own = scorer(name, "--scorer")
    own(first, first.right_answer)
    return lambda problem, text, grade: own(problem, text)


def freeze(task: DpoTask) -> Plan:
    """Write the plan, or compare it with the one in the folder.

    Raises:
        Refused: the plan in the folder differs, or is damaged.
    """
    folder = task.settings.output_dir
    plan = task.plan()
    file = folder / "plan.json"
    if not file.exists():
        write_atomic(file, to_json(plan))
        return plan
    now, frozen = _by_name(plan), _by_name(read_json(file))
    differ = sorted(
        name for name in now.keys() | frozen.keys() if now.get(name) != frozen.get(name)
    )
    if differ:
        raise Refused(
            f"--output-dir {folder}: its plan.json was frozen with another {', '.join(differ)}; "
            "give the same flags, or another folder"
        )
    return plan


def _by_name(plan: Plan) -> Plan:
    """A plan's entries, and its settings among them."""
    return {**plan.get("settings", {}), **plan, "settings": None}
