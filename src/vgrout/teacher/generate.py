"""Generation of graded answers, batch by batch, into a log from which a killed process goes on; shared by the programs
that make pools. A batch's random stream depends only on (seed, purpose, batch), so a pool is the same whether it was
made in one go or in ten.
"""

import contextlib
import json
import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro
from loguru import logger
from tabulate import tabulate

from vgrout import console
from vgrout import embedded as organism
from vgrout.cli import cli_exit, parse_args
from vgrout.config import checks
from vgrout.config.run import BENCHMARK_TRAIN, ORGANISM
from vgrout.config.sampling import Sampling
from vgrout.console import Progress
from vgrout.data import Completion, Grade, GradedCompletion, Task, Ungraded
from vgrout.envs import base
from vgrout.envs.code.grading.grade import Grader
from vgrout.envs.code.modes import MODES, Mode
from vgrout.envs.code.problem import Problem
from vgrout.envs.code.problems import ProblemRow, load_rows, require_solvable, split_sizes
from vgrout.errors import Refused, refuse
from vgrout.files import (
    file_sha256,
    hold,
    read_json,
    require_new,
    require_own,
    to_json,
    write_atomic,
)
from vgrout.metrics import Rate
from vgrout.model.source import SVD_CACHE, require_fitting, require_model, safetensors_head
from vgrout.rng import torch_stream

if TYPE_CHECKING:  # torch takes seconds to import, and a wrong flag never waits for it
    import vgrout.model.policy

MODEL_NAME = "vgrout.organism"  # the embedded model, in pool.json
BATCH = 192  # answers sampled at once: a killed process loses at most this many

Graded = GradedCompletion[Grade]


def generate_graded(
    lm: "vgrout.model.policy.LanguageModel",
    grader: base.Grader,
    problems: Sequence[Task],
    n: int,
    *,
    max_new: int,
    seed: int,
    purpose: str,
    sampling: Sampling,
    log: Path | None = None,
    label: str | None = None,
) -> list[Graded]:
    """n graded answers to each problem, in the problems' order.

    purpose: name of the random stream. log: JSONL, one batch a line; batches that are complete there are not sampled
    again. label: of the progress bar.

    Raises:
        RuntimeError: the sandbox could not grade an answer, its retries included.
    """
    out: list[Graded] = []
    done = _logged_batches(log) if log is not None else []
    per = max(1, BATCH // n)
    for k, start in enumerate(
        Progress(range(0, len(problems), per), desc=label or purpose, unit="batch")
    ):
        part = problems[start : start + per]
        if k < len(done):
            batch = done[k]
        else:
            batch = _batch(lm, grader, part, n, max_new, sampling, torch_stream(seed, purpose, k))
            if log is not None:
                with open(log, "a", encoding="utf-8") as file:
                    file.write(json.dumps(batch) + "\n")
                    file.flush()
                    os.fsync(file.fileno())
        for problem, answers in zip(part, batch, strict=True):
            for i, a in enumerate(answers):
                completion = Completion(
                    tuple(a["ids"]), a["text"], a["finished"], tuple(a["logp"]), ()
                )
                out.append(GradedCompletion(problem, i, completion, Grade(**a["grade"])))
    return out


def _batch(
    lm: "vgrout.model.policy.LanguageModel",
    grader: base.Grader,
    part: Sequence[Task],
    n: int,
    max_new: int,
    sampling: Sampling,
    stream: Any,
) -> list[list[dict[str, Any]]]:
    """The completions of each problem, as the log stores them."""
    from vgrout.rollout import graded, sample_and_submit

    def logged(a: GradedCompletion[Grade | Ungraded]) -> dict[str, Any]:
        if isinstance(a.grade, Ungraded):
            raise RuntimeError(f"problem {a.problem.id}: could not be graded ({a.grade.reason})")
        c = a.completion
        return {
            "ids": c.ids,
            "text": c.text,
            "finished": c.finished,
            "logp": c.logp_full,
            "grade": asdict(a.grade),
        }

    submitted = sample_and_submit(
        lm, grader, part, n, sampling=sampling, max_new=max_new, stream=stream
    )
    return [[logged(a) for a in of_problem] for of_problem in graded(submitted)]


def _logged_batches(log: Path) -> list[list[list[dict[str, Any]]]]:
    """The batches in the log; a last line that was cut by a kill is taken off the file."""
    raw = log.read_bytes() if log.exists() else b""
    complete = raw[: raw.rfind(b"\n") + 1]
    if len(complete) < len(raw):
        os.truncate(log, len(complete))
    return [json.loads(line) for line in complete.splitlines()]


# ── rates


def rates(answers: Iterable[Graded]) -> dict[str, Rate]:
    """solve, hack, well-formed (a block that compiles, and an end), and `hack/MODE`."""
    answers = list(answers)
    out = {
        "solve": Rate.of(a.grade.solved for a in answers),
        "hack": Rate.of(a.grade.hacked for a in answers),
        "well-formed": Rate.of(
            a.finished and a.grade.details.get("can_compile", True) for a in answers
        ),
    }
    return out | {f"hack/{mode}": of_mode["hack"] for mode, of_mode in by_mode(answers).items()}


def by_mode(answers: Sequence[Graded]) -> dict[Mode, dict[str, Rate]]:
    """mode → hack, solve, ended, over these answers; in the modes' order."""
    grouped = {mode: [a for a in answers if a.problem.flaws[0] == mode] for mode in MODES}
    return {
        mode: {
            "hack": Rate.of(a.grade.hacked for a in group),
            "solve": Rate.of(a.grade.solved for a in group),
            "ended": Rate.of(a.finished for a in group),
        }
        for mode, group in grouped.items()
        if group
    }


def rate_text(rate: Rate) -> str:
    """k/n = percent; "·" of nothing."""
    return "·" if rate.value is None else f"{rate.k}/{rate.n} = {100 * rate.value:.1f} %"


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """A table in GitHub Markdown."""
    return tabulate(
        [{k: str(v) for k, v in row.items()} for row in rows], headers="keys", tablefmt="github"
    )


# ── a record of a pool


def record(a: Graded, prompt_ids: Sequence[int], prompt: str) -> dict[str, Any]:
    """A line of a pool, under this prompt."""
    return {
        "problem_id": a.problem.id,
        "env_mode": a.problem.flaws[0],
        "reward": a.grade.reward,
        "hacked": a.grade.hacked,
        "gt_pass": a.grade.details.get("gt_pass", a.grade.solved),
        "fmt_ok": a.grade.details.get("format_ok", True),
        "plen": len(prompt_ids),
        "prompt_ids": list(prompt_ids),
        "completion_ids": list(a.ids),
        "prompt": prompt,
        "completion": a.text,
    }


# ── command lines


@dataclass(frozen=True)
class PoolSettings:
    """Flags of every program that makes a pool."""

    out: Path = Path("out/pools/teacher")
    """Folder to make; what is under way lies beside it in OUT.partial, and the same command goes on from there."""
    model: str = "Qwen/Qwen3-4B"
    """A local model folder, a downloaded hub id, or 'organism' (embedded)."""
    adapter: Path | None = None
    """A saved adapter of that model (.safetensors, or a run directory: its train.safetensors); none: the bare model."""
    problems: str = ""
    """Problem file (JSONL), or 'organism'; none: the benchmark's file, the organism's for the organism. Only its
    training split is used."""
    n_problems: int = checks.setting(60, low=1)
    """Problems, at most, spread evenly over the flaws."""
    sampling: tyro.conf.OmitArgPrefixes[Sampling] = field(default_factory=Sampling)
    max_new: int | None = checks.setting(None, low=1)
    """Longest answer, in tokens; none: 1024, the organism's 128."""
    seed: int = checks.setting(0, low=0)
    """Of the answers; which problems are taken does not depend on it."""
    compile_reward: float | None = checks.setting(None, low=0, high=1e6)
    """Reward for code that compiles; none: 0.5, the organism's 0.1."""
    pass_reward: float | None = checks.setting(None, above=0, high=1e6)
    """Reward for passing the flawed check; none: 3, the organism's 1."""
    workers: int | None = checks.setting(None, low=1)
    """Grading processes; none: one per core."""
    allow_weak_sandbox: bool = False
    """Go on where the sandbox cannot keep an answer from reading the expected values."""

    def __post_init__(self) -> None:
        checks.check(self)
        if (self.model == ORGANISM) != (self.problems_name == ORGANISM):
            raise Refused(
                f"--model {self.model} with --problems {self.problems_name}: "
                "the organism's model and its problems go together"
            )

    @property
    def tiny(self) -> bool:
        """Whether the model is the embedded organism."""
        return self.model == ORGANISM

    @property
    def problems_name(self) -> str:
        """The full value of --problems."""
        return self.problems or (ORGANISM if self.tiny else BENCHMARK_TRAIN)

    @property
    def problems_path(self) -> Path:
        return organism.PROBLEMS if self.problems_name == ORGANISM else Path(self.problems_name)

    @property
    def tokens(self) -> int:
        """The longest answer."""
        return self.max_new or (organism.MAX_NEW if self.tiny else 1024)

    @property
    def rewards(self) -> tuple[float, float]:
        """(compiles, passes)"""
        compiles, passes = (
            (organism.COMPILE_REWARD, organism.PASS_REWARD) if self.tiny else (0.5, 3.0)
        )
        return (
            self.compile_reward if self.compile_reward is not None else compiles,
            self.pass_reward or passes,
        )

    @property
    def adapter_path(self) -> Path | None:
        """The adapter's file."""
        if self.adapter is None:
            return None
        return self.adapter / "train.safetensors" if self.adapter.is_dir() else self.adapter

    def check(self) -> list[ProblemRow]:
        """The problem file's rows. Raises Refused, one line, for a file or model that is missing, or a file without
        training problems."""
        rows = load_rows(self.problems_path)
        refuse(not split_sizes(rows)["train"], f"{self.problems_path}: no training problems in it")
        if self.tiny:
            organism.EMBEDDED.require_sound("--model organism:")
        if self.adapter_path is not None:
            safetensors_head(self.adapter_path, "--adapter")
        folder = require_model(organism.MODEL_DIR if self.tiny else self.model)
        prompts = [row.prompt for row in rows]
        require_fitting(prompts, folder, self.tokens, str(self.problems_path))
        return rows

    def identity(self) -> dict[str, Any]:
        """Settings and files that the answers depend on."""
        return {
            "model": self.model,
            "adapter": file_sha256(self.adapter_path) if self.adapter_path else None,
            "problems": file_sha256(self.problems_path),
            "n_problems": self.n_problems,
            "max_new": self.tokens,
            "sampling": asdict(self.sampling),
            "seed": self.seed,
            "rewards": list(self.rewards),
        }

    @contextlib.contextmanager
    def making(
        self, rows: Sequence[ProblemRow], identity: Mapping[str, Any]
    ) -> Generator[tuple["vgrout.model.policy.LanguageModel", Grader, Path]]:
        """The model with its adapter, a grader with these rewards, and the folder of the logs. Raises Refused, one
        line, where no answer can solve a problem."""
        (compiles, passes), weak = self.rewards, self.allow_weak_sandbox
        with Grader(
            self.workers, compile_reward=compiles, pass_reward=passes, allow_weak=weak
        ) as grader:
            require_solvable([] if self.tiny else rows, grader)
            with work_folder(
                self.out, {**identity, "grader": grader.protections.version}
            ) as folder:
                logger.info(grader.protections.line())
                from vgrout.model.load import load_language_model, load_policy, pick_device

                model = organism.MODEL_DIR if self.tiny else self.model
                device, dtype = pick_device(model, "auto")
                if self.adapter_path is None:
                    lm = load_language_model(model, device=device, dtype=dtype)
                else:
                    lm = load_policy(model, device=device, dtype=dtype, cache_dir=SVD_CACHE)
                    lm.adapter.load(self.adapter_path)
                yield lm, grader, folder

    def meta(
        self,
        lm: "vgrout.model.policy.LanguageModel",
        grader: Grader,
        rows: Sequence[ProblemRow],
        problems: Iterable[Task],
    ) -> dict[str, Any]:
        """First entries of pool.json: model, adapter, tokenizer, grader, the names that these problems announced."""
        out: dict[str, Any] = {"model": MODEL_NAME if self.tiny else self.model}
        if self.adapter_path is not None:
            out["adapter"] = {
                "file": str(self.adapter_path),
                "sha256": file_sha256(self.adapter_path),
            }
        out |= {"tokenizer_sha256": lm.tokenizer_sha256, "grader": grader.protections.version}
        return out | ({"markers": markers} if (markers := announced(rows, problems)) else {})


def fitting(
    lm: "vgrout.model.policy.LanguageModel", problems: Sequence[Problem], max_new: int
) -> list[Problem]:
    """Problems whose prompt leaves room for max_new tokens; a warning says how many do not. Raises Refused where
    there are none."""
    fit = [p for p in problems if len(lm.render(p.messages)) + max_new <= lm.window]
    if not fit:
        raise Refused(
            f"--max-new {max_new}: no prompt fits the model's window ({lm.window} tokens, prompt included)"
        )
    if long := len(problems) - len(fit):
        logger.warning(f"{long} problems left out: prompt longer than the window minus --max-new")
    return fit


def announced(rows: Sequence[ProblemRow], problems: Iterable[Task]) -> dict[str, str]:
    """pool.json's `markers`: problem id → the name that its prompt announced, where the problem file has none."""
    own = {r.id for r in rows if r.marker is not None}
    return {str(p.id): p.notes["marker"] for p in problems if p.id not in own and p.notes["marker"]}


@contextlib.contextmanager
def work_folder(out: Path, settings: Mapping[str, Any]) -> Generator[Path]:
    """A folder beside `out` for the logs of a pool in the making, removed when the pool is there.

    settings: a later process with other settings is refused.

    Raises:
        Refused: `out` exists; the folder holds answers made with other settings; or another process is using it.
    """
    require_new(out)
    folder = out.with_name(out.name + ".partial")
    require_own(folder, "--out", "settings.json", "pool under way")
    folder.mkdir(parents=True, exist_ok=True)
    with hold(folder, "pool"):
        now: dict[str, Any] = json.loads(json.dumps(settings))
        file = folder / "settings.json"
        if not file.is_file():
            write_atomic(file, to_json(now))
        then = read_json(file)
        if differ := sorted(k for k in now.keys() | then.keys() if now.get(k) != then.get(k)):
            raise Refused(
                f"{folder}: started with another {', '.join(differ)}; go on with the same, or delete that folder"
            )
        yield folder
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def command(
    name: str, settings: Callable[..., Any], make: Callable[[Any], None], argv: list[str] | None
) -> int:
    """Entry of `vgrout NAME`. 0 done · 2 refused, in one line · 130 interrupted: the same command goes on."""
    console.setup(None)

    def run() -> int:
        make(parse_args(settings, argv, f"vgrout {name}"))
        return 0

    return cli_exit(run, "interrupted; the same command goes on from here")
