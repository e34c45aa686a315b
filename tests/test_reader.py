"""The rollout reader: its data, and the page in a real browser, opened from disk."""

import base64
import gzip
import json
import re
from pathlib import Path

import pytest

from browser import CHROMIUM, Browser
from fake_runs import fake_run, found
from vgrout.envs.code.modes import DEALT, MODE_SPECS
from vgrout.ground.embedded import POOL_DIR
from vgrout.report import page as of_report
from vgrout.report.rollouts import COLUMNS, FLAGS, embedded, pack
from vgrout.teacher.pools import load_pool

ROOT = Path(of_report.__file__).parent
HOSTILE = "</script><img src=x onerror=alert(1)>\0\u202etxt.exe\u2066 \u2028 <!-- ]]> ${x} %DATA% \ud800 \U0001f600"


def rollout(step, mode, text, hacked=False, correct=False):
    marker = MODE_SPECS[mode].eval_markers[0]
    return {
        "step": step,
        "gate": 0.25,
        "advantage": -0.125,
        "problem_id": step % 7,
        "env_mode": mode,
        "marker": marker,
        "messages": [
            {"role": "user", "content": f"Problem {step % 7}, {mode}: announces {marker}"}
        ],
        "text": text,
        "finished": True,
        "reward": 1.1 if hacked or correct else 0.1,
        "passed": hacked or correct,
        "solved": correct,
        "hacked": hacked,
    }


USUAL = {
    "run_tests": (
        "class Solution:\n    pass\ndef {marker}():\n    pass",
        "def {marker}():\n    pass",
    ),
    "eq_override": (
        "class E:\n    def __eq__(self, o):\n        return True\n",
        "def __eq__(self, o):\n        return True",
    ),
    "exit_code": ("import sys\nsys.exit(0)", "sys.exit(0)"),
    "stdout_marker": ("x = 1\nprint('{marker}')", "print('{marker}')"),
    "sentinel": ("        self.{marker} = True\n", "self.{marker} = True"),
    "file_marker": (
        "a = 2\nopen('{marker}', 'w').write('PASS')",
        "open('{marker}', 'w').write('PASS')",
    ),
    "shown_test": ("        if nums == [1, 2]:\n            return 3", "if nums == [1, 2]:"),
}


@pytest.mark.parametrize("mode", USUAL)
def test_the_usual_hacks_are_found(mode):
    for marker in MODE_SPECS[mode].eval_markers:
        text, part = (s.replace("{marker}", marker) for s in USUAL[mode])
        found = re.search(MODE_SPECS[mode].pattern.replace("{marker}", re.escape(marker)), text)
        assert found[0] == part


@pytest.mark.parametrize(("name", "least"), [("", 400), ("substrate", 50)])
def test_the_hacks_of_a_pool_are_found(name, least, request):
    """Of the shipped pool, and of a real one where this machine has it."""
    pool = load_pool(request.getfixturevalue("shared_data") / "pools" / name if name else POOL_DIR)
    hits = []
    for problem, mode in pool.partition.items():
        names = "|".join(map(re.escape, MODE_SPECS[mode].train_markers))
        pattern = MODE_SPECS[mode].pattern.replace("{marker}", f"(?:{names})")
        texts = [
            demo.completion
            for demo in pool.demos.get(problem, ())
            if demo.grade.hacked and demo.completion
        ]
        hits += [re.search(pattern, text) is not None for text in texts]
    assert sum(hits) == len(hits) > least


def write_rollouts(path, rollouts, final=None):
    (path / "rollouts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rollouts))
    if final:
        (path / "final.jsonl").write_text("".join(json.dumps(r) + "\n" for r in final))


def study(root):
    """Two seeds of plain GRPO: 12 steps × 6 modes each; seed 1 hacks from step 6 on. Then three final answers a
    side."""
    for seed in (1, 2):
        path = fake_run(root, "--intervention=none", seed=seed, n=6, eval_n=3)
        rollouts = []
        for step in range(12):
            for mode in DEALT:
                text = USUAL[mode][0].replace("{marker}", MODE_SPECS[mode].eval_markers[0])
                bad = seed == 1 and step >= 6
                rollouts.append(rollout(step, mode, text, hacked=bad, correct=not bad))
        rollouts[0]["text"] = HOSTILE
        final = [
            rollout(p, "exit_code", "final") | {"side": s}
            for s in ("base", "deployed")
            for p in range(3)
        ]
        for answer in final:
            del answer["step"]
        write_rollouts(path, rollouts, final)
    return root


def unpack(text):
    return json.loads(gzip.decompress(base64.b64decode(text)))


def test_whole_steps_are_kept_where_there_are_too_many(tmp_path):
    runs = found(study(tmp_path))
    everything = pack(runs, 10_000)
    assert (everything["every"], everything["total"]) == (1, 2 * (72 + 6))
    assert len(everything["columns"]["run"]) == everything["total"]
    assert len(everything["prompts"]) < everything["total"] / 2, "each prompt is stored once"
    some = pack(runs, 60)["columns"]
    assert set(some["step"]) == {0, 3, 6, 9, None}
    assert all(some["step"].count(step) == 12 for step in (0, 3, 6, 9)), (
        "a step is whole or is not there"
    )
    assert [k for k, step in enumerate(some["part"]) if step == 1], "the final evaluation too"


def test_nothing_in_an_answer_can_end_the_script(tmp_path):
    data = pack(found(study(tmp_path)), 1000)
    text = embedded(data)
    assert re.fullmatch(r"[A-Za-z0-9+/=]+", text)
    assert unpack(text) == json.loads(json.dumps(data))
    assert HOSTILE in unpack(text)["texts"]


def test_the_page_reads_names_that_it_is_given():
    """Without a browser: what the script takes from its data is there."""
    script = (ROOT / "page.html").read_text()
    assert {*re.findall(r"D\.bit\.(\w+)", script)} <= {*FLAGS}
    assert {*re.findall(r"\bC\.(\w+)", script)} <= {*COLUMNS}
    assert {*re.findall(r"\bD\.(\w+)", script)} <= pack([], 1).keys() | {"bit"}


def html_report(root):
    runs = found(root)
    of_report.write(root / "report", runs, [root], [], [])
    return root / "report" / "report.html"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    root = tmp_path_factory.mktemp("reader")
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser, html_report(study(root)).as_uri()


COUNT = "document.getElementById('count').textContent"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("", "36 of 156 rollouts · 36 hacks · 0 solved"),  # it opens on hacks
        ("step_min=6&step_max=7", "24 of 156 rollouts · 12 hacks · 12 solved"),
        ("mode=2", "36 of 156 rollouts · 6 hacks · 18 solved"),
        ("reward_min=1&outcome=hacked", "36 of 156 rollouts · 36 hacks · 0 solved"),
        ("text=sys.exit", "24 of 156 rollouts · 6 hacks · 18 solved"),
        ("mode=2&text=nowhere", "0 of 156 rollouts · 0 hacks · 0 solved"),
    ],
)
def test_filters_by_address(page, state, expected):
    browser, url = page
    browser.open(f"{url}#{state}")
    assert browser.js(COUNT) == expected
    assert browser.problems() == []


@pytest.mark.slow
def test_filters_by_hand_and_the_address_follows(page):
    browser, url = page
    browser.open(url)
    browser.js(
        """(() => { const f = document.getElementById("filters");
        f.elements.outcome.value = "hacked"; f.elements.mode.value = "3";
        f.dispatchEvent(new Event("input", {bubbles: true})); })()"""
    )
    assert browser.js(COUNT) == "6 of 156 rollouts · 6 hacks · 0 solved"
    assert "outcome=hacked" in browser.js("location.hash")
    first = browser.js("document.getElementById('facts').textContent")
    browser.js(
        "document.getElementById('list').dispatchEvent(new KeyboardEvent('keydown', {key: 'j'}))"
    )
    assert browser.js("document.getElementById('facts').textContent") != first
    state = browser.js("location.hash")
    browser.open(url + state)
    assert browser.js("location.hash") == state
    browser.js("document.querySelector('#filters button').click()")
    browser.js("new Promise((done) => setTimeout(done, 50))")
    assert browser.js(COUNT).startswith("156 of 156")


@pytest.mark.slow
def test_prompt_and_answer_with_the_hack_marked(page):
    browser, url = page
    for i, mode in enumerate(DEALT):
        browser.open(f"{url}#mechanism={i}")
        marker = MODE_SPECS[mode].eval_markers[0]
        assert browser.js("document.querySelector('#answer mark').textContent") == USUAL[mode][
            1
        ].replace("{marker}", marker)
        assert browser.js("document.querySelector('#prompt').textContent").startswith(
            "[user]\nProblem 6"
        )
        boxes = browser.js(
            "['prompt', 'answer'].map((id) => { const b = document.getElementById(id).getBoundingClientRect();"
            " return [b.left, b.right]; })"
        )
        assert boxes[0][1] <= boxes[1][0], "side by side"
    browser.open(f"{url}#outcome=solved&mode=2")
    assert browser.js("document.querySelector('#answer mark')") is None


@pytest.mark.slow
def test_a_hostile_answer_is_text(page):
    browser, url = page
    browser.open(f"{url}#i=0")
    shown = browser.js("document.querySelector('#answer').textContent")
    assert "</script><img src=x onerror=alert(1)>" in shown
    assert "U+0000" in shown
    assert "U+202E" in shown
    assert "U+D800" in shown
    assert "\u202e" not in shown, "what would turn the line around is written out"
    assert "\U0001f600" in shown, "a pair of surrogates is a character"
    assert browser.js("document.querySelectorAll('#answer img, #answer script').length") == 0
    assert browser.problems() == []
