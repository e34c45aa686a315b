"""Settings of the environment: what is asked, who grades it, and what is demonstrated."""

import json
import re
from dataclasses import dataclass
from typing import Literal

from vgrout.config.checks import (
    changed,
    check,
    flag,
    in_usual_order,
    listed,
    refuse_unread,
    setting,
)
from vgrout.config.groups import ORGANISM
from vgrout.config.world_names import (
    CODE_FLAWS,
    DETECTOR_FIELDS,
    OF_ORGANISMS,
    VERIFIERS,
    WORLDS,
    EnvMode,
)
from vgrout.ground.errors import refuse
from vgrout.ground.files import Json

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
        return "problems and markers" if varied else "problems"

    @property
    def demo_modes(self) -> list[str]:
        """The flaws that are demonstrated; []: all."""
        return listed(self.teacher_modes, CODE_FLAWS)

    @property
    def report_detector_codes(self) -> list[str]:
        return listed(self.report_detectors, DETECTOR_FIELDS)
