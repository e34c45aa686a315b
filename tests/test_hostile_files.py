"""Files from strangers: no code of theirs runs, nothing of theirs hangs, fills the memory or acts where it is shown."""

import csv
import gzip
import json
import os
import re
import shutil

import pytest
from tokenizers import Tokenizer

import tiny
from fake_runs import fake_run
from files import loaded
from vgrout.config.presets import resolve
from vgrout.ground import embedded
from vgrout.ground.io import Refused
from vgrout.model.load import load
from vgrout.model.load.source import read_tokenizer, require_fitting, require_model
from vgrout.report.__main__ import main as report
from vgrout.runs.inputs import read_inputs
from vgrout.teacher.pools import load_pool


def edit(file, *keys, value):
    """Set one value of a JSON file."""
    data = at = loaded(file)
    for key in keys[:-1]:
        at = at[key]
    at[keys[-1]] = value
    file.write_text(json.dumps(data))


def refusal(call):
    with pytest.raises(ValueError, match=r"\w") as refused:
        call()
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (lambda row: b"\n" * (2**26 + 1), "more than 64 MiB unpacked"),
        (
            lambda row: re.sub(rb'"reward": ?[0-9.]+', b'"reward": ' + b"9" * 5000, row),
            "value has 5000 digits",
        ),
        (lambda row: b"[" * 100_000, "not JSON (maximum recursion depth"),
        (None, "not a regular file"),
    ],
    ids=["bomb", "5000 digits", "deep", "pipe"],
)
def test_a_pool_is_bounded(content, why, tmp_path):
    shutil.copytree(
        embedded.POOL_DIR, tmp_path / "pool", ignore=shutil.ignore_patterns("pool.json")
    )
    first = min((tmp_path / "pool").glob("prompt_*"))
    row = gzip.decompress(first.read_bytes()).partition(b"\n")[0]
    first.unlink()
    first.write_bytes(gzip.compress(content(row))) if content else os.mkfifo(first)
    assert why in refusal(lambda: load_pool(tmp_path / "pool"))


def weights(change):
    """Another head on the same weights."""

    def of(model):
        content = (model / "model.safetensors").read_bytes()
        n = int.from_bytes(content[:8], "little")
        head = json.loads(content[8 : 8 + n])
        change(head)
        text = json.dumps(head).encode()
        (model / "model.safetensors").write_bytes(
            len(text).to_bytes(8, "little") + text + content[8 + n :]
        )

    return of


def setting(name, value):
    return lambda model: edit(model / "config.json", name, value=value)


def as_pickle(model):
    (model / "model.safetensors").rename(model / "pytorch_model.bin")


def no_targets(head):
    for i, name in enumerate([n for n in head if "_proj" in n]):
        head[f"transformer.h.{i}.c_attn.weight"] = head.pop(name)


def half(name):
    """The first part of a file alone."""

    def of(model):
        content = (model / name).read_bytes()
        (model / name).write_bytes(content[: len(content) // 2])

    return of


def without(*names):
    def of(model):
        for name in names:
            (model / name).unlink()

    return of


def template_of_settings(text):
    """The chat template where older folders have it."""

    def of(model):
        (model / "chat_template.jinja").unlink()
        edit(model / "tokenizer_config.json", "chat_template", value=text)

    return of


DAMAGED_MODELS = {
    "a list": (lambda m: (m / "config.json").write_text("[1]"), "is no JSON object"),
    "pickled": (as_pickle, "pickled weights (.bin) can run code: save them as safetensors"),
    "torn": (
        lambda m: os.truncate(m / "model.safetensors", 9999),
        "model.safetensors: not a readable safetensors file",
    ),
    "quantised": (setting("quantization_config", {"bits": 4}), "quantised"),
    "no shard": (
        lambda m: (
            (m / "model.safetensors").unlink(),
            (m / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "w.safetensors"}}'
            ),
        ),
        "w.safetensors: not a readable safetensors file ([Errno 2]",
    ),
    "no tokenizer": (without("tokenizer.json"), "no tokenizer.json in it"),
    "half a tokenizer": (half("tokenizer.json"), "is no usable tokenizer"),
    "no template": (without("chat_template.jinja"), "no chat template in it"),
    "regex": (
        lambda m: edit(m / "tokenizer.json", "pre_tokenizer", value=split("(")),
        "is no usable tokenizer",
    ),
}
WHOLE = {
    "all": lambda m: None,
    "a template in the settings": template_of_settings("{{ messages[0]['content'] }}"),
    "several templates": template_of_settings([{"name": "default", "template": "{{ messages }}"}]),
}


@pytest.mark.parametrize("case", DAMAGED_MODELS)
def test_a_damaged_model_is_refused_before_it_is_loaded_and_by_the_plan(
    case, tmp_path, monkeypatch
):
    damage, why = DAMAGED_MODELS[case]
    shutil.copytree(embedded.MODEL_DIR, tmp_path / "model")
    damage(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(load, "_read", lambda *_: pytest.fail("loaded"))
    argv = ["full", "--model=model", f"--problems={embedded.PROBLEMS}", "--max-new=64", "--dry-run"]
    assert why in refusal(lambda: require_model(tmp_path / "model"))
    try:
        absent = read_inputs(resolve([*argv, "--intervention=none"])).absent
    except Refused as error:
        absent = (str(error),)
    assert why in " ".join(absent)


@pytest.mark.parametrize("case", WHOLE)
def test_a_folder_may_lack_what_is_not_needed(case, tmp_path):
    shutil.copytree(embedded.MODEL_DIR, tmp_path / "model")
    WHOLE[case](tmp_path / "model")
    assert require_model(tmp_path / "model") == tmp_path / "model"


def add_token(model):
    """A token that was added after training, so that the embedding has no row for it."""
    file = model / "tokenizer.json"
    tokens = loaded(file)["added_tokens"]
    edit(file, "added_tokens", value=[*tokens, tokens[0] | {"id": 843, "content": "<x>"}])


def a_token_of_its_own(model):
    add_token(model)
    template = model / "chat_template.jinja"
    template.write_text(f"<x>{template.read_text()}")


LOADED = {
    "unsupported": (weights(no_targets), "weights are missing, first "),
    "shapes": (setting("hidden_size", 256), "no usable model"),
    "vocabulary": (setting("vocab_size", 100), "no usable model"),
    "tokens": (a_token_of_its_own, "'<x>' (843), and the model's embedding has 843 rows"),
}


def split(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize("case", LOADED)
def test_what_the_libraries_say_of_a_model_is_one_line(case, tmp_path):
    damage, why = LOADED[case]
    shutil.copytree(embedded.MODEL_DIR, tmp_path / "model")
    damage(tmp_path / "model")
    device, dtype = load.pick_device(tmp_path / "model", "fp32")
    assert why in refusal(
        lambda: load.load_policy(tmp_path / "model", device=device, dtype=dtype, cache_dir=None)
    )


def test_a_later_text_with_such_a_token_is_one_line():
    lm = tiny.policy()
    lm.tok.add_tokens(["<x>"])
    assert lm.encode("abc")
    assert "'<x>' (97)" in refusal(lambda: lm.encode("ab <x>"))
    assert "'<x>' (97)" in refusal(lambda: lm.render([{"role": "user", "content": "ab <x>"}]))


@pytest.mark.parametrize("last_call", ["none", "both"])
def test_the_last_call_of_a_tokenizer_counts_for_nothing(last_call, tmp_path):
    """Its padding and its truncation are written into the file, and are not the tokenizer's."""
    shutil.copytree(embedded.MODEL_DIR, tmp_path / "model")
    file = tmp_path / "model" / "tokenizer.json"
    core = Tokenizer.from_file(str(file))
    if last_call == "both":
        core.enable_padding(length=512)
        core.enable_truncation(8)
    core.save(str(file))
    short, long = "add one", "add one, " * 400
    require_fitting([[{"role": "user", "content": short}]], tmp_path / "model", 64, "p.jsonl")
    says = refusal(
        lambda: require_fitting(
            [[{"role": "user", "content": long}]], tmp_path / "model", 64, "p.jsonl"
        )
    )
    assert "none of its prompts fits" in says
    read = read_tokenizer(tmp_path / "model")
    assert len(read.encode(short).ids) < 8


def test_messages_that_a_template_refuses_are_one_line():
    lm, message = tiny.policy(), {"role": "user", "content": "hello"}
    lm.tok.chat_template = "{{ raise_exception('roles must\n alternate') if messages|length > 1 }}"
    assert lm.prompt_text([message]) == ""
    says = refusal(lambda: lm.render([message, message]))
    assert says == "the model's chat template refuses messages of user, user: roles must alternate"


HOSTILE = "<script>alert(1)</script>[a](http://x)\x1b[31m\u202e|x"
DAMAGED = {
    "status": lambda r: (r / "status.json").write_text("[1]"),
    "settings": lambda r: edit(
        r / "run.json", "config", "method", "rollout_ablate_frac", value="x"
    ),
    "NaN": lambda r: (r / "steps.jsonl").write_text('{"step": 0, "hack_s_k": NaN}\n'),
    "counts": lambda r: (r / "steps.jsonl").write_text(
        '{"step": 0, "sec": 1, "hack_s_k": "x", "hack_s_n": 8}\n'
    ),
    "answers": lambda r: (r / "final.jsonl").write_text('{"side": "base"}\n'),
    "pipe": lambda r: ((r / "run.json").unlink(), os.mkfifo(r / "run.json")),
    "rollouts": lambda r: (r / "rollouts.jsonl").write_text('{"step": 0, "text": 5}\n'),
}


def test_bad_runs_are_named_and_what_is_written_is_inert(tmp_path, monkeypatch):
    monkeypatch.setattr("vgrout.report.page.pictures", lambda _: [])
    for seed in (1, 2):
        run = fake_run(tmp_path, "--intervention=none", seed=seed)
        run.rename(tmp_path / f"=1+1 {HOSTILE.replace('/', '')} seed {seed}")
    for i, (what, damage) in enumerate(DAMAGED.items()):
        # whose gates are read from the rollouts
        usual = "none" if what.startswith("rollouts") else "route2"
        damage(fake_run(tmp_path, f"--intervention={usual}", seed=10 + i))
    (tmp_path / "plan.json").write_text(json.dumps({"name": HOSTILE, "hypotheses": [HOSTILE]}))
    assert report([str(tmp_path)]) == 0
    left_out = (
        (tmp_path / "report" / "report.html")
        .read_text()
        .partition("Left out</h2>")[2]
        .partition("</ul>")[0]
    )
    assert left_out.count("damaged: ") == len(DAMAGED) - 1
    assert left_out.count("its rollouts (") == 1
    for name in ("report.html", "runs.csv"):
        written = (tmp_path / "report" / name).read_text()
        assert not {"\x1b", "\u202e"} & {*written}
        assert "<script>alert" not in written or name.endswith(".csv")
    with open(tmp_path / "report" / "runs.csv") as f:
        assert not [v for row in csv.DictReader(f) for v in row.values() if v[:1] in "=+@" and v]
