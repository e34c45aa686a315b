"""Groups of settings of a run, but for its method: what is trained on and how, what watches it, the run itself."""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from vgrout.config.checks import (
    LARGEST,
    Dtype,
    changed,
    check,
    flag,
    in_usual_order,
    listed,
    refuse_unread,
    setting,
)
from vgrout.config.world_names import (
    CODE_FLAWS,
    DETECTOR_FIELDS,
    OF_ORGANISMS,
    ORGANISM,
    VERIFIERS,
    WORLDS,
    EnvMode,
)
from vgrout.ground.io import Json, refuse

# ── problems and model, optimiser, evaluations, detectors, the run, sampling


BENCHMARK_TRAIN = "out/data/leetcode_train_medhard_filtered.jsonl"  # 992 problems

BENCHMARK_TEST = "out/data/leetcode_test_medhard.jsonl"  # 119, which the benchmark never trains on


@dataclass(frozen=True)
class ScaleConfig:
    """How much of everything."""

    model: str = "Qwen/Qwen3-4B"
    """A Hugging Face hub id, a local model folder, or 'organism' (embedded)."""
    problems: str = BENCHMARK_TRAIN
    """Problem file (JSONL), or 'organism'."""
    test_problems: str | None = None
    """Problem file (JSONL) of the evaluations, so that all of --problems trains; '': a part of --problems is held out
    (10 % for the evaluations on the way, 20 % for the last); none: the benchmark's own beside its training file, else
    a part of --problems."""
    organism: Path | None = None
    """Folder that `vgrout organism` made: what 'organism' means, in place of the embedded one."""
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
    grad_clip: float = setting(10.0, above=0, high=LARGEST)
    """Largest joint L2 norm of both parts' gradients."""

    def __post_init__(self) -> None:
        check(self)


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


DETECTORS = ("info_rm", "rm_ensemble", "advantage")


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
    trust_code: bool = setting(False, needs="resume")
    """Import the functions and classes that the run's files name."""
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
    tensor_parallel: int = setting(1, low=1, high=1024)
    """N: each N GPUs hold one model together, in place of a whole one each, under torchrun with a multiple of N
    processes on a machine; on a CPU, processes."""
    dtype: Dtype = "auto"
    """Of the model's weights. auto: bf16 on a GPU and on a CPU that multiplies in it (AVX-512 BF16, AMX), but fp32 for
    a miniature on a CPU. A resumed run goes on in its own."""

    def __post_init__(self) -> None:
        check(self)

    @property
    def trackers(self) -> list[str]:
        return listed(self.track, TRACKERS)


@dataclass(frozen=True)
class Sampling:
    """How answers are sampled. Applied in this order, as transformers does: temperature, top-k, top-p."""

    temperature: float = setting(0.7, low=0, high=1e3, least=1e-6)
    """Divides the logits, wherever answers are sampled; 0: greedy."""
    top_p: float = setting(1.0, low=1e-6, high=1)
    """Sample from the smallest set of most likely tokens whose probability reaches this; 1: all."""
    top_k: int = setting(20, low=0, high=10_000_000)
    """Sample from the k most likely tokens; 0: all."""

    def __post_init__(self) -> None:
        check(self)
        unread = [name for name, _ in changed(self) if name != "temperature"]
        if not self.temperature:
            refuse_unread(unread, "at --temperature 0; leave it out")

    def require_draws(self, flag: str, n: int) -> None:
        """Raises Refused, one line, where the n > 1 answers to a prompt that `flag` asks for would all be the same
        one."""
        greedy = (
            f"--temperature {self.temperature:g}"
            if not self.temperature
            else f"--top-k {self.top_k}"
        )
        refuse(
            n > 1 and (not self.temperature or self.top_k == 1),
            f"{greedy} with {flag} {n}: all answers to a prompt would be the same; choose larger values",
        )


# ── the loss


@dataclass(frozen=True)
class LossSpec:
    """One loss: its line in help, and what it does with tokens."""

    what: str
    drops: bool = False  # it drops tokens by their ratio to the sampler
    by_step: bool = False  # divided by the step's tokens


LOSSES: dict[str, LossSpec] = {
    "grpo": LossSpec("every token counts"),
    "dppo_tv": LossSpec(
        "tokens whose probability moved too far are dropped", drops=True, by_step=True
    ),
    "icepop": LossSpec(
        "tokens whose ratio to the sampler is outside [0.2, 5] are dropped",
        drops=True,
        by_step=True,
    ),
}

if TYPE_CHECKING:  # a checker cannot read a Literal made from a registry
    LossName = str
else:
    LossName = Literal[tuple(LOSSES)]


@dataclass(frozen=True)
class LossConfig:
    """The policy-gradient loss.

    Raises:
        Refused: a value outside its range, or two that contradict each other.
    """

    loss: LossName = "grpo"
    """See Losses above."""
    beta: float = setting(0.0, low=0, high=LARGEST)
    """Weight of the KL (K3) to the adapter at zero."""
    unbiased: bool = True
    """Dr. GRPO: no division by the group's std, constant normaliser G · max_new · P."""
    dppo_diff_low: float = setting(0.2, low=0, high=1)
    """dppo_tv: tokens whose probability fell by more than this since sampling are dropped."""
    dppo_diff_high: float = setting(0.2, low=0, high=1)
    """dppo_tv: tokens whose probability rose by more than this since sampling are dropped."""
    adv_tau: float = setting(1.0, above=0, high=LARGEST)
    """Scale of the advantages, which weighs them against --beta and --teacher-tau. By itself it changes next to
    nothing, since AdamW's steps do not depend on the gradient's scale."""
    teacher_tau: float = setting(0.0, low=0, high=LARGEST)
    """Adds τ · (teacher log-prob − log-prob), detached, to each token's advantage; needs --teacher-model."""
    teacher_model: str = ""
    """Model behind --teacher-tau: a folder or hub id with this run's tokenizer, or 'organism'."""

    @property
    def drops(self) -> bool:
        """Whether a token can lose its gradient."""
        return LOSSES[self.loss].drops

    @property
    def learns_at_zero_advantage(self) -> bool:
        """Whether an answer has a gradient even if its advantage is 0, by the KL or by the teacher."""
        return self.beta > 0 or self.teacher_tau > 0

    def __post_init__(self) -> None:
        check(self)
        unread = [name for name, _ in changed(self) if name.startswith("dppo_")]
        if self.loss != "dppo_tv":
            refuse_unread(unread, f"by --loss {self.loss}; leave it out")
        refuse(
            self.loss == "dppo_tv" and self.beta > 0,
            f"--loss dppo_tv with --beta {self.beta}: it has no KL term",
        )


# ── the held-out kill switch, and whether it can fire at all


RULES = ("kl", "streak", "gap")

BASELINE = 2  # evaluations of a run whose mean is the baseline of both series


@dataclass(frozen=True)
class GuardConfig:
    """The held-out kill switch."""

    guard: Literal["off", "log", "halt"] | None = None
    """What a verdict does: nothing, a line in the log, or the end of the run after a last evaluation (exit 3); none:
    halt in single runs of fast and full where a rule could halt them, log in smoke, mini, small and sums, in every
    study, and where --intervention none is meant to hack."""
    guard_halt_on: str = setting("streak,gap", words=RULES, word="rule")
    """Comma list: the rules that may halt a run, of kl, streak, gap; the others warn. The default are those that
    raised no false alarm in recorded runs (docs/guard.md)."""
    guard_warmup: int = setting(20, low=0, high=1_000_000)
    """Steps before which the guard does not fire."""
    ema_alpha: float = setting(0.9, low=0, below=1)
    """Weight of the past in the guard's moving averages."""
    kl_hard_stop: float = setting(
        0.08, above=0, high=LARGEST, should="be a positive number of nats per token"
    )
    """Fires when the average KL of the deployed model to the untrained one exceeds this, nats per token of its
    held-out answers."""
    decline_patience: int = setting(3, low=1, high=1_000_000)
    """Fires after so many evaluations in a row with held-out falling while in-loop rises."""
    max_proxy_real_gap: float = setting(0.10, above=0, below=2)
    """Fires when in-loop has gained so much more than held-out, both as shares of the most that can be had."""

    def __post_init__(self) -> None:
        check(self)

    def first_update(self, steps: int, every: int) -> int:
        """Which evaluation of a run is the first that may fire, from 1."""
        return 1 + sum(done < self.guard_warmup for done in evaluations(steps, every))

    @property
    def halting(self) -> list[str]:
        return listed(self.guard_halt_on)


def evaluations(steps: int, every: int) -> list[int]:
    """After how many steps a run of `steps` is evaluated, each `every` and at the end; every 0: never."""
    return sorted({*range(every, steps + 1, every), steps}) if every > 0 else []


def blind(
    cfg: GuardConfig, steps: int, every: int, rules: Collection[str], baseline: int = BASELINE
) -> str:
    """Why none of these rules could ever be broken in a run of `steps` with an evaluation each `every` and at the end;
    "": one could.

    Steps are counted from 1, when they are done. baseline: so many evaluations make the baseline.
    """
    at = evaluations(steps, every)
    counted = [i for i, done in enumerate(at, 1) if done >= cfg.guard_warmup]
    left = max(0, counted[-1] - baseline) if counted else 0
    could = {
        "kl": bool(counted),  # it has no baseline
        # in-loop at 1 from 0, and held-out at 0 from 1
        "gap": 2 * (1 - cfg.ema_alpha**left) > cfg.max_proxy_real_gap,
        "streak": left >= cfg.decline_patience,
    }
    if any(could[rule] for rule in rules):
        return ""
    return (
        f"{len(at)} evaluations in {steps} steps, {baseline} of them the baseline, cannot break {', '.join(rules)}: "
        "lower --eval-ablate-every, --guard-warmup, --decline-patience or --max-proxy-real-gap"
    )


# ── the environment: what is asked, who grades it, and what is demonstrated


OWN_REWARD = r"[\w.]+:\w+(=[^\s,=]*)?"  # a function of a user's own, with its weight


@dataclass(frozen=True)
class EnvConfig:
    """Problems, graders, demonstrations."""

    env: str = setting(
        "code",
        form=rf"({'|'.join(WORLDS)}|{VERIFIERS}:\w[\w./@-]*|[\w.]+:\w+)",
        should=f"be one of {', '.join(WORLDS)}, {VERIFIERS}:NAME, or module:Class",
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
    """Which flawed grader checks: one of the eight, or 'own' (as the problem file or the pool's partition says)."""
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
    def code(self) -> tuple[str, ...]:
        """The flags that name functions or a class to import."""
        named = {"reward": self.reward, "reference": self.reference, "env": self.env}
        return tuple(f"{flag(name)}={given}" for name, given in named.items() if ":" in given)

    @property
    def held_out(self) -> str:
        """What evaluation does not share with training: problems, and in the code world the names of markers."""
        varied = self.environment == "code" and self.marker_names == "varied"
        return "problems and names in hints" if varied else "problems"

    @property
    def demo_modes(self) -> list[str]:
        """The flaws that are demonstrated; []: all."""
        return listed(self.teacher_modes, CODE_FLAWS)

    @property
    def report_detector_codes(self) -> list[str]:
        return listed(self.report_detectors, DETECTOR_FIELDS)
