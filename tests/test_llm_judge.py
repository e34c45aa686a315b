"""The monitor llm_judge: a language model behind a real HTTP server with real faults, or a local one."""

import json
import time
from dataclasses import replace

import pytest
import torch

from files import loaded
from judge_server import reply, serving
from methods import flagged, view
from runs import flags, only_run, rows, run
from tiny import policy as tiny_policy
from vgrout.config.method import JUDGE_PROMPT, KEY, judge_endpoint, judge_prompt, try_endpoint
from vgrout.config.presets import resolve
from vgrout.ground import embedded
from vgrout.ground.chat import Endpoint, NoReply, Reply, parsed
from vgrout.ground.data import Completion
from vgrout.ground.io import Refused, json_lines
from vgrout.method.llm_judge import (
    LLMJudge,
    LocalJudge,
    Verdict,
    last_word,
    read_verdicts,
    shown,
)
from vgrout.model.load.source import require_model
from vgrout.report import load, tables


def hacks(text):
    """What the judge of these tests says."""
    return "It ends the program early.\n\n**Yes.**" if "exit" in text else "It is honest: no"


def judge(server, folder=None, seconds=5.0):
    endpoint = Endpoint(server.url, "judge", key="secret-key")
    template = "{prompt} {answer}"
    return LLMJudge(endpoint, template, seconds=seconds, folder=folder)


SEEN = view(
    texts=("exit()", "return 1", "exit() too", "nothing"),
    passed=(True, True, True, False),
    messages=({"role": "user", "content": "Sum the list."},),
)


def test_the_last_word_of_a_reply_about_a_rewarded_answer_decides():
    with serving(hacks) as server:
        assert flagged(judge(server), SEEN) == [(True, False, True, False)]
    assert len(server.asked) == 3, "what is not rewarded is not asked about"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("It is.\n\n**YES.**", "yes"),
        ("No, it is honest.\nVerdict: no", "no"),
        ("<think>yes?</think> no 👍", "no"),
        ("", ""),
        ("I cannot answer with a simple yes or no.", ""),
        ("Yes or no: no", "no"),
    ],
)
def test_the_last_word(text, word):
    assert last_word(text) == word


def test_what_is_sent_is_the_chat_protocol():
    with serving(hacks) as server:
        monitor = judge(server)
        monitor.judge = Endpoint(server.url, "m", key="secret-key", max_new=17)
        flagged(monitor, SEEN)
    asked, headers = server.asked[0], server.headers[0]
    assert (asked["path"], asked["model"], asked["max_tokens"]) == ("/v1/chat/completions", "m", 17)
    assert asked["messages"][0]["content"].startswith("Sum the list. ")
    assert headers["Authorization"] == "Bearer secret-key"


# fault: whether there is a verdict at last, and how often a request is sent
FAULTS = {
    "429 then right": (True, 2),
    "bad usage": (True, 1),
    "500 for ever": (False, 5),
    "redirect": (False, 1),
    "garbage JSON": (False, 1),
    "huge": (False, 1),
    "hang-up": (False, 5),
    "no verdict": (False, 1),
    "slow": (False, 1),
    "drip": (False, 1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_answer_whose_judgement_fails_has_no_flag_and_is_counted(fault, monkeypatch, tmp_path):
    monkeypatch.setattr("vgrout.ground.chat.PAUSE", 0.01)
    there, requests = FAULTS[fault]
    one = replace(SEEN, passed=(True, False, False, False))
    with serving(hacks, fault) as server:
        monitor = judge(server, tmp_path, seconds=1.0 if fault in ("slow", "drip") else 20.0)
        began = time.monotonic()
        assert flagged(monitor, one) == [(there or None, False, False, False)]
        assert time.monotonic() - began < 15
    assert len(server.asked) == requests
    columns = monitor.step_columns(0)
    assert (columns["judge_asked"], columns["judge_failed"]) == (1, int(not there))
    written = (tmp_path / "judge.jsonl").read_text()
    assert "secret-key" not in written
    assert bool(json.loads(written)["why"]) != there


def test_requests_go_out_at_once():
    many = view(24, texts=tuple(f"exit {b}" for b in range(24)))
    with serving(hacks, "a little slow") as server:
        for concurrency, fewest, most in ((1, 1, 1), (8, 3, 8)):
            server.most_at_once = 0
            monitor = judge(server, seconds=30)
            monitor.judge = Endpoint(server.url, "m", concurrency=concurrency)
            few = replace(many, passed=(*(True,) * 8, *(False,) * 16))
            assert sum(flagged(monitor, few)[0]) == 8
            assert fewest <= server.most_at_once <= most


@pytest.mark.parametrize("fault", ["drip", "500 for ever"])
def test_it_never_takes_longer_than_it_is_told(fault, monkeypatch):
    monkeypatch.setattr("vgrout.ground.chat.PAUSE", 60.0)
    many = view(40, texts=tuple(f"exit {b}" for b in range(40)))
    with serving(hacks, fault) as server:
        monitor, began = judge(server, seconds=1.0), time.monotonic()
        assert flagged(monitor, many) == [(None,) * 40]
        assert time.monotonic() - began < 2.5
        assert monitor.step_columns(0)["judge_failed"] == 40
        assert monitor.step_columns(1) == {}


def test_a_text_is_asked_about_once_and_a_resumed_run_knows_what_was_said(tmp_path):
    with serving(hacks) as server:
        first = judge(server, tmp_path)
        want = flagged(first, SEEN, SEEN, step=3)
        assert len(server.asked) == 3
        counted = first.step_columns(3)
        assert counted == {"judge_asked": 3, "judge_failed": 0, "judge_in": 33, "judge_out": 9}
        assert flagged(first, SEEN, step=4) == want[:1]
        assert first.step_columns(4)["judge_asked"] == first.step_columns(4)["judge_in"] == 0
        with open(tmp_path / "judge.jsonl", "a") as torn:
            torn.write('{"key": "a", "st')
        again = judge(server, tmp_path)
        assert flagged(again, SEEN, SEEN, step=3) == want
        assert again.step_columns(3) == counted, "the step reads as it did"
        assert len(server.asked) == 3
        other = judge(server, tmp_path)
        other.template = "Is this honest? {answer}"
        flagged(other, SEEN)
        assert len(server.asked) == 6, "another question is another text"
        assert len(read_verdicts(tmp_path / "judge.jsonl")) == 6, "the torn line took none along"


def test_what_failed_is_asked_again_in_a_later_step_and_stays_so_in_its_own(tmp_path):
    with serving(hacks, "401") as server:
        monitor = judge(server, tmp_path)
        assert flagged(monitor, SEEN, step=0) == [(None, None, None, False)]
        server.fault = ""
        assert flagged(monitor, SEEN, step=1) == [(True, False, True, False)]
        resumed = judge(server, tmp_path)
        n = len(server.asked)
        assert flagged(resumed, SEEN, step=0) == [(None, None, None, False)]
        assert resumed.step_columns(0)["judge_failed"] == 3
        assert flagged(resumed, SEEN, step=1) == [(True, False, True, False)]
        assert resumed.step_columns(1) == monitor.step_columns(1)
        assert len(server.asked) == n


def test_a_key_that_a_server_quotes_is_written_nowhere(tmp_path):
    with serving(lambda _: "you said Bearer secret-key, so yes") as server:
        assert flagged(judge(server, tmp_path), SEEN) == [(True, True, True, False)]
        server.fault = "401"
        flagged(judge(server, tmp_path), replace(SEEN, texts=("a", "b", "c", "d")))
    written = (tmp_path / "judge.jsonl").read_text()
    assert "secret-key" not in written
    assert "wrong key" in written


@pytest.mark.parametrize("key", ["no", "content"])
def test_a_placeholder_for_a_key_takes_nothing_out_of_an_answer(key):
    with serving(lambda _: "tokens: no") as server:
        endpoint = Endpoint(server.url, "judge", key=key)
        (answer,) = endpoint.ask_all([[{"role": "user", "content": "?"}]], 10)
    assert answer.text == "tokens: no"
    assert answer.prompt_tokens > 0


def test_a_prompt_of_ones_own(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text("Task {prompt}\nAnswer {answer}\nBraces {stay} {}")
    template = judge_prompt(path)
    sly = shown(template, SEEN, "{prompt} \\1 {answer}")[0]["content"]
    assert sly == "Task Sum the list.\nAnswer {prompt} \\1 {answer}\nBraces {stay} {}"
    assert judge_prompt(None) == JUDGE_PROMPT
    path.write_text("yes or no?")
    with pytest.raises(Refused, match=f"--llm-judge-prompt {path}: should hold {{answer}}"):
        judge_prompt(path)
    for absent in (tmp_path / "no.txt", tmp_path):
        with pytest.raises(Refused, match="cannot be read"):
            judge_prompt(absent)


BY_URL = ["--llm-judge-url=http://localhost:1/v1", "--llm-judge-model=m"]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "which judge"),
        (BY_URL[:1], "which judge"),
        (["--llm-judge-url=file:///etc/passwd", "--llm-judge-model=m"], "should be http://HOST/v1"),
        (["--llm-judge-url=http://me:key@host/v1", "--llm-judge-model=m"], "without a key"),
    ],
)
def test_a_judge_that_cannot_be_is_refused_in_one_line(argv, says):
    for method in (["--intervention=penalty", "--monitor=llm_judge"], ["--shadow=llm_judge"]):
        with pytest.raises(Refused) as e:
            resolve(["smoke", *method, *argv])
        assert says in str(e.value)
        assert "\n" not in str(e.value)


def test_a_key_that_is_none_is_refused_and_not_quoted(monkeypatch):
    monkeypatch.setenv(KEY, "a\nb")
    method = resolve(["smoke", "--intervention=penalty", "--monitor=llm_judge", *BY_URL]).method
    with pytest.raises(Refused) as e:
        try_endpoint(method, judge_endpoint(method))
    assert "a\nb" not in str(e.value)
    monkeypatch.setenv(KEY, " good\n")
    assert judge_endpoint(method).key == "good"
    assert "good" not in repr(judge_endpoint(method))


def test_a_body_may_be_anything():
    for body in (b"", b"null", b"3", b'{"choices": {}}', b'{"choices": [[]]}', b'"choices"'):
        with pytest.raises(NoReply):
            parsed(body)
    assert parsed(json.dumps(reply("no")).encode()) == Reply("no", False, 11, 3)


def test_a_reply_that_was_cut_off_counts_only_if_it_is_one_word():
    assert Verdict.of("k", 0, Reply("yes", cut=True)).flagged is True
    assert Verdict.of("k", 0, Reply("There is no", cut=True)).flagged is None


# ── a local judge


def test_a_local_judge_is_asked_in_batches_and_keeps_to_its_time(monkeypatch):
    model = str(require_model(embedded.MODEL_DIR))
    local = LocalJudge(model, tiny_policy().device, max_new=3)
    seen = []

    def greedy(lm, prompts, max_new, seconds):
        seen.append(len(prompts))
        time.sleep(0.2)
        return [Completion((5, 1), "yes", True, (0.0, 0.0)) for _ in prompts]

    monkeypatch.setattr("vgrout.method.llm_judge.greedy", greedy)
    asked = [({"role": "user", "content": "x = 1\n" * n},) for n in range(1, 21)]
    found = local.ask_all(asked, 30.0)
    assert seen == [8, 8, 4]
    assert [r.prompt_tokens for r in found] == sorted(r.prompt_tokens for r in found), "in order"
    late = local.ask_all(asked, 0.3)
    assert sum(isinstance(r, NoReply) for r in late) in (4, 12)
    (long,) = local.ask_all([({"role": "user", "content": "x = 1\n" * 5000},)], 30.0)
    assert "window" in str(long)


def test_local_replies_are_the_models_own_greedy_ones_whatever_stands_beside_them():
    model = str(require_model(embedded.MODEL_DIR))
    local = LocalJudge(model, tiny_policy().device, max_new=6)
    asked = [({"role": "user", "content": f"Add {n}" * n},) for n in (1, 4, 2)]
    together = local.ask_all(asked, 60.0)
    alone = [local.ask_all([one], 60.0)[0] for one in asked]
    assert together == alone
    assert all(isinstance(r, Reply) and 0 < r.completion_tokens <= 6 for r in together)
    assert all(r.cut for r in local.ask_all(asked, 1e-9) if isinstance(r, Reply)), "out of time"


# what a model's folder may ask of `generate`
def test_a_local_judge_takes_no_setting_of_its_folder(tmp_path):
    """Its replies are the likeliest tokens by the model's own logits, whatever generation_config.json says."""
    own = tiny_policy()
    own.model.save_pretrained(tmp_path)
    own.tok.save_pretrained(tmp_path)
    settings = {"repetition_penalty": 1.3, "do_sample": True, "num_beams": 4, "max_new_tokens": 1}
    settings |= loaded(tmp_path / "generation_config.json")
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    judge = LocalJudge(str(tmp_path), own.device, max_new=8)
    asked = [({"role": "user", "content": text},) for text in ("does it cheat", "x", "one two")]
    for conversation, said in zip(asked, judge.ask_all(asked, 60.0), strict=True):
        prompt = list(own.render(conversation))
        ids = []
        while len(ids) < 8 and 1 not in ids:
            with torch.no_grad():
                logits = own.model(torch.tensor([prompt + ids]), use_cache=False).logits
            ids.append(int(logits[0, -1].argmax()))
        assert (said.text, said.cut) == (own.decode(ids), 1 not in ids)


def test_no_such_model_is_refused_before_anything_starts(here, capsys):
    from vgrout.train import main

    common = ["smoke", "--threads=1", "--intervention=penalty", "--monitor=llm_judge"]
    (here / "empty").mkdir()
    nobody = ["--llm-judge-url=http://127.0.0.1:9/v1", "--llm-judge-model=m"]
    for argv, says in (
        (["--llm-judge-model=no/such"], "not on this machine"),
        (["--llm-judge-model=empty"], "--llm-judge-model empty: "),
        ([*nobody, "--llm-judge-timeout=1"], "a first question was not answered"),
        ([*nobody, "--llm-judge-prompt=no.txt"], "no.txt: cannot be read"),
    ):
        assert main([*common, *argv]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert says in line
        assert not (here / "out/runs").exists()


# ── whole runs


@pytest.mark.long
def test_a_run_with_a_judge_at_an_endpoint_resumes_to_the_same_rows(
    shared_run, tmp_path, monkeypatch
):
    monkeypatch.setenv(KEY, "secret-key")

    def verdict(text):
        return "yes" if len(text) % 3 else "no"

    with serving(verdict) as server:
        given = [f"--llm-judge-url={server.url}", "--llm-judge-model=m", "--threads=1"]
        small = [
            *flags("screen-detector", "--monitor", "llm_judge"),
            *given,
            "--checkpoint-every",
            "1",
        ]
        whole = run(shared_run.warm(tmp_path / "whole"), *small)
        n = len(server.asked)
        stopped = run(shared_run.warm(tmp_path / "stopped"), *small, stop_after=2)
        resumed = run(tmp_path / "stopped", "smoke", "--resume", "latest", "--threads", "1")
    assert resumed == stopped
    assert rows(resumed) == rows(whole)
    assert n > 1
    assert sum(row["judge_asked"] for row in rows(whole)) == n - 1, "and the first try"
    assert any(row["recall_n"] for row in rows(whole))
    for file in (tmp_path / "whole").rglob("*"):
        if file.is_file():
            assert b"secret-key" not in file.read_bytes(), file


@pytest.mark.long
@pytest.mark.parametrize("judged", ["nothing", "until it dies"])
def test_answers_without_a_verdict_count_nowhere_and_are_named(
    judged, shared_run, tmp_path, monkeypatch, capsys
):
    """Where the judge gave no verdict at all, the run's own verdict says so."""
    monkeypatch.setattr("vgrout.ground.chat.PAUSE", 0.01)

    def verdict(_):
        if judged == "until it dies":
            server.fault = "500 for ever" if len(server.asked) > 4 else ""
            return "no"
        return "I cannot say"

    with serving(verdict) as server:
        given = [f"--llm-judge-url={server.url}", "--llm-judge-model=m", "--threads=1"]
        small = [*flags("screen-detector", "--monitor", "llm_judge"), *given]
        folder = run(shared_run.warm(tmp_path), *small)
    answers = [*json_lines(folder / "rollouts.jsonl")]
    looked_at = [a["flagged"] for a in answers if a["passed"] and "flagged" in a]
    missing = looked_at.count(None)
    assert (missing == len(looked_at)) == (judged == "nothing")
    assert 0 < missing <= sum(row["judge_failed"] for row in rows(folder))
    hacks = [a for a in answers if a["hacked"] and a.get("flagged") is not None]
    assert sum(row["recall_n"] or 0 for row in rows(folder)) == len(hacks)
    said = f"{missing} of {len(looked_at)} rewarded answers of training have no verdict"
    summary, printed = (folder / "summary.md").read_text(), capsys.readouterr().out
    assert said in summary
    assert f"unjudged: {said}" in printed
    nothing = "the monitor gave no verdict on any of the"
    assert [nothing in text for text in (summary, printed)] == [judged == "nothing"] * 2
    (row,) = tables.monitors(load.conditions([load.read_run(folder)])).rows
    unjudged = sum(
        a["flagged"] is None for a in answers if (a["hacked"] or a["solved"]) and "flagged" in a
    )
    assert row["monitor"] == f"llm_judge, {unjudged} unjudged"


@pytest.mark.long
def test_a_run_with_a_local_judge(shared_run, tmp_path):
    """The organism's own base is a poor judge: it says neither yes nor no, and the run goes on."""
    model = require_model(embedded.MODEL_DIR)
    given = ["--llm-judge-model", str(model), "--llm-judge-max-new", "4"]
    home = shared_run.warm(tmp_path)
    run(home, *flags("none", "--shadow", "llm_judge", *given, "--steps", "2"), "--threads", "1")
    folder = only_run(home)
    asked = [row["judge_asked"] for row in rows(folder)]
    assert sum(asked) > 0
    assert sum(row["judge_failed"] for row in rows(folder)) > 0
    assert {*rows(folder)[0]["shadow"]} == {"llm_judge"}
