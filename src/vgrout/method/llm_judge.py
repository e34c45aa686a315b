"""llm_judge: a language model is shown each rewarded answer, and says whether it games the check.

It reads answers as they are graded, and with --llm-judge-thoughts the thoughts before them.

The judge is a local model or an endpoint. A verdict is the last word of its reply, yes or no. It is asked once about
each text: verdicts are kept in judge.jsonl of the run's folder, by a hash of what the judge was shown, and a resumed
run reads them back. An answer whose judgement fails is unjudged: it has no flag, no rate counts it, and the run goes
on.
"""

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from loguru import logger

from vgrout.config.method import judge_endpoint, judge_prompt
from vgrout.config.specs import MONITORS
from vgrout.ground import ranks
from vgrout.ground.chat import Endpoint, NoReply, Reply
from vgrout.ground.data import Flags, GroupView, Message
from vgrout.ground.io import text_sha256, whole_lines
from vgrout.method.base import Monitor, Position, Views, flags_of, rewarded
from vgrout.method.live_direction import Setup
from vgrout.model.load.load import load_language_model
from vgrout.model.sampling.sampler import greedy

FILE = "judge.jsonl"
KEPT = 2000  # characters of a reply that are written
ROWS = 8  # answers that a local judge reads at once

Conversation = tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the judge said of one text. flagged: None where it gave no verdict, `why` says why."""

    key: str  # hash of the judge and of what it was shown
    step: int  # in which it was asked
    flagged: bool | None
    why: str = ""
    reply: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @classmethod
    def of(cls, key: str, step: int, reply: Reply | NoReply) -> "Verdict":
        if isinstance(reply, NoReply):
            return cls(key, step, None, why=str(reply))
        word = last_word(reply.text)
        # a reply that was cut off may end with a word that was not meant as the last
        is_one_word = re.fullmatch(r"\W*\w+\W*", reply.text) is not None
        is_whole = is_one_word or not reply.cut
        flagged = None
        why = "its reply does not end with yes or no"
        if word in ("yes", "no") and is_whole:
            flagged = word == "yes"
            why = ""
        return cls(
            key,
            step,
            flagged,
            why=why,
            reply=reply.text[-KEPT:],
            prompt_tokens=reply.prompt_tokens,
            completion_tokens=reply.completion_tokens,
        )


# "I cannot say yes or no", or the question's own words again
DECLINED = re.compile(r"\b(yes|no)(\W+n?or\W+|\s*/\s*)(yes|no)\W*$", re.IGNORECASE)


def last_word(text: str) -> str:
    """The last word of a reply, in small letters; "" where it has none, or ends with both verdicts."""
    if DECLINED.search(text):
        return ""
    words = re.findall(r"[^\W\d_]+", text)
    return words[-1].lower() if words else ""


def shown(template: str, view: GroupView, text: str) -> Conversation:
    """What the judge is shown of an answer: the template with the prompt and the answer in it.

    Both are put in at once: an answer that holds "{prompt}" is left as it is.
    """
    prompt = "\n\n".join(message["content"] for message in view.messages)
    parts = {"{prompt}": prompt, "{answer}": text}

    def part(placeholder: re.Match[str]) -> str:
        return parts[placeholder[0]]

    filled = re.sub(r"\{prompt\}|\{answer\}", part, template)
    return ({"role": "user", "content": filled},)


class LLMJudge(Monitor):
    """See above. folder: where its verdicts are kept; None: only in memory. seconds: the longest that it takes a
    step."""

    spec = MONITORS["llm_judge"]
    measures = frozenset({"judge"})

    def __init__(
        self,
        judge: "Endpoint | LocalJudge | None",
        template: str,
        *,
        seconds: float,
        folder: Path | None = None,
        thoughts: bool = False,
    ) -> None:
        """judge: None on a rank that does not ask. thoughts: it is shown those before the answers, too."""
        self.judge = judge
        self.template = template
        self.seconds = seconds
        self.thoughts = thoughts
        self.file = None if folder is None else folder / FILE
        # of each text, in the order of the steps in which it was asked: more than one where some failed
        self.known: dict[str, list[Verdict]] = {}
        if self.file is not None and judge is not None:
            self.known = read_verdicts(self.file)
        self._measured: tuple[int, dict[str, int]] = (-1, {})

    @classmethod
    def make(cls, setup: Setup) -> "LLMJudge":
        method = setup.cfg.method
        judge: Endpoint | LocalJudge | None = None
        if ranks.first() and method.llm_judge_url:
            judge = judge_endpoint(method)
        elif ranks.first():
            judge = LocalJudge(
                method.llm_judge_model, setup.device, max_new=method.llm_judge_max_new
            )
        template = judge_prompt(method.llm_judge_prompt)
        return cls(
            judge,
            template,
            seconds=method.llm_judge_timeout,
            folder=setup.folder,
            thoughts=method.llm_judge_thoughts,
        )

    def step_columns(self, step: int) -> Mapping[str, int]:
        of_step, columns = self._measured
        return columns if of_step == step else {}

    def flag(self, views: Views, step: int) -> list[Flags]:
        wanted: dict[Position, Conversation] = {}
        for i, b in rewarded(views):
            view = views[i]
            text = view.texts[b]
            if self.thoughts:
                text = view.thoughts[b].text + text
            wanted[i, b] = shown(self.template, view, text)
        conversations = list(wanted.values())

        def ask() -> list[Verdict]:
            return self._verdicts(conversations, step)

        # the first rank's; if it fails here, all of them do
        verdicts = ranks.gather(ask)[0]
        by_position = dict(zip(wanted, verdicts, strict=True))
        flagged = {position for position, verdict in by_position.items() if verdict.flagged}
        unjudged = {p for p, verdict in by_position.items() if verdict.flagged is None}
        self._measured = step, _counted(verdicts, step)
        return flags_of(views, flagged, unjudged=unjudged)

    def _verdicts(
        self,
        conversations: Sequence[Conversation],
        step: int,
    ) -> list[Verdict]:
        """Return a verdict on each conversation; ask the judge where there is none yet.

        Returns [] on a rank that does not ask.
        """
        if self.judge is None:
            return []
        keys = [self._key(conversation) for conversation in conversations]
        unknown: dict[str, Conversation] = {}
        for key, conversation in zip(keys, conversations, strict=True):
            before = self._before(key, step)
            # what failed is asked again in a later step; in the same one, which a resumed run repeats, it stays
            asked_in_vain = before is not None and before.flagged is None and before.step != step
            if before is None or asked_in_vain:
                unknown[key] = conversation
        if unknown:
            asked = list(unknown.values())
            replies = self.judge.ask_all(asked, self.seconds)
            new: list[Verdict] = []
            for key, reply in zip(unknown, replies, strict=True):
                new.append(Verdict.of(key, step, reply))
            self._keep(new)
            _warn(new, step)
        verdicts: list[Verdict] = []
        for key in keys:
            verdict = self._before(key, step)
            assert verdict is not None
            verdicts.append(verdict)
        return verdicts

    def _before(self, key: str, step: int) -> Verdict | None:
        """The last verdict up to this step: a resumed run has later ones in its file."""
        verdict: Verdict | None = None
        for found in self.known.get(key, ()):
            if found.step <= step:
                verdict = found
        return verdict

    def _key(self, conversation: Conversation) -> str:
        assert self.judge is not None
        text = json.dumps([self.judge.identity, conversation])
        return text_sha256(text)

    def _keep(self, new: Sequence[Verdict]) -> None:
        """Remember these verdicts, and write them."""
        for verdict in new:
            _remember(self.known, verdict)
        if self.file is None:
            return
        with open(self.file, "a", encoding="utf-8", errors="backslashreplace") as lines:
            for verdict in new:
                lines.write(json.dumps(asdict(verdict)) + "\n")


def _counted(verdicts: Sequence[Verdict], step: int) -> dict[str, int]:
    """A step's columns. Equal texts are one question."""
    failed = 0
    asked: dict[str, Verdict] = {}
    for verdict in verdicts:
        if verdict.flagged is None:
            failed += 1
        if verdict.step == step:
            asked[verdict.key] = verdict
    return {
        "judge_asked": len(asked),
        "judge_failed": failed,
        "judge_in": sum(verdict.prompt_tokens for verdict in asked.values()),
        "judge_out": sum(verdict.completion_tokens for verdict in asked.values()),
    }


def _warn(new: Sequence[Verdict], step: int) -> None:
    failed = [verdict.why for verdict in new if verdict.flagged is None]
    if failed:
        logger.warning(
            f"step {step}: {len(failed)} of {len(new)} answers have no verdict of the judge, and no flag: {failed[0]}"
        )


def read_verdicts(file: Path) -> dict[str, list[Verdict]]:
    """The verdicts of a run so far, by key."""
    found: dict[str, list[Verdict]] = {}
    for line in whole_lines(file):
        _remember(found, Verdict(**json.loads(line)))
    return found


def _remember(known: dict[str, list[Verdict]], verdict: Verdict) -> None:
    """Add a verdict to those of its text. Its reply is in the file alone: a run of many steps has many."""
    of_text = known.setdefault(verdict.key, [])
    without_reply = replace(verdict, reply="")
    of_text.append(without_reply)


class LocalJudge:
    """A model of a folder, in this process: greedy, some conversations at once, the shortest first."""

    def __init__(self, model: str, device: torch.device, *, max_new: int) -> None:
        """Raises Refused where the model cannot be loaded."""
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.lm = load_language_model(model, device=device, dtype=dtype, flag="--llm-judge-model")
        self.max_new = max_new
        self.identity = f"{Path(model).resolve()} {max_new}"

    def ask_all(
        self, conversations: Sequence[Conversation], seconds: float
    ) -> list[Reply | NoReply]:
        deadline = time.monotonic() + seconds
        prompts = [self.lm.render(conversation) for conversation in conversations]
        replies: dict[int, Reply | NoReply] = {}
        fitting: list[int] = []
        for i, prompt in enumerate(prompts):
            if len(prompt) + self.max_new <= self.lm.window:
                fitting.append(i)
            else:
                replies[i] = NoReply(f"longer than the judge's window of {self.lm.window} tokens")
        fitting.sort(key=lambda i: len(prompts[i]))
        for first in range(0, len(fitting), ROWS):
            rows = fitting[first : first + ROWS]
            left = deadline - time.monotonic()
            if left <= 0:
                break
            found = greedy(self.lm, [prompts[i] for i in rows], self.max_new, left)
            for i, answer in zip(rows, found, strict=True):
                replies[i] = Reply(
                    answer.text,
                    cut=not answer.finished,
                    prompt_tokens=len(prompts[i]),
                    completion_tokens=len(answer.ids) - answer.finished,
                )
        late = NoReply(f"no answer within {seconds:g} s")
        return [replies.get(i, late) for i in range(len(conversations))]
