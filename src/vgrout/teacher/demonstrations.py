"""Mixes a pool's demonstrations into the groups.

On its own a model needs thousands of answers to find a flaw. A few cached rollouts of a model that
already hacks it bring the same dynamics within tens of steps. Their labels are used as cached, and
keep a type of their own (`CachedGrade`).
"""

from collections.abc import Iterator, Sequence
from typing import Any

from loguru import logger

from vgrout.config.run import Config
from vgrout.ground.data import CachedGrade, Rollout, Task
from vgrout.ground.io import Refused
from vgrout.ground.rng import py_stream
from vgrout.ground.thoughts import thought_of
from vgrout.model.policy import LanguageModel
from vgrout.teacher.pools import Demonstration, Pool


class Teacher:
    """Draws demonstrations from a pool; with `pool=None` there are none."""

    def __init__(
        self,
        cfg: Config,
        pool: Pool | None,
        lm: LanguageModel,
        problems: Sequence[Task],
    ) -> None:
        """Check that the pool demonstrates these problems, and compare its prompts with today's.

        Cached token ids are used if the model's tokenizer made them; else the completion's text is
        tokenised again.

        Completions longer than --max-new are left out, since what is left of one that is cut need
        not earn its reward.

        lm: only its tokenizer and chat template are used. problems: the training problems.

        Raises:
            Refused: a pool that demonstrates none of these problems, or under other modes, or has
                no usable tokens.
        """
        self.pool = pool if cfg.mixes else None
        self.lm = lm
        self.per_group = cfg.n_teacher  # demonstrations in a group, G_t
        self.seed = cfg.run.seed
        self.off_step = cfg.env.teacher_off_step  # from this step on there are none
        self.modes = set(cfg.env.demo_modes)  # the problems of these alone; empty: all
        self.max_new = cfg.scale.max_new
        self.retokenised = False
        self.compared = 0  # prompts of the pool that were compared with today's
        self.differ: list[int] = []  # ids of the problems whose prompts are not the same
        # (problem id, index in its file) → token ids, at most max_new, and whether they end with the EOS
        self._tokens: dict[tuple[int, int], tuple[tuple[int, ...], bool]] = {}
        # problem id → which of its demonstrations are used
        self._used: dict[int, list[int]] = {}
        if self.pool is None or pool is None:
            return
        self.retokenised = pool.tokenizer_sha256 != lm.tokenizer_sha256
        demonstrated = [p for p in problems if p.id in pool.demos and self._is_wanted(p)]
        fault = next(self._faults(pool, demonstrated, len(problems)), "")
        if fault:
            raise Refused(fault)
        if self.retokenised:
            logger.warning(
                f"{pool.folder}: not made with this tokenizer; completions are tokenised again"
            )
        self._choose(pool, demonstrated)
        self._compare_prompts(pool, demonstrated)
        if self.differ:
            logger.warning(
                f"{pool.folder}: {len(self.differ)} of {self.compared} prompts are not what the "
                f"pool has, first that of problem {self.differ[0]}; rendered live all the same, "
                "recorded in run.json"
            )

    def _is_wanted(self, problem: Task) -> bool:
        return not self.modes or problem.flaws[0] in self.modes

    def _faults(self, pool: Pool, demonstrated: Sequence[Task], n: int) -> Iterator[str]:
        """Why this pool cannot be used. demonstrated: what it has of the n training problems."""
        where = f"--teacher-pool-dir {pool.folder}"
        if not demonstrated:
            yield f"{where}: demonstrates none of the {n} training problems"
        for mode in sorted(self.modes - {p.flaws[0] for p in demonstrated}):
            yield f"--teacher-modes {mode}: {pool.folder} demonstrates no training problem of it"
        for problem in demonstrated:
            graded_as = {demo.mode for demo in pool.demos[problem.id]}
            for mode in graded_as - {problem.flaws[0], None}:
                yield (
                    f"{where}: problem {problem.id} was graded as {mode}, this run checks it as "
                    f"{problem.flaws[0]}; use --env-mode own, or make the pool again"
                )
        if self.retokenised and any(
            demo.completion is None for demos in pool.demos.values() for demo in demos
        ):
            yield (
                f"{where}: made with another tokenizer and without completion texts; "
                "make it again with this model"
            )

    def _choose(self, pool: Pool, demonstrated: Sequence[Task]) -> None:
        """Choose the demonstrations of at most `max_new` tokens; where there are none, all are used, and cut."""
        n = 0
        for problem in demonstrated:
            demos = pool.demos[problem.id]
            n += len(demos)
            fitting: list[int] = []
            for i, demo in enumerate(demos):
                ids, ends = self._ids(demo)
                fits = len(ids) <= self.max_new
                self._tokens[problem.id, i] = ids[: self.max_new], ends and fits
                if fits:
                    fitting.append(i)
            if fitting:
                self._used[problem.id] = fitting
        used = sum(map(len, self._used.values()))
        if not used:
            logger.warning(
                f"{pool.folder}: all {n} demonstrations have more than {self.max_new} tokens "
                "(--max-new) and are cut; raise --max-new"
            )
            for problem in demonstrated:
                self._used[problem.id] = list(range(len(pool.demos[problem.id])))
            return
        if used < n:
            logger.warning(
                f"{pool.folder}: {n - used} of {n} demonstrations have more than {self.max_new} "
                "tokens (--max-new) and are left out"
            )

    def _compare_prompts(self, pool: Pool, demonstrated: Sequence[Task]) -> None:
        """Compare today's prompts with those that the pool's rollouts were sampled or stored under."""
        for problem in demonstrated:
            demo = pool.demos[problem.id][0]
            then: object
            now: object
            if demo.prompt_ids is not None and not self.retokenised:
                then, now = demo.prompt_ids, self.lm.render(problem.messages)
            else:
                then, now = demo.prompt, self.lm.prompt_text(problem.messages)
            if then is None:
                continue
            self.compared += 1
            if then != now:
                self.differ.append(problem.id)

    def record(self) -> dict[str, Any] | None:
        """Where labels, tokens and prompts come from, for run.json; None without demonstrations."""
        if self.pool is None:
            return None
        return {
            "folder": str(self.pool.folder),
            "labels": f"cached, grader {self.pool.grader}",
            "retokenised": self.retokenised,
            "prompts_compared": self.compared,
            "prompts_differ": self.differ,
        }

    def count(self, problem: Task, step: int) -> int:
        """Demonstrations of this problem at this step, G_t.

        0 from `off_step` on, for problems of other modes, and for those that the pool has no usable
        demonstration of.
        """
        if self.pool is None:
            return 0
        if self.off_step is not None and step >= self.off_step:
            return 0
        if problem.id in self._used and self._is_wanted(problem):
            return self.per_group
        return 0

    def demos(self, problem: Task, step: int) -> list[tuple[Rollout, CachedGrade]]:
        """G_t demonstrations with their cached grades, a function of (seed, step, problem).

        They are drawn without replacement while there are enough.
        """
        n = self.count(problem, step)
        if self.pool is None or n == 0:
            return []
        used = self._used[problem.id]
        rng = py_stream(self.seed, "demos", step, problem.id)
        picks: list[int] = []
        while len(picks) < n:
            picks += rng.sample(used, min(n - len(picks), len(used)))
        prompt_ids = self.lm.render(problem.messages)
        in_thought = self.lm.opens_thought(problem.messages)
        drawn: list[tuple[Rollout, CachedGrade]] = []
        for i in picks:
            demo = self.pool.demos[problem.id][i]
            ids, finished = self._tokens[problem.id, i]
            text = demo.completion or ""
            # a prompt may have opened a thought, which a pool of answers without thoughts does not go on with
            goes_on = in_thought and self.lm.marks.close in text
            rollout = Rollout(
                ids,
                text,
                finished,
                logp=demo.logp[: len(ids)] if demo.logp and not self.retokenised else None,
                thought=thought_of(self.lm.decode, ids, text, goes_on, self.lm.marks),
                prompt_ids=prompt_ids,
                source="teacher",
            )
            drawn.append((rollout, demo.grade))
        return drawn

    def _ids(self, demo: Demonstration) -> tuple[tuple[int, ...], bool]:
        """Tokens up to the EOS, and whether they end with it."""
        if self.retokenised:
            ids = self.lm.encode_completion(demo.completion or "", demo.finished)
            return ids, demo.finished
        for i, token in enumerate(demo.completion_ids):
            if token in self.lm.eos_ids:  # older pools pad behind it
                return demo.completion_ids[: i + 1], True
        return demo.completion_ids, False
