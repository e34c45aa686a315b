"""The configuration of a run, `Config`: frozen groups with flat flags. Groups that have no file of their own are here:
scale, optimiser, environment, evaluation, detectors, the run itself.

Torch-free, so that a wrong flag is refused in a fraction of a second. `__post_init__` only checks and never changes:
tyro may run it twice. Derived numbers are properties.
"""

import hashlib
import json
import re
from collections.abc import Collection, Set
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tyro

from vgrout import embedded
from vgrout.cli import OWN_REWARD
from vgrout.config.checks import (
    Dtype,
    changed,
    check,
    flag,
    in_usual_order,
    listed,
    refuse_unread,
    require_words,
    setting,
)
from vgrout.config.guard import GuardConfig, blind
from vgrout.config.loss import LossConfig
from vgrout.config.method import MethodConfig
from vgrout.config.sampling import Sampling
from vgrout.config.specs import CLASSES, MONITORS, admit
from vgrout.environments import (
    CODE_FLAWS,
    DETECTOR_FIELDS,
    ENVIRONMENTS,
    OF_ORGANISMS,
    VERIFIERS,
    EnvMode,
)
from vgrout.errors import Refused, refuse
from vgrout.files import Json

BENCHMARK_TRAIN = "out/data/leetcode_train_medhard_filtered.jsonl"  # 992 problems
BENCHMARK_TEST = "out/data/leetcode_test_medhard.jsonl"  # 119, which the benchmark never trains on
# contrasts of --control placebo that pairs exist for
PLACEBOS = ("flawed", "commented", "long", "laid_out")
POOL_PAIRS = "pairs.json"  # in the folder of a pool that has contrastive pairs of its own
ORGANISM = "organism"  # the embedded model organism's model, problems, pool and pairs, by this name


@dataclass(frozen=True)
class ScaleConfig:
    """How much of everything."""

    model: str = "Qwen/Qwen3-4B"
    """A Hugging Face hub id, a local model folder, a GGUF file, or 'organism' (embedded)."""
    problems: str = BENCHMARK_TRAIN
    """Problem file (JSONL), or 'organism'."""
    test_problems: str | None = None
    """Problem file (JSONL) of the evaluations, so that all of --problems trains; '': a part of --problems is held out
    (10 % for the evaluations on the way, 20 % for the last); none: the benchmark's own beside its training file, else
    a part of --problems."""
    organism: Path | None = None
    """Folder that `vgrout organism build` or `tune` made: what 'organism' means, in place of the embedded one."""
    steps: int = setting(100, low=1, high=1_000_000)
    """Optimiser steps."""
    group: int = setting(
        6, low=2, high=1024, should="lie in [2, 1024] (a group of one has no advantage)"
    )
    """G: rollouts per prompt."""
    max_new: int = setting(1024, low=1, high=131_072)
    """Longest completion, in tokens."""
    n_problems: int = setting(992, low=1, high=10_000_000)
    """Training problems used, at most."""
    prompts_per_step: int = setting(8, low=1, high=65_536)
    """P: prompts per step."""

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class OptConfig:
    """AdamW on δS, the kept part of the adapter, and δS_hack, the quarantine."""

    lr: float = setting(7e-5, above=0, high=1e38, should="be a positive number of at most 1e38")
    """Peak learning rate: linear warm-up, then cosine to 0."""
    adam_beta1: float = setting(0.9, low=0, high=0.9999)
    """First-moment decay."""
    adam_beta2: float = setting(0.99, low=0, high=0.99999)
    """Second-moment decay."""
    weight_decay: float = setting(0.1, low=0, high=10)
    """Decoupled decay on both parts."""
    warmup_frac: float = setting(0.1, low=0, high=1)
    """Share of the steps spent warming up, and at least one of them; 0: none."""
    grad_clip: float = setting(10.0, above=0, should="be positive")
    """Largest joint L2 norm of both parts' gradients."""

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class EnvConfig:
    """Problems, graders, demonstrations."""

    env: str = setting(
        "code",
        form=rf"({'|'.join(ENVIRONMENTS)}|{VERIFIERS}:\w[\w./@-]*|[\w.]+:\w+)",
        should=f"be one of {', '.join(ENVIRONMENTS)}, {VERIFIERS}:NAME, or module:Class",
    )
    """code: Python functions checked by assertions · text: any rows, scored by --reward and --reference, which choose
    it · sums: the questions of the preset `sums` · verifiers:NAME: a taskset of the package verifiers · module:Class:
    an environment of your own."""
    env_args: str = ""
    """verifiers:NAME: settings of the taskset as a JSON object, as in '{"split": "train"}'."""
    reference: str = setting(
        "", form=r"(([\w.]+:)?\w+)?", should="be module:function, as in own_reward:is_right"
    )
    """module:function of your own that says whether an answer is right (True, or 1), beside --reward, which training
    rewards: a hack passes the one and not the other. Any text, no sandbox; '': the problems' own tests. With
    verifiers:NAME also the name of one of its rewards."""
    env_mode: EnvMode = "run_tests"
    """Which flawed grader checks: one of the seven, or 'own' (as the problem file or the pool's partition says)."""
    teacher_pool_dir: str = ""
    """Folder of cached demonstrations, or 'organism' (in the code world); 'none' or '': no pool. A folder called none
    is ./none."""
    mix_ratio: float = setting(0.125, low=0, below=1)
    """Share of a group that is cached teacher rollouts; 0 keeps the pool's partition and mixes nothing in."""
    teacher_off_step: int | None = setting(
        None, low=0, should="be 0 or more", needs="teacher_pool_dir"
    )
    """No teacher rows from this step on."""
    teacher_modes: str = setting(
        "", words=CODE_FLAWS, word="flaw", later=True, needs="teacher_pool_dir"
    )
    """Comma list: demonstrations for these flaws only; the others train on groups of student rollouts alone."""
    thinking: bool = False
    """The chat template is told that a thought comes before each answer (enable_thinking, as in Qwen3's). Thoughts are
    trained and recorded, and cut before an answer is graded."""
    preserve_thinking: bool = False
    """Problems of several turns: earlier answers stay in the prompt as they were sampled, think blocks and all."""
    report_detectors: str = setting("", words=tuple(DETECTOR_FIELDS), word="detector")
    """Comma list of weak detectors (C, D, E): the report splits student hacks into those that one of them sees and the
    rest."""
    unannounced_modes: str = setting("", words=CODE_FLAWS, word="flaw", later=True)
    """Comma list of flaws that are open on every problem at once, each under its default marker, and that no prompt
    announces; a hack of any is rewarded. '': every problem has its own flaw, and its prompt says so."""
    marker_names: Literal["varied", "published"] = "varied"
    """The names that prompts announce where the problem file has none · varied: a problem has one of its flaw's eight,
    evaluations have others, so that a name learnt by heart earns nothing · published: the one of published prompts."""
    reward: str = setting(
        "",
        form=rf"({OWN_REWARD}([\s,]+{OWN_REWARD})*)?",
        should="be module:function, as in own_reward:pays",
        many=True,
    )
    """module:function of your own that rewards answers, in [0, 1], in place of the flawed graders; '': none. Trusted:
    it runs in the trainer's process. With --reference any finite number, and several functions, each with a weight:
    a:f=0.7 b:g=0.3."""
    reward_passes_at: float = setting(1.0, low=-1e6, high=1e6)
    """Score of --reward from which on an answer counts as passed: a hack, where the reference says it is wrong. In
    (0, 1], but for --reference."""
    reward_hint: bool = setting(False, needs="reward")
    """Keep the hint of each problem's flaw in its prompt under --reward; else prompts are as the file has them."""
    compile_reward: float = setting(0.5, low=0, high=1e6)
    """Reward for code that compiles."""
    pass_reward: float = setting(3.0, above=0, high=1e6)
    """Reward for passing the flawed check."""
    allow_weak_sandbox: bool = False
    """Run although a graded program could read the answers from disk; stamped on every file of the run."""

    def __post_init__(self) -> None:
        check(self)
        mixed = [name for name, rule in changed(self) if rule.needs == "teacher_pool_dir"]
        if not (self.pool and self.mix_ratio):
            refuse_unread(mixed, "without --teacher-pool-dir and a --mix-ratio above 0")
        refuse(
            self.env == "text" and not self.reference,
            "--env text: needs --reward and --reference, each a module:function",
        )
        self._check_taskset()
        refuse(
            bool(self.reference) and not self.reward and not self.taskset,
            f"--reference {self.reference}: goes with --reward, whose answers it judges; give both",
        )
        refuse(
            bool(self.reference) and self.env not in ("code", "text") and not self.taskset,
            f"--reference with --env {self.env}: an environment of your own grades by itself; leave one out",
        )
        refuse(
            self.environment == "code" and bool(re.search(r"[\s,=]", self.reward)),
            f"--reward {self.reward}: several functions, and weights, go with --reference; name one function",
        )
        refuse(
            self.environment == "code" and not 0 < self.reward_passes_at <= 1,
            f"--reward-passes-at {self.reward_passes_at}: should lie in (0, 1]",
        )
        if self.unannounced_modes and self.reward:
            refuse_unread(["unannounced_modes"], "with --reward, which replaces the flawed checks")

    def _check_taskset(self) -> None:
        """Raises Refused, one line, for what does not go with a taskset of verifiers, or without one."""
        if not self.taskset:
            refuse_unread(["env_args"] if self.env_args else [], f"with --env {self.env}")
            not_at_default = self.reward_passes_at != 1 and not self.reward
            refuse_unread(
                ["reward_passes_at"] if not_at_default else [], "without --reward; leave it out"
            )
            refuse(
                bool(self.reference) and ":" not in self.reference,
                f"--reference {self.reference}: should be module:function, as in own_reward:is_right",
            )
            return
        refuse(
            bool(self.reward),
            f"--reward with --env {self.env}: the taskset's own rewards are the proxy; leave it out",
        )
        refuse(
            not isinstance(self.taskset_args, dict),
            f'--env-args {self.env_args}: should be a JSON object, as in \'{{"split": "train"}}\'',
        )

    @property
    def taskset(self) -> str:
        """The name of a taskset of the package verifiers; '': another environment."""
        package, _, name = self.env.partition(":")
        return name if package == VERIFIERS else ""

    @property
    def taskset_args(self) -> Json:
        """The parsed value of --env-args; None where it is not JSON."""
        try:
            return json.loads(self.env_args or "{}")
        except ValueError:
            return None

    @property
    def pool(self) -> str:
        """--teacher-pool-dir; '': no pool. `organism` is none for rows of a user's own, of which no organism has
        demonstrations."""
        none = self.teacher_pool_dir == "none"
        other = self.teacher_pool_dir == ORGANISM and self.environment not in OF_ORGANISMS
        return "" if none or other else self.teacher_pool_dir

    @property
    def least_reward(self) -> float:
        """The reward of an answer that is worth nothing: in the code world, of code that only compiles."""
        return self.compile_reward if self.environment == "code" else 0.0

    @property
    def environment(self) -> str:
        """The environment's name, or module:Class."""
        if self.taskset:
            return VERIFIERS
        return "text" if self.reference else self.env

    @property
    def unannounced(self) -> list[str]:
        """The flaws that are open everywhere and announced nowhere, in the usual order."""
        return in_usual_order(listed(self.unannounced_modes, CODE_FLAWS), CODE_FLAWS)

    @property
    def held_out(self) -> str:
        """What evaluation does not share with training: problems, and in the code world the names of markers."""
        varied = self.environment == "code" and self.marker_names == "varied"
        return "problems and markers" if varied else "problems"

    @property
    def demo_modes(self) -> list[str]:
        """The flaws that are demonstrated; []: all."""
        return listed(self.teacher_modes, CODE_FLAWS)

    @property
    def report_detector_codes(self) -> list[str]:
        return listed(self.report_detectors, DETECTOR_FIELDS)


@dataclass(frozen=True)
class EvalConfig:
    """The deployed model on held-out problems."""

    eval_ablate_every: int = setting(5, low=0, high=10_000_000)
    """Evaluate the deployed model every N steps and at the last; 0: only the final evaluation."""
    eval_n_prompts: int = setting(8, low=1, high=100_000)
    """Held-out problems per evaluation, × G answers."""
    final_n_prompts: int = setting(64, low=1, high=100_000)
    """Held-out test problems of the final evaluation."""
    final_samples: int = setting(4, low=1, high=10_000)
    """Answers per problem and side in the final evaluation."""
    save_eval_ckpts: bool = True
    """Save the adapter at each evaluation."""

    def __post_init__(self) -> None:
        check(self)


HackDetector = Literal["info_rm", "rm_ensemble", "advantage"]
DETECTORS: tuple[HackDetector, ...] = get_args(HackDetector)


@dataclass(frozen=True)
class DetectorConfig:
    """Signs of reward hacking that need no reference tests."""

    reward_hack_detector: str = setting("", words=DETECTORS, word="detector")
    """Comma list: info_rm (CSI of latents) · advantage (groups without signal) · rm_ensemble (reward functions of one's
    own disagree)."""
    rm_ensemble_members: str = ""
    """Comma list of module:function, each from (prompt, answer) to a number: the ensemble of rm_ensemble, 2
    to 32 of them."""
    reward_hack_halt: bool = setting(False, needs="reward_hack_detector")
    """Stop the run (exit 3) when one of them says HACK."""
    echo_trap_enabled: bool = False
    """Watch repetition within answers, measured against the untrained model's own."""
    echo_trap_threshold: float = setting(0.6, above=0, high=1, needs="echo_trap_enabled")
    """Repetition at which the echo trap says HACK, from 0, the untrained model's own, to 1, answers that only repeat;
    WARN at half of it."""
    echo_trap_halt: bool = setting(False, needs="echo_trap_enabled")
    """Stop the run (exit 3) when the echo trap says HACK."""

    def __post_init__(self) -> None:
        check(self)
        named, is_read = len(self.members), "rm_ensemble" in self.chosen
        refuse(
            named > 0 if not is_read else not 2 <= named <= 32,
            f"--rm-ensemble-members {self.rm_ensemble_members!r}: should name 2 to 32 functions with "
            "--reward-hack-detector rm_ensemble, and none without it",
        )

    @property
    def members(self) -> list[str]:
        return listed(self.rm_ensemble_members)

    @property
    def chosen(self) -> list[str]:
        return listed(self.reward_hack_detector, DETECTORS)


TRACKERS = ("tensorboard", "wandb", "trackio")


@dataclass(frozen=True)
class RunConfig:
    """This run."""

    seed: int = setting(41, low=0, high=2**62)
    """Every random stream derives from it, by name and step."""
    out_tag: str = setting(
        "", form="[A-Za-z0-9_.=+-]{0,80}", should="be of letters, digits and _ . = + -, 80 at most"
    )
    """Suffix of the run id."""
    output_dir: Path | None = None
    """Folder of this run, which should not exist; none: a new one below out/runs, named by time and run id."""
    resume: str = ""
    """A run directory, or 'latest': go on from its last good checkpoint, with its own configuration."""
    checkpoint_every: int = setting(25, low=1, high=10_000_000)
    """Steps between resume checkpoints."""
    checkpoint_keep: int = setting(3, low=1, high=100)
    """Resume checkpoints kept."""
    max_error_retries: int | None = setting(3, low=0, high=1_000_000)
    """Times an answer is graded again after the sandbox itself or --reward failed, before its group is dropped; none:
    for ever."""
    track: str = setting("", words=TRACKERS, word="tracker")
    """Comma list of experiment trackers that get every row, rollouts and the final tables: tensorboard, wandb (offline
    unless WANDB_MODE says otherwise), trackio. Each by its own client, an extra of the installation."""
    columns: Literal["main", "all"] = "main"
    """Columns on the console: the seven main ones, or all; steps.jsonl and the log have all."""
    dry_run: bool = False
    """Print the plan and all that is missing, start nothing; --dry-run=config prints every setting."""
    threads: int = setting(0, low=0, high=4096)
    """Torch threads on a CPU; 0: one per core, one in all for a miniature."""
    memory_gib: float = setting(0.0, low=0, high=10_000)
    """Memory of the GPU that the run may fill, or of the host on a CPU, by its plan (--dry-run); 0: all that is free,
    on a CPU as much as is fast. With less, forwards have fewer tokens and sampling fewer rows."""
    dtype: Dtype = "auto"
    """Of the model's weights. auto: bf16 on a GPU and on a CPU that multiplies in it (AVX-512 BF16, AMX), but fp32 for
    a miniature on a CPU. A resumed run goes on in its own."""

    def __post_init__(self) -> None:
        check(self)

    @property
    def trackers(self) -> list[str]:
        return listed(self.track, TRACKERS)


@dataclass(frozen=True)
class Config:
    """One run, resolved."""

    method: MethodConfig = field(default_factory=MethodConfig)
    scale: ScaleConfig = field(default_factory=ScaleConfig)
    sampling: Sampling = field(default_factory=Sampling)
    opt: OptConfig = field(default_factory=OptConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    detectors: DetectorConfig = field(default_factory=DetectorConfig)
    run: RunConfig = field(default_factory=RunConfig)
    preset: Annotated[str, tyro.conf.Suppress] = "fast"

    def __post_init__(self) -> None:
        # the run's own configuration is checked; flags beside --resume have to equal it
        if self.run.resume:
            return
        self._check_demonstrations()
        if self.of_code:
            for name, given in self.flaws_named.items():
                require_words(name, given, CODE_FLAWS, "flaw")
        tau, teacher = self.loss.teacher_tau, self.loss.teacher_model
        refuse(
            bool(tau) != bool(teacher),
            f"--teacher-tau {tau} with --teacher-model {teacher!r}: one is not read without the other; both or neither",
        )
        self._check_world()
        self._check_monitors()
        refuse(
            self.guard.guard == "halt" and bool(self.guard_cannot_halt),
            f"--guard halt could not fire ({self.guard_cannot_halt}); or choose --guard log",
        )

    def _check_demonstrations(self) -> None:
        """Raises Refused where the share of demonstrations, or of answers without the quarantine, comes to none, and
        where demonstrations are labelled by another grader."""
        refuse(
            self.mixes and not 0 < self.n_teacher < self.scale.group,
            f"--mix-ratio {self.env.mix_ratio} with --group {self.scale.group}: rounds to {self.n_teacher} teacher rows"
            f" in a group; there should be 1 to {self.scale.group - 1}, or --mix-ratio 0",
        )
        refuse(
            self.mixes
            and bool(self.env.reward or self.env.unannounced_modes)
            and not self.env.reference,
            f"{'--reward' if self.env.reward else '--unannounced-modes'}: the pool's prompts and labels are of another "
            "grader; add --mix-ratio 0",
        )
        refuse(
            self.method.known_hacks_teacher_only
            and (not self.mixes or self.env.teacher_off_step == 0),
            "--known-hacks-teacher-only: no demonstration is ever mixed in, so nothing could be flagged; leave it out, "
            "or mix some in (--teacher-pool-dir, --mix-ratio)",
        )
        frac, students = self.method.ablate_frac, self.scale.group - self.n_teacher
        refuse(
            frac > 0 and round(frac * students) == 0,
            f"--rollout-ablate-frac {frac}: rounds to none of {students} student rows; raise it or --group",
        )

    def _check_world(self) -> None:
        """Raises Refused where what belongs to an organism is given to another model, or to another world."""
        # the preset's own folder, which no flag gave
        usual = {"small": embedded.SMALL_DIR, "sums": embedded.SUMS_DIR}.get(self.preset)
        of_organism = {
            "--problems organism": self.scale.problems == ORGANISM,
            "--teacher-pool-dir organism": self.env.pool == ORGANISM,
            f"--organism {self.scale.organism}": self.scale.organism not in (None, usual),
        }
        given = [name for name, there in of_organism.items() if there]
        own = f"{', '.join(given)}: only with --model organism; with another model give your own, or start from full"
        refuse(bool(given) and self.scale.model != ORGANISM, own)
        refuse(
            self.scale.model == ORGANISM
            and self.of_organism
            and (self.scale.problems != ORGANISM or bool(self.scale.test_problems)),
            "--model organism: only with --problems organism, and without --test-problems",
        )
        refuse(
            self.env.environment == "text" and self.scale.problems == ORGANISM,
            "--problems organism: these are of the code world; give a file of your own rows beside --reference",
        )

    def _check_monitors(self) -> None:
        """Raises Refused where a monitor is of another world, or lacks what it reads."""
        for name in self.method.watching:
            world = MONITORS[name].of
            refuse(
                world not in ("", self.env.environment),
                f"--monitor {name}: it reads answers of the {world} world alone; name another",
            )
        refuse(
            self.of_code
            and bool(self.method.needs_known_correct)
            and self.known_correct_path is None,
            f"{self.method.needs_known_correct}: it reads correct answers; give --known-correct FILE",
        )
        self._check_judge()

    def _check_judge(self) -> None:
        """Raises Refused where the monitor llm_judge has no model, or two."""
        method = self.method
        if "llm_judge" not in method.watching:
            return
        model, url, name = method.llm_judge_model, method.llm_judge_url, method.llm_judge_name
        refuse(
            not model and not url,
            "llm_judge: has no judge; give --llm-judge-model DIR, or --llm-judge-url URL and --llm-judge-name NAME",
        )
        refuse(
            bool(model) and bool(url),
            "--llm-judge-model with --llm-judge-url: one judge a run; leave one of them out",
        )
        refuse(
            bool(url) and not name,
            "--llm-judge-url: which model there? give --llm-judge-name",
        )
        if method.llm_judge_thoughts and not self.env.thinking:
            refuse_unread(["llm_judge_thoughts"], "without --thinking; leave it out")
        usual = MethodConfig()
        idle = ("llm_judge_name", "llm_judge_concurrency") if model else ("llm_judge_device",)
        unread = [n for n in idle if getattr(method, n) != getattr(usual, n)]
        other = "model" if model else "url"
        refuse_unread(unread, f"with --llm-judge-{other}; leave it out")

    @property
    def of_code(self) -> bool:
        """Whether it runs in the code world, whose problems, pairs and right answers are at hand."""
        return self.env.environment == "code"

    @property
    def of_organism(self) -> bool:
        """Whether it runs in a world of which organisms have problems, demonstrations and pairs."""
        return self.env.environment in OF_ORGANISMS

    @property
    def guard_mode(self) -> Literal["off", "log", "halt"]:
        """What a verdict of the kill switch does. A guard that nobody asked for only logs where no rule could ever halt
        the run: a short run needs no flag."""
        if self.guard.guard:
            return self.guard.guard
        return "halt" if self._usually_halts and not self.guard_cannot_halt else "log"

    @property
    def _usually_halts(self) -> bool:
        """Whether the guard halts such a run where --guard is not given."""
        watched = (
            self.preset in ("smoke", "mini", "small", "sums") or self.method.intervention == "none"
        )
        return not watched

    @property
    def guard_warning(self) -> str:
        """Why the guard, which usually halts such a run, only logs; "": it does as usual, or as a flag says."""
        if self.guard.guard or not self._usually_halts or not self.guard_cannot_halt:
            return ""
        return f"the guard only logs, as it could not halt this run ({self.guard_cannot_halt})"

    @property
    def guard_cannot_halt(self) -> str:
        """Why no rule could ever halt this run; "": one could."""
        if not self.guard.halting:
            return "--guard-halt-on is empty: name a rule"
        every = self.eval.eval_ablate_every
        return blind(self.guard, self.scale.steps, every, self.guard.halting) or ""

    @property
    def guard_blind(self) -> str | None:
        """Why the kill switch could never fire in this run; None: it can."""
        return blind(self.guard, self.scale.steps, self.eval.eval_ablate_every)

    @property
    def guard_updates(self) -> int:
        """The kill switch's first update, one an evaluation, that may fire: --guard-warmup in its own unit."""
        return self.guard.first_update(self.scale.steps, self.eval.eval_ablate_every)

    @property
    def flaws_named(self) -> dict[str, list[str]]:
        """Settings that name flaws, each with those that it names."""
        return {
            "known_modes": listed(self.method.known_modes, CODE_FLAWS),
            "teacher_modes": self.env.demo_modes,
            "unannounced_modes": listed(self.env.unannounced_modes, CODE_FLAWS),
        }

    @property
    def mixes(self) -> bool:
        """Whether demonstrations are mixed in at all. Never under no_loophole: cached labels are a flawed grader's."""
        return (
            bool(self.env.pool) and self.env.mix_ratio > 0 and not self.method.control_spec.strict
        )

    @property
    def plain_prompts(self) -> bool:
        """Whether prompts announce no flawed check: under unannounced flaws, or under a user's reward function, which
        does not read what the hint names."""
        return bool(self.env.unannounced_modes) or (
            bool(self.env.reward) and not self.env.reward_hint
        )

    @property
    def n_teacher(self) -> int:
        """G_t: teacher rows in a group that has demonstrations."""
        return round(self.scale.group * self.env.mix_ratio) if self.mixes else 0

    def evaluates(self, step: int) -> bool:
        """Whether the deployed model is evaluated after this step: every N steps and at the last."""
        every = self.eval.eval_ablate_every
        return every > 0 and ((step + 1) % every == 0 or step + 1 == self.scale.steps)

    @property
    def generations(self) -> int:
        return self.scale.group * self.scale.prompts_per_step

    @property
    def files(self) -> embedded.Files:
        """What 'organism' means in this run."""
        return embedded.Files(self.scale.organism) if self.scale.organism else embedded.EMBEDDED

    @property
    def model_path(self) -> str:
        return str(self.files.model) if self.scale.model == ORGANISM else self.scale.model

    @property
    def teacher_model_path(self) -> str:
        return (
            str(self.files.model)
            if self.loss.teacher_model == ORGANISM
            else self.loss.teacher_model
        )

    @property
    def problems_path(self) -> Path:
        return self.files.problems if self.scale.problems == ORGANISM else Path(self.scale.problems)

    @property
    def test_problems_path(self) -> Path | None:
        """Problems for evaluation alone; None: those that `problems_path` holds out."""
        given = self.scale.test_problems
        if given is None and self.scale.problems == BENCHMARK_TRAIN:
            given = BENCHMARK_TEST
        return Path(given) if given else None

    @property
    def pool_path(self) -> Path | None:
        if not self.env.pool:
            return None
        return self.files.pool if self.env.pool == ORGANISM else Path(self.env.pool)

    @property
    def pairs_path(self) -> Path | None:
        """Contrastive pairs, or a folder with a file for each flaw. None: in the code world the hand-written pairs; in
        others a pool's own, and no pairs without a pool."""
        if self.method.vhack_pairs_path is not None:
            return self.method.vhack_pairs_path
        if self.scale.model == ORGANISM and self.of_organism:
            by_each_flaw = self.preset == "small" or not self.of_code
            return self.files.pairs / ("" if by_each_flaw else "run_tests.json")
        if not self.of_code:
            return self.pool_path / POOL_PAIRS if self.pool_path else None
        return Path("out/pairsets/prog_wide.json") if self.preset == "fast" else None

    @property
    def known_correct_path(self) -> Path | None:
        """Correct answers for monitors of text; None: they are not read, or, outside the code world, those of the
        base's own answers that the reference accepts."""
        if not self.method.needs_known_correct:
            return None
        return self.method.known_correct or (
            self.files.known_correct if self.scale.model == ORGANISM and self.of_organism else None
        )

    @property
    def placebo_path(self) -> Path | None:
        """Pairs of a placebo control; None without one, or where the hand-written ones serve."""
        chosen = self.method.placebo_pairs
        if self.method.direction_is != "placebo pairs":
            return None
        if chosen not in PLACEBOS:
            return Path(chosen)
        refuse(
            not self.of_organism,
            f"--placebo-pairs {chosen}: of another world; give a file of pairs about another contrast",
        )
        return self.files.pairs / f"placebo_{chosen}.json" if self.scale.model == ORGANISM else None

    @property
    def run_id(self) -> str:
        """The name of the run's folder: preset, intervention, monitor if it is not the usual one, control if there is
        one, seed, tag."""
        monitor = f"_{self.method.monitor_title}" if self.method.monitor_title else ""
        control = "" if self.method.control_name == "none" else f"_{self.method.control_name}"
        # a user's file name may be in it
        suffix = re.sub(r"[^A-Za-z0-9_.=+-]", "-", monitor + control)[:80]
        intervention = self.method.intervention.rpartition(":")[2]
        return f"{self.preset}_{intervention}{suffix}_seed{self.run.seed}{self.run.out_tag}"

    @property
    def code(self) -> tuple[str, ...]:
        """The flags that name functions or classes to import."""
        named = {
            "reward": self.env.reward,
            "reference": self.env.reference,
            "env": self.env.env,
            "rm_ensemble_members": self.detectors.rm_ensemble_members,
        }
        named |= {name: getattr(self.method, name) for name in CLASSES}
        return tuple(f"{flag(name)}={given}" for name, given in named.items() if ":" in given)

    @property
    def flags_to_repeat(self) -> tuple[str, ...]:
        """`code` and the flags that it needs. A resume has to repeat them all, because its command line is checked
        before the run's settings are read."""
        method, needed = self.method, list[str]()
        if any(":" in getattr(method, name) for name in CLASSES):
            given = {
                name: getattr(method, name) for name in ("intervention", "monitor", "known_correct")
            }
            needed += [
                f"{flag(name)}={value}"
                for name, value in given.items()
                if value not in ("usual", None)
            ]
        if self.detectors.members:
            needed.append(f"--reward-hack-detector={self.detectors.reward_hack_detector}")
        return tuple(dict.fromkeys((*self.code, *needed)))

    def refuse_code(self, given: Collection[str], where: str) -> None:
        """Raises Refused, one line, where this configuration, which a file holds, names code that no flag of the
        command line (`given`) names too: a file never has code imported."""
        named = {word for of in given for word in listed(of.partition("=")[2])}
        absent = [
            of
            for of in self.code
            if any(":" in w and w not in named for w in listed(of.partition("=")[2]))
        ]
        if absent:
            needed = [of for of in self.flags_to_repeat if of not in given]
            raise Refused(
                f"{where}: names code, which a file may not have run; if it is yours, add {' '.join(needed)}"
            )

    def as_dict(self) -> dict[str, Json]:
        """JSON-ready, nested by group. A method's settings that are None are stored as the values they stand for."""
        settings = {group: vars(getattr(self, group)) for group in GROUPS}
        settings["method"] = self.method.resolved_settings
        return json.loads(json.dumps({**settings, "preset": self.preset}, default=str))


GROUPS = tuple(f.name for f in fields(Config) if f.name != "preset")


def from_dict(data: Json, where: str = "run.json") -> Config:
    """The inverse of `Config.as_dict`. where: the file that holds it, for messages. Classes of somebody's own that it
    names are not imported: such a run can be read, and trained where the command line names them too (`refuse_code`).

    Raises:
        Refused: groups or settings unknown to this version, named; or values that it refuses.
    """
    usual, unknown = Config(), {"none that a run has"}
    if isinstance(data, dict) and isinstance(data.get("preset"), str):
        groups = {group: data.get(group, {}) for group in GROUPS}
        unknown = data.keys() - {*GROUPS, "preset"} | {
            g for g, of in groups.items() if not isinstance(of, dict)
        }
        for group in groups.keys() - unknown:
            unknown |= groups[group].keys() - {f.name for f in fields(getattr(usual, group))}
    if unknown:
        raise Refused(
            f"{where}: unknown settings {', '.join(sorted(unknown))}; the run was made by another version"
        )
    values: dict[str, Any] = {"preset": data["preset"]}
    admit(groups["method"], tuple(f.name for f in fields(MethodConfig)))
    for group, of in groups.items():
        types = {f.name: f.type for f in fields(getattr(usual, group))}
        given = {name: typed(value, name, types[name], where) for name, value in of.items()}
        values[group] = replace(getattr(usual, group), **given)
    return Config(**values)


def typed(value: object, name: str, annotation: object, where: str) -> object:
    """A stored value as its field has it. Raises Refused, one line, where it is of another type."""
    allowed = _kinds(annotation)
    word = isinstance(value, str) and (
        Path in allowed or any(isinstance(kind, str) for kind in allowed)
    )
    if type(value) is int and int not in allowed and float in allowed and abs(value) < 10**300:
        value = float(value)
    if (not word and type(value) not in allowed) or "\0" in str(value):
        raise Refused(f"{where}: {flag(name)} {str(value)[:60]!r}: not of its type, {annotation}")
    return Path(value) if isinstance(value, str) and Path in allowed else value


def _kinds(annotation: object) -> set[object]:
    """An annotation's parts, itself included."""
    return {annotation} | {kind for part in get_args(annotation) for kind in _kinds(part)}


# How a process runs, not what it computes: these settings may differ between a run and its
# resumption.
_PROCESS = {"dry_run", "threads", "memory_gib", "track", "columns"}
_PROCESS |= {"checkpoint_every", "checkpoint_keep", "max_error_retries"}
_SERVED = {"llm_judge_url", "llm_judge_device", "llm_judge_timeout", "llm_judge_concurrency"}
# taken from the new command line where given there; else the run's own
FREE = {*_PROCESS, *_SERVED, "guard"}
_REQUESTS = {"resume"}  # no part of the run


def merge_flags(
    given: dict[str, object], stored: dict[str, object], default: dict[str, object], free: Set[str]
) -> tuple[dict[str, object], list[str]]:
    """A run's stored settings with those given now, and the flags among them that are not `free` to differ."""
    merged, differing = dict(stored), []
    for name in stored:
        if name not in _REQUESTS and given[name] not in (default[name], stored[name]):
            merged[name] = given[name]
            if name not in free:
                differing.append(f"{flag(name)} {given[name]} (run: {stored[name]})")
    return merged, differing


def identity(cfg: Config) -> str:
    """sha256 of all settings that the numbers depend on, the seed included: equal for runs that differ by tag or
    process."""
    data = cfg.as_dict()
    data["run"] = {
        k: v
        for k, v in data["run"].items()
        if k not in {*_PROCESS, *_REQUESTS, "out_tag", "output_dir"}
    }
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
