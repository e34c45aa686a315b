"""Trackers, through their own clients: they hold the numbers of steps.jsonl, also after a resume."""

import importlib.util
import json
import struct
import time
from pathlib import Path
from typing import ClassVar

import pytest
from loguru import logger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from files import loaded
from runs import flags, run
from vgrout.ground.io import json_lines
from vgrout.runs import tracking
from vgrout.runs.tracking import Trackers, grouped, numbers
from vgrout.train import main

ROLLOUT = {
    "problem_id": 1,
    "env_mode": "run_tests",
    "prompt": "a | b",
    "text": "x\ny",
    "reward": 0.5,
    "hacked": False,
}
ROLLOUT |= {"solved": True}
AT_END = {"hack_deploy": 0.25, "by_mode": {"run_tests": {"n": 4}}, "arm": "none", "learned": True}


@pytest.fixture
def figure():
    return Path(__file__).parents[1] / "docs" / "figures" / "pipeline.png"


def events(run):
    """What tensorboard itself reads of a run."""
    seen = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    return seen.Reload()


def curve(seen, column):
    return [(e.step, e.value) for e in seen.Scalars(column)]


def test_numbers():
    row = {
        "n": 4,
        "loss": -0.5,
        "ok": True,
        "why": "x",
        "kl": None,
        "watch": {"echo": ["OK", 0.1], "guard": {"n": 3}},
    }
    assert numbers(row) == {"n": 4, "loss": -0.5, "watch/echo": 0.1, "watch/guard/n": 3}


def test_a_share_is_a_curve_and_its_counts_are_none():
    measured, not_measured = (
        {"recall": 0.5, "recall_k": 1, "recall_n": 2},
        {"recall": None, "recall_k": 0, "recall_n": 0},
    )
    row = {
        "step": 3,
        "hk_so_k": 0,
        "hk_so_n": 0,
        **measured,
        "shadow": {"labels": measured, "source": not_measured},
    }
    assert grouped(row) == {"train/recall": 0.5, "train/shadow_labels_recall": 0.5}


@pytest.mark.long
def test_tensorboard_of_an_interrupted_run(tmp_path):
    argv = flags("none", "--track", "tensorboard", "--checkpoint-every", "2")
    run(tmp_path, *argv, stop_after=2)
    path = run(tmp_path, *argv, "--resume", "latest")
    rows, seen = list(json_lines(path / "steps.jsonl")), events(path)
    assert len(list((path / "tensorboard").iterdir())) == 2, "a file each process"
    for column in {name for row in rows for name in grouped(row)}:
        measured = [(row["step"], grouped(row)[column]) for row in rows if column in grouped(row)]
        assert curve(seen, column) == [(s, pytest.approx(v, rel=1e-6)) for s, v in measured], column
    final = loaded(path / "per_mode_deploy.json")
    assert curve(seen, "final/hack_deploy") == [(4, pytest.approx(final["hack_deploy"]))]
    assert {"config/text_summary", "rollouts/text_summary", "final/text_summary"} <= set(
        seen.Tags()["tensors"]
    )
    config = seen.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert '"intervention": "none"' in config
    (image,) = seen.Images("dynamics")
    assert image.encoded_image_string.startswith(b"\x89PNG")
    assert image.width > 400


class Broken:
    """A client whose server is down."""

    def __init__(self, *_): ...

    def scalars(self, *_):
        raise ConnectionError("no route\nto host")


@pytest.fixture
def output():
    lines = []
    sink = logger.add(lines.append, format="{message}")
    yield lines
    logger.remove(sink)


def test_a_failing_tracker_is_left_out(tmp_path, monkeypatch, output, figure):
    monkeypatch.setitem(tracking.CLIENTS, "wandb", Broken)
    trackers = Trackers(["wandb", "tensorboard"])
    trackers.start(tmp_path, {}, 0, 0)
    for step in range(3):
        trackers.row({"step": step, "loss": 1.0}, [])
    trackers.final(AT_END, {"hack": "25.0"}, figure, 2)
    trackers.close(0)
    assert [line for line in output if "left out" in line] == [
        "--track wandb: left out from here on (ConnectionError: no route to host)\n"
    ]
    assert len(curve(events(tmp_path), "train/loss")) == 3
    assert curve(events(tmp_path), "final/hack_deploy") == [(2, 0.25)]


def test_missing_client_is_refused(here, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "wandb" else find(name, *a)
    )
    assert main(["smoke", "--track", "tensorboard,wandb"]) == 2
    output = capsys.readouterr().err
    assert (
        output
        == "E wandb is not installed: `uv sync --inexact --extra wandb` or `pip install wandb`\n"
    )
    assert main(["smoke", "--track", "aim"]) == 2
    assert (
        capsys.readouterr().err
        == "E --track: unknown tracker 'aim'; legal: tensorboard, wandb, trackio\n"
    )
    assert not list((here / "out").glob("runs/*"))


# ── clients of the group `clients`


def track(name, folder, figure, tracker_id):
    """Five steps; after the fourth the run was killed and went back to the second."""
    for first, logged, last in ((0, 0, 3), (2, 4, 4)):
        trackers = Trackers([name])
        config = {"arm": {"intervention": "route2"}}
        trackers.start(folder, config, first, logged, tracker_id)
        assert trackers.clients, name
        for step in range(first, last + 1):
            trackers.row(
                {"step": step, "hack_s": step / 8, "hack_s_k": step, "why": None}, [ROLLOUT] * 20
            )
        if last == 4:
            trackers.final(AT_END, {"hack": "25.0"}, figure, last)
        trackers.close(0)
        time.sleep(1.1)  # wandb names its folders by the second


def wandb_records(path):
    """The client's own records in a .wandb file, a LevelDB log after seven bytes: blocks of 32 KiB, in them pieces with
    a head of checksum (4), length (2) and place (1: whole, 2: first, 3: middle, 4: last)."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, place = struct.unpack("<HB", data[at + 4 : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if place in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


@pytest.fixture(scope="module")
def trackio_folder(tmp_path_factory):
    """Where trackio keeps its projects, which it reads once, when it is imported."""
    folder = tmp_path_factory.mktemp("trackio")
    with pytest.MonkeyPatch.context() as m:
        m.setenv("TRACKIO_DIR", str(folder))
        pytest.importorskip("trackio")
        yield folder


class Noting:
    """A client that notes what it is given."""

    given: ClassVar[list[tuple[int, str]]] = []

    def __init__(self, run, config, first, tracker_id):
        self.given.append((first, tracker_id))

    def ignore(self, *_): ...

    scalars = table = image = close = ignore


@pytest.mark.long
def test_a_run_keeps_its_identifier_when_it_is_resumed(tmp_path, monkeypatch):
    """And a run of an earlier version, which has none, is known by its folder's name."""
    monkeypatch.setitem(tracking.CLIENTS, "wandb", Noting)
    monkeypatch.setattr(tracking, "require", lambda _: None)
    argv = flags("none", "--track", "wandb")
    path = run(tmp_path, *argv, stop_after=1)
    record = loaded(path / "run.json")
    (first,) = Noting.given
    assert first == (0, record["tracker_id"])
    run(tmp_path, *argv, "--resume", "latest", stop_after=2)
    del record["tracker_id"]
    (path / "run.json").write_text(json.dumps(record))
    run(tmp_path, *argv, "--resume", "latest", stop_after=3)
    assert Noting.given[1:] == [(2, first[1]), (3, "")]


@pytest.mark.long
def test_wandb_offline(tmp_path, figure, monkeypatch):
    pytest.importorskip("wandb")

    monkeypatch.delenv("WANDB_MODE", raising=False)
    (folder := tmp_path / "seed1").mkdir()
    track("wandb", folder, figure, "0a1b2c3d")
    curve = []
    ids, final, config = set(), {}, {}
    for record in (
        r
        for f in sorted((folder / "wandb").glob("offline-run-*/*.wandb"))
        for r in wandb_records(f)
    ):
        if record.HasField("run"):
            ids.add((record.run.run_id, record.run.display_name))
            config |= {u.key: json.loads(u.value_json) for u in record.run.config.update}
        if record.HasField("history"):
            of_step = {
                i.key or "/".join(i.nested_key): json.loads(i.value_json)
                for i in record.history.item
            }
            curve += (
                [(of_step["_step"], of_step["train/hack_s"])] if "train/hack_s" in of_step else []
            )
            final |= {
                k: v for k, v in of_step.items() if k.startswith(("final", "dynamics", "rollouts"))
            }
    assert ids == {("0a1b2c3d", "seed1")}, "one run in both files"
    assert curve == [(s, s / 8) for s in range(5)]
    assert config["arm"] == {"intervention": "route2"}
    assert final["final/hack_deploy"] == 0.25
    assert final["rollouts/nrows"] == 7, "of 20, evenly"
    assert final["dynamics/width"] > 400


@pytest.mark.long
def test_trackio_on_this_machine(tmp_path, figure, trackio_folder):
    from trackio.sqlite_storage import SQLiteStorage

    (folder := tmp_path / "seed1").mkdir()
    track("trackio", folder, figure, "0a1b2c3d")
    assert (trackio_folder / "vgrout.db").is_file()
    logs = SQLiteStorage.get_logs("vgrout", "seed1-0a1b2c3d")
    assert [(row["step"], row["train/hack_s"]) for row in logs if "train/hack_s" in row] == [
        (s, s / 8) for s in range(5)
    ]
    seen = {k: v for row in logs for k, v in row.items()}
    assert seen["final/hack_deploy"] == 0.25
    assert len(seen["rollouts"]["_value"]) == 7
    assert seen["dynamics"]["_type"] == "trackio.image"
