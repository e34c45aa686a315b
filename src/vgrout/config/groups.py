"""Groups of settings of a run: problems and model, sampling, optimiser, evaluations, detectors, the run itself."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from vgrout.config.checks import Dtype, changed, check, listed, refuse_unread, setting
from vgrout.ground.errors import refuse

BENCHMARK_TRAIN = "out/data/leetcode_train_medhard_filtered.jsonl"  # 992 problems
BENCHMARK_TEST = "out/data/leetcode_test_medhard.jsonl"  # 119, which the benchmark never trains on
ORGANISM = "organism"  # the embedded model organism's model, problems, pool and pairs, by this name


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

    temperature: float = setting(0.7, low=0, high=1e3)
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
