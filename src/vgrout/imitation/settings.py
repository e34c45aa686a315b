"""Settings of distillation and of iterative DPO.

Each gives a configuration of the trainer's, which checks most of them. No torch.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Literal, TypeVar, get_args

import tyro

from vgrout.config.checks import Dtype, Group, check, setting
from vgrout.config.env import EnvConfig
from vgrout.config.groups import (
    BENCHMARK_TRAIN,
    ORGANISM,
    EvalConfig,
    OptConfig,
    RunConfig,
    Sampling,
    ScaleConfig,
)
from vgrout.config.guard import GuardConfig, blind
from vgrout.config.method import MethodConfig
from vgrout.config.run import Config
from vgrout.config.world_names import EnvMode
from vgrout.ground import embedded
from vgrout.ground.errors import refuse
from vgrout.ground.files import Json
from vgrout.model.load.saved import FoundModel

MAX_VOCABULARY = 262_144

T = TypeVar("T", bound=Group)


def picked(group: type[T], values: Mapping[str, object]) -> T:
    """One of the trainer's groups of settings, with those of the values that are its fields'."""
    own: dict[str, object] = {}
    for f in fields(group):
        if f.name in values:
            own[f.name] = values[f.name]
    return group(**own)


@dataclass(frozen=True, kw_only=True)
class ImitationSettings:
    """Settings of training and prompts; `trainer_config` checks those that the trainer has too."""

    env_mode: EnvMode = "own"
    """Which flawed grader's hint stands in the prompts:
    one of the seven, or 'own' (each problem's, else in turn)."""
    n_problems: int = 1000
    """Training problems used, at most."""
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
    workers: int | None = setting(None, low=1)
    """Grading processes; none: one per core."""
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
PROCESS = {"threads", "workers", "track", "plan_only", "allow_weak_sandbox"}


# ── distillation

MethodName = Literal["minillm", "uld"]
METHOD_NAMES: tuple[MethodName, ...] = get_args(MethodName)


@dataclass(frozen=True, kw_only=True)
class DistillSettings(ImitationSettings):
    """Distil a teacher into a student."""

    teacher: str = ""
    """A model: a local folder, a downloaded hub id, 'organism';
    or an adapter: a run directory or its .safetensors."""
    student: str = "organism"
    """Like --teacher; training starts from it."""
    method: MethodName | None = None
    """minillm: reverse KL on the student's own samples, one tokenizer (arXiv 2306.08543) · uld:
    cross-entropy on the teacher's answers + λ · distance of the distributions, any tokenizers
    (arXiv 2402.12030); none: the one whose flags are given, else minillm."""
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
    minillm_pretrain_anchor_weight: float = setting(0.0, low=0, below=math.inf)
    """Weight of the language-model loss on a text file; 0: none."""
    minillm_pretrain_anchor_path: str = setting("", needs="minillm_pretrain_anchor_weight")
    """The text file."""
    uld_strategy: Literal["wasserstein", "topk_align"] = "wasserstein"
    """wasserstein: L1 distance of the two sorted probability vectors
    · topk_align: of tokens matched by their text, all others together as one."""
    uld_top_k: int | None = setting(None, low=1, high=MAX_VOCABULARY)
    """topk_align: how many of the teacher's likeliest tokens are matched."""
    uld_lambda: float = setting(1.5, low=0, below=math.inf)
    """λ, weight of the distance."""
    uld_ce_weight: float = setting(1.0, low=0, below=math.inf)
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
        refuse(
            self.full and self.dtype == "bf16",
            "--dtype bf16 with --full: a step on a weight is below bf16's rounding; leave one of "
            "them out",
        )
        refuse(
            not self.teacher and not self.resume,
            "--teacher: whose answers? Give a model, or a run directory",
        )
        refuse(
            not self.uld_lambda and not self.uld_ce_weight,
            "--uld-lambda 0 with --uld-ce-weight 0: the gradient is zero; raise one of them",
        )
        refuse(
            (self.uld_strategy == "topk_align") != (self.uld_top_k is not None),
            f"--uld-strategy {self.uld_strategy} with --uld-top-k {self.uld_top_k}: "
            "topk_align needs --uld-top-k, no other reads it",
        )

    def typed(self, argv: Sequence[str]) -> "DistillSettings":
        """These settings with the method that the command line means.

        Without --method it is the one whose flags the command line has, at whatever value; a
        resumed run keeps its own.

        Raises:
            Refused: a flag of the other method.
        """
        words = [word.partition("=")[0] for word in argv]
        flags_of: dict[MethodName, list[str]] = {}
        for name in METHOD_NAMES:
            own_flag = re.compile(rf"--(no[-_])?{name}[-_]")
            flags_of[name] = [word for word in words if own_flag.match(word)]
        with_flags = [name for name in METHOD_NAMES if flags_of[name]]
        method = self.method
        if method is None and with_flags:
            method = with_flags[0]
        elif method is None and not self.resume:
            method = "minillm"
        for name in with_flags:
            unread = ", ".join(flags_of[name])
            refuse(name != method, f"{unread}: not read by --method {method}; leave it out")
        return replace(self, method=method)

    @property
    def run_id(self) -> str:
        """The run's name, without the time."""
        kind = self.uld_strategy if self.method == "uld" else self.method
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
        0.1, above=0, below=math.inf, should="be positive (at 0 the gradient is zero)"
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
    decline_patience: int = 2
    """The guard fires after so many rounds in a row
    with a falling strict score and a rising scorer's mean."""
    max_proxy_real_gap: float = 0.10
    """It fires when the scorer's mean has gained so much more than the strict score,
    both as shares of their range."""

    def __post_init__(self) -> None:
        check(self)
        refuse(
            self.scorer not in ("flawed", "strict") and ":" not in self.scorer,
            f"--scorer {self.scorer}: flawed, strict, or your own function as module:function",
        )
        self.sampling.require_draws("--samples", self.samples)
        # before the first round is an evaluation too
        why = blind(self.watching(), self.rounds + 1, every=1, rules=("streak", "gap"), baseline=1)
        refuse(
            self.guard == "halt" and why is not None,
            f"--guard halt could not fire in {self.rounds} rounds: lower --max-proxy-real-gap or --decline-patience, "
            "or choose --guard log",
        )

    def watching(self) -> GuardConfig:
        """The guard's settings. It counts rounds; round 0, before any training, is its baseline."""
        return picked(GuardConfig, {**vars(self), "guard_warmup": 0})

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
