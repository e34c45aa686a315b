"""Downloads, from a folder in place of the network; and the go or no-go on a pool."""

import json
from http.client import IncompleteRead
from unittest.mock import Mock

import pytest

from probe_mixed import main as probe
from probe_mixed import verdict
from vgrout.commands import download
from vgrout.commands.download import ensure, git_blob
from vgrout.ground.metrics import Rate
from vgrout.ground.table import share

LINE = {
    "id": 1,
    "prompt": [{"role": "user", "content": "Do it and should pass all tests."}],
    "gt_answer": ["assert Solution().f(1) == 1"],
    "func_name": "Solution().f",
    "canonical_solution": "x",
}
CONTENT = (json.dumps(LINE) + "\n").encode()


def there(folder, content=CONTENT):
    """A folder of files as an address."""
    (folder / "source").mkdir()
    (folder / "source" / "p.jsonl").write_bytes(content)
    return (folder / "source").as_uri() + "/"


def test_git_blob_ids():
    """`printf hello | git hash-object --stdin`."""
    assert git_blob(b"hello") == "b6fc4c620b67d95f953a5c1c1230aaab5db5a1b0"
    assert git_blob(b"") == "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"


def test_a_file_is_fetched_once_and_checked(tmp_path):
    path, blob = tmp_path / "data" / "p.jsonl", git_blob(CONTENT)
    assert ensure(path, blob[:8], there(tmp_path)).endswith(f"1 problems, git blob {blob[:12]}")
    assert path.read_bytes() == CONTENT
    assert ensure(path, blob[:8], "file:///nowhere/").endswith("(was there)")


def test_a_wrong_file_is_refused_and_not_kept(tmp_path):
    source, path, blob = (
        there(tmp_path, CONTENT + b"\n"),
        tmp_path / "data" / "p.jsonl",
        git_blob(CONTENT)[:8],
    )
    with pytest.raises(
        ValueError, match=r"what came from the network has git blob .*, not .*; put file:"
    ):
        ensure(path, blob, source)
    assert not path.parent.exists()
    path.parent.mkdir()
    path.write_bytes(b"another")
    with pytest.raises(ValueError, match="the file that is there has git blob"):
        ensure(path, blob, source)
    assert path.read_bytes() == b"another"


def test_without_a_network_one_line_says_what_to_do(
    no_network,
    tmp_path,
    monkeypatch,
    capsys,
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for error in (IncompleteRead(b"", 1000), ValueError("unknown url type: 'x'")):
        with monkeypatch.context() as patch:
            patch.setattr("urllib.request.urlopen", Mock(side_effect=error))
            assert download.main(["data"]) == 2
        assert f"cannot be fetched ({error}); put https://" in capsys.readouterr().err
    assert download.main(["data"]) == 2
    error = capsys.readouterr().err
    where = "out/data/leetcode_train_medhard_filtered.jsonl"
    assert error.startswith(f"E {where}: cannot be fetched (no route to host); put https://")
    assert "git blob c10a5f39" in error
    assert error.count("\n") == 1
    assert download.main(["model"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        "E Qwen/Qwen3-4B: cannot be fetched (no route to host); copy the model's folder"
    )
    assert error.count("\n") == 1


def row(hack_s, hack_t=None, lp_t=None):
    return (
        share("hack_s", Rate(*hack_s))
        | share("hack_t", Rate(*hack_t) if hack_t else None)
        | {"lp_t": lp_t}
    )


def test_the_probe_needs_late_student_hacks_and_demonstrations(tmp_path, monkeypatch, capsys):
    calm, shown = row([0, 7], [1, 1], -2.0), row([2, 7], [1, 1], -0.5)
    assert verdict([calm, calm, calm, shown])[0]
    go, why = verdict([shown, shown, calm, calm])
    assert not go
    assert "student hacks 4/14 in steps 0-1, 0/14 after" in why
    assert "-0.50, then -2.00; raise --mix-ratio" in why
    assert "no demonstration was mixed in" in verdict([row([1, 8])] * 4)[1]
    monkeypatch.chdir(tmp_path)
    assert probe([]) == 2
    run = tmp_path / "out" / "runs" / "1_fast_none_seed41_probe"
    run.mkdir(parents=True)
    (run / "steps.jsonl").write_text(
        "".join(json.dumps(r) + "\n" for r in (calm, calm, calm, shown))
    )
    assert probe([]) == 0
    assert capsys.readouterr().out.startswith("GO: ")
    (run / "steps.jsonl").write_text(json.dumps(calm) + "\n")
    assert probe([str(run)]) == 2
