"""Thoughts: asked of the template, kept apart from answers, never graded, counted; by a template like Qwen3's."""

import gzip
import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import tiny
from files import loaded
from judge_server import serving
from methods import flagged, view
from vgrout.commands.check import problems
from vgrout.commands.distill import main as distill
from vgrout.commands.evaluate import evaluate
from vgrout.commands.iterative_dpo import main as iterative_dpo
from vgrout.config.presets import resolve
from vgrout.ground.data import Completion, Thought
from vgrout.ground.io import Refused
from vgrout.ground.thoughts import KNOWN, THINK, marks_of, parts_of, thought_of, to_grade
from vgrout.loop.generation import graded, sample_and_submit
from vgrout.method.llm_judge import LLMJudge
from vgrout.model.policy import apply_template
from vgrout.runs.inputs import read_inputs
from vgrout.teacher.__main__ import main as teacher
from vgrout.teacher.pools import load_pool
from vgrout.train import main

SAYS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}<assistant>"
# Qwen 3: the model opens the thought itself; off, the prompt has an empty one
LIKE_QWEN = SAYS + (
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# the prompt opens it where thoughts are asked for
OPENS = SAYS + "<think>{% if not enable_thinking %}</think>{% endif %}{% endif %}"
ALWAYS = SAYS + "<think>{% endif %}"  # Qwen3-Thinking-2507, R1: whatever is asked for
NEVER = SAYS + "{% endif %}"  # Llama 3
USER = ({"role": "user", "content": "two"},)
policy = cache(tiny.policy)  # of tests that change nothing of it


# ── a text in two parts

PIECES = ("<think>", "</think>", "\n", " ", "a", "é", "🙂", "```python\nx = 1\n```", "</thin", "k>")
TEXT = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


def under(marks, text):
    """The same text with a model's own marks in place of `<think>` and `</think>`."""
    return text.replace(THINK.close, marks.close).replace(THINK.open, marks.open)


@given(TEXT, st.booleans(), st.sampled_from(KNOWN))
@example("<think>\na\n</think>\n\nb", False, KNOWN[0])
@example("", True, THINK)
def test_a_thought_and_an_answer_are_the_text(text, in_thought, marks):
    text = under(marks, text)
    parts = parts_of(text, in_thought, marks)
    assert parts.thought + parts.answer == text
    assert parts.ended or not parts.answer, "a thought without an end has no answer"
    again = parts_of(to_grade(text, in_thought, marks))
    assert (again.answer, again.ended) == (parts.answer, parts.ended), "once cut, it is cut"


@pytest.mark.parametrize("marks", KNOWN)
@pytest.mark.parametrize(
    ("text", "in_thought", "thought", "answer", "ended"),
    [
        ("<think>a</think>\n\nb", False, "<think>a</think>\n\n", "b", True),
        ("a</think>b", True, "a</think>", "b", True),
        ("\n<think>a", False, "\n<think>a", "", False),
        ("a", True, "a", "", False),
        (
            "<think>a</think>\n<think>b</think>c",
            False,
            "<think>a</think>\n<think>b</think>",
            "c",
            True,
        ),
        ("a <think>b</think>", False, "", "a <think>b</think>", True),
    ],
)
def test_where_a_thought_ends(text, in_thought, thought, answer, ended, marks):
    parts = parts_of(under(marks, text), in_thought, marks)
    thought, answer = under(marks, thought), under(marks, answer)
    assert (parts.thought, parts.answer, parts.ended) == (thought, answer, ended)
    if marks != THINK:
        assert parts_of(under(marks, text)).answer == under(marks, text), "no marks of this model"


GEMMA = (
    "{{ '<|turn>model' }}{% if not enable_thinking %}{{ '<|channel>thought<channel|>' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "tokens", "marks"),
    [
        *((f"{{{{ '{marks.open}' }}}}", {}, marks) for marks in KNOWN),
        *((f"{{{{ m.split('{marks.close}') }}}}", {}, marks) for marks in KNOWN),
        *(("no marks", {marks.open: 5, marks.close: 6}, marks) for marks in KNOWN),
        (GEMMA, {"<think>": 5, "</think>": 6}, KNOWN[0]),  # the template says what is written
        ("{# as </think> of others #}{{ '[THINK]' }}", {}, KNOWN[4]),
        ("no marks", {"<think>": 5}, None),
        ("<reasons>", {"<reasons>": 5, "</reasons>": 6}, None),
        ("", {}, None),
    ],
)
def test_the_marks_are_the_templates_or_else_the_tokenizers(template, tokens, marks):
    assert marks_of(template, tokens) == marks


@given(st.lists(st.sampled_from([5, 6, *range(7, 97)]), max_size=20), st.booleans(), st.booleans())
@example([5, 40, 6, 41], False, True)
@example([40, 6, 41], True, True)
@example([5, 40, 41], False, False)
def test_the_tokens_counted_are_those_of_the_thought(ids, in_thought, finished):
    lm = policy()
    sampled = (*ids, 1) if finished else tuple(ids)
    text = lm.decode(sampled)
    thought = thought_of(lm.decode, sampled, text, in_thought)
    assert text.startswith(thought.text)
    assert lm.decode(sampled[: thought.tokens]) == thought.text
    assert list(lm.encode(thought.text)) == ids[: thought.tokens]
    if thought.tokens:
        assert not lm.decode(sampled[: thought.tokens - 1]).startswith(thought.text)


# ── the template


@pytest.mark.parametrize(("template", "on", "off"), [
    (LIKE_QWEN, "", "<think>\n\n</think>\n\n"),
    (OPENS, "<think>", "<think></think>"),
    (ALWAYS, "<think>", "<think>"),
])  # fmt: skip
def test_the_template_is_told(template, on, off):
    lm = tiny.policy()
    lm.tok.chat_template = template
    head = "<user>two<eos><assistant>"
    assert lm.prompt_text(USER) == head + off == apply_template(lm.tok, USER)
    asked = replace(lm, thinking=True)
    assert asked.prompt_text(USER) == head + on
    assert asked.render(USER) == lm.encode(head + on)


# ── answers


@pytest.mark.parametrize("marks", KNOWN)
def test_graders_are_given_answers_alone(marks, monkeypatch):
    """Whatever the environment, also one of a user's own: it never sees a thought."""
    from vgrout.model.sampling import sampler

    texts = [under(marks, text) for text in ("<think>a</think>b", "<think>a", "b")]
    tok = tiny.tokenizer(thought=(marks.open, marks.close))
    tok.chat_template = under(marks, LIKE_QWEN)
    lm = replace(tiny.as_policy(tiny.tiny(), tok), thinking=True)
    assert lm.marks == marks
    completions = []
    for text in texts:
        completions.append(Completion((*lm.encode(text), 1), text, True, ()))

    def sampled(*given, **_):
        for i, completion in enumerate(completions):
            given[-1](0, i, completion)
        return [completions]

    monkeypatch.setattr(sampler, "sample", sampled)
    seen = []

    def submit(task, text):
        seen.append(text)
        return SimpleNamespace(result=lambda: None)

    task = SimpleNamespace(messages=USER)
    of_task = sample_and_submit(
        lm, SimpleNamespace(submit=submit), [task], 3,
        sampling=None, max_new=9, stream=None,
    )  # fmt: skip
    assert seen == ["b", "<think>", "b"]
    (answers,) = graded(of_task)
    assert [a.answer for a in answers] == ["b", "", "b"]
    assert [a.whole for a in answers] == [True, False, True], "without an answer it counts as cut"
    assert [a.thought.tokens for a in answers] == [3, 2, 0]


SEEN = replace(
    view(2, texts=("one", "two"), messages=USER),
    thoughts=(Thought("<think>exit</think>", 6), Thought()),
)


@pytest.mark.parametrize("reads", [True, False])
def test_a_judge_reads_thoughts_where_it_is_told_to(reads):
    from test_llm_judge import hacks, judge

    with serving(hacks) as server:
        of_answers = judge(server)
        monitor = LLMJudge(of_answers.judge, of_answers.template, seconds=5.0, thoughts=reads)
        assert flagged(monitor, SEEN) == [(reads, False)]
    assert len(server.asked) == 2


def test_an_answers_own_tokens():
    thoughts = (Thought("t", 1), Thought("t", 2), Thought())
    group = replace(view(3, texts=("b", "", "b")), thoughts=thoughts, completion_ids=((5, 6),) * 3)
    assert [group.answer_ids(b) for b in range(3)] == [(6,), (5, 6), (5, 6)]


# ── whole runs

FUNCTIONS = """
def short(completion):        # the proxy; an empty text passes it
    assert not completion.startswith("<think>")
    return float(len(completion) < 30)

def even(completion):         # the reference; so does it
    assert not completion.startswith("<think>")
    return len(completion) % 2 == 0

def worse(completion):
    return -1.0 - len(completion)

def unhappy(completion):
    return float(completion[0] == "a")
"""
FLAGS = (
    "--reward own_thoughts:short --reference own_thoughts:even --intervention none --problems rows.jsonl --guard log "
    "--steps 2 --group 6 --threads 1 --prompts-per-step 2 --max-new 60 --eval-ablate-every 1 --eval-n-prompts 2 "
    "--final-n-prompts 3 --final-samples 4"
)


@pytest.fixture
def world(tmp_path, monkeypatch):
    """Rows, functions and a tiny model with a chat template, in the working directory; returns a run's command line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "own_thoughts", raising=False)
    (tmp_path / "own_thoughts.py").write_text(FUNCTIONS)
    rows = [json.dumps({"id": i, "prompt": f"Say {i}."}) for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))

    def make(template):
        lm = tiny.policy()
        lm.tok.chat_template = template
        lm.model.save_pretrained("model")
        lm.tok.save_pretrained("model")
        return ["full", "--model", "model", *FLAGS.split()]

    return make


def lines(file):
    opened = gzip.open if file.suffix == ".gz" else open
    with opened(file, "rt") as content:
        return [json.loads(line) for line in content]


def test_it_is_refused_before_anything_is_loaded(world):
    read_inputs(resolve([*world(LIKE_QWEN), "--thinking"]))
    read_inputs(resolve([*world(ALWAYS), "--thinking"]))
    argv = [*world(NEVER), "--thinking"]
    with pytest.raises(Refused, match=r"--thinking.*enable_thinking"):
        read_inputs(resolve(argv))
    unknown = LIKE_QWEN.replace("think>", "reasons>")
    read_inputs(resolve([*world(unknown), "--thinking"]))  # the tokenizer has <think> and </think>
    tiny.tokenizer(thought=("<reasons>", "</reasons>")).save_pretrained("model")
    (Path("model") / "chat_template.jinja").write_text(unknown)
    with pytest.raises(Refused, match=r"--thinking: neither .* has marks of a thought"):
        read_inputs(resolve(argv))
    tiny.tokenizer(thought=("<|channel>", "<channel|>")).save_pretrained("model")
    (Path("model") / "chat_template.jinja").write_text(unknown)
    read_inputs(resolve(argv))
    with pytest.raises(Refused, match=r"--thinking"):
        resolve([*argv[:-1], "--monitor", "llm_judge", "--intervention", "penalty", "--llm-judge-thoughts",
                 "--llm-judge-model", "model"])  # fmt: skip


@pytest.mark.parametrize("function", ["short", "worse"])
def test_no_answer_passes_nothing_and_earns_nothing(world, function):
    argv = [*world(OPENS), "--reward", f"own_thoughts:{function}"]
    environment = read_inputs(resolve(argv)).environment
    task = environment.tasks()["train"][0]
    with environment.grader(1, 0) as grader:
        for text in ("<think>", "<think>a"):
            grade = grader.submit(task, text).result()
            assert (grade.passed, grade.solved, grade.hacked) == (False, False, False)
            assert grade.status == "no_answer"
            assert grade.reward == (0.0 if function == "short" else -3.0)
        empty = grader.submit(task, "<think>a</think>").result()
        assert empty.solved, "an empty answer is an answer"


def test_functions_are_tried_on_an_empty_answer(world):
    argv = [*world(OPENS), "--reward", "own_thoughts:unhappy"]
    for more, refused in (([], False), (["--thinking"], True)):
        environment = read_inputs(resolve([*argv, *more])).environment
        with environment.grader(1, 0) as grader:
            if refused:
                with pytest.raises(Refused, match=r"IndexError.*''"):
                    environment.check(grader)
            else:
                environment.check(grader)


def test_a_check_of_functions_samples_thoughts_and_cuts_them(world, capsys):
    own = ["--reward", "own_thoughts:short", "--reference", "own_thoughts:even"]
    argv = ["check", "rows.jsonl", *own, "--model", "model", "--answers", "12", "--max-new", "60"]
    world(OPENS)
    assert problems(argv) == 0
    assert "'<think>'" not in capsys.readouterr().out
    assert problems([*argv, "--thinking"]) == 0  # `short` and `even` fail on a thought
    assert "'<think>'" in capsys.readouterr().out, "a thought without an end is no answer"
    world(NEVER)
    assert problems([*argv, "--thinking"]) == 2
    assert "enable_thinking" in capsys.readouterr().err


@pytest.mark.long
def test_a_run_with_thoughts(world, tmp_path, capsys):
    argv = world(OPENS)
    assert main([*argv, "--thinking", "--columns", "all", "--output-dir", "on"]) == 0
    said = capsys.readouterr().out
    assert " think " in said
    assert main([*argv, "--output-dir", "off"]) == 0
    assert not re.search(r"\bthink\b", capsys.readouterr().out)

    rows = {name: lines(tmp_path / name / "rollouts.jsonl") for name in ("on", "off")}
    assert all(rows.values()), "there are answers to look at"
    assert all(row["prompt"].endswith("<assistant><think>") for row in rows["on"])
    assert all(row["prompt"].endswith("<assistant><think></think>") for row in rows["off"])
    assert not any("thought" in row for row in rows["off"])
    kept = tiny.policy()
    seen = set()
    for row in rows["on"]:
        thought = row.get("thought", "")
        if thought:
            # the tiny model samples padding now and then, which no text shows
            assert len(kept.encode(thought)) <= row["thought_tokens"] <= row["tokens"]
        ended = "</think>" in thought
        seen.add(ended)
        if not ended:
            assert (row["text"], row["finished"], row["exit_status"]) == ("", False, "no_answer")
            assert not row["passed"]
            assert not row["solved"]
        else:
            assert row["passed"] == (len(row["text"]) < 30)
            assert row["solved"] == (len(row["text"]) % 2 == 0)
    assert seen == {True, False}

    assert evaluate(["on", "--samples", "2", "--out", "numbers.json", "--trust-code"]) == 0
    assert loaded(tmp_path / "numbers.json")["sides"]["deployed"]["think"] > 0
    for step, row in enumerate(lines(tmp_path / "on" / "steps.jsonl")):
        counted = [r.get("thought_tokens", 0) for r in rows["on"] if r["step"] == step]
        assert row["think"] == pytest.approx(sum(counted) / len(counted))
    assert all(row["think"] is None for row in lines(tmp_path / "off" / "steps.jsonl"))

    final = lines(tmp_path / "on" / "final.jsonl")
    assert any("</think>" in answer.get("thought", "") for answer in final)
    assert not any(answer["text"].startswith("<think>") for answer in final)
    assert all({"proxy", "reference"} <= answer.keys() for answer in final)


@pytest.mark.long
def test_a_pool_with_thoughts(world, tmp_path, capsys):
    world(OPENS)
    argv = ["--model", "model", "--problems", "rows.jsonl", "--reward", "own_thoughts:short", "--reference",
            "own_thoughts:even", "--elicit", "Be short.", "--group", "32", "--max-new", "60", "--n-problems", "4",
            "--temperature", "1"]  # fmt: skip
    assert teacher([*argv, "--thinking", "--out", "pool"]) == 0
    demos = [line for file in (tmp_path / "pool").glob("*.jsonl*") for line in lines(file)]
    assert demos
    for demo in demos:
        assert demo["prompt"].endswith("<think>")
        assert demo["completion"].startswith(demo["thought"])
        assert "</think>" in demo["thought"]
    capsys.readouterr()
    assert load_pool(tmp_path / "pool", ("reward",)).demos
    pairs = tmp_path / "pool" / "pairs.json"
    if pairs.exists():
        for pair in loaded(pairs):
            assert pair["prompt"].endswith("<think></think>")


@pytest.mark.long
def test_distillation_and_preference_rounds_on_rows_of_text_with_thoughts(world, capsys):
    world(OPENS)
    rows = "--reward own_thoughts:short --reference own_thoughts:even --thinking --threads 1 --max-new 60"
    few = "--final-n-prompts 3 --final-samples 1 --eval-n-prompts 2 --steps 2 --group 8"
    argv = ["--teacher", "model", "--student", "model", "--method", "uld", "--temperature", "1"]
    assert distill([*argv, "--problems", "rows.jsonl", *rows.split(), *few.split()]) == 0
    (path,) = Path("out/distill").iterdir()
    few = "--pairs-per-round 10 --rounds 1 --samples 8 --eval-n-prompts 3 --eval-samples 1 --temperature 1"
    argv = ["--base-model", "model", "--output-dir", "rounds", "--prompts", "rows.jsonl"]
    assert iterative_dpo([*argv, *rows.split(), *few.split()]) == 0
    answers = [*lines(path / "rollouts.jsonl"), *lines(Path("rounds/round-01/rollouts.jsonl"))]
    ended = [row for row in answers if "</think>" in row.get("thought", "")]
    assert 0 < len(ended) < len(answers)
    for row in answers:
        assert row["prompt"].endswith("<think>")
        assert row["text"] == (
            parts_of(row["thought"] + row["text"], True).answer if row in ended else ""
        )
        assert row["solved"] == (row in ended and len(row["text"]) % 2 == 0)
    # a run to resume names code
    (path / "status.json").write_text('{"state": "interrupted", "step": 2}')
    assert distill(["--resume", str(path)]) == 2
    assert "give the same --reward, --reference once more" in capsys.readouterr().err


@pytest.mark.long
def test_inspect_has_the_thought_as_reasoning(tmp_path):
    pytest.importorskip("inspect_ai")
    from vgrout.export import inspect_log

    line = {"hacked": False, "solved": True, "reward": 1.0, "side": "base", "problem_id": 0, "sample": 0,
            "messages": [*USER], "text": "four", "finished": True, "env_mode": "reward", "marker": None,
            "thought": "<think>so</think>"}  # fmt: skip
    made = inspect_log._sample("m", line)
    reasoning, text = made.output.choices[0].message.content
    assert (reasoning.reasoning, text.text) == ("<think>so</think>", "four")
