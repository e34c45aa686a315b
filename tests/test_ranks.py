"""One run on several processes: the rows of one, whoever dies. Real processes, real kills, the real torchrun."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runs import ARMS, READS, SharedRuns, flags, rows
from test_train import start, wait_for_steps
from vgrout.config.run import Config, RunConfig, ScaleConfig
from vgrout.ranks import SILENT, _part
from vgrout.runs import peers

# Of other batches' products. A column that is 0 but for rounding: mismatch_kl 1e-13, cos_post under erase 1e-7.
CLOSE = {"rel": 1e-5, "abs": 2e-6}
ENDED = 30.0  # seconds after which a run that has lost a rank is over


def ended(process: subprocess.Popen[str]) -> tuple[str, float]:
    """What it says, and how long that takes from now on."""
    begun = time.monotonic()
    return process.communicate(timeout=300)[0], time.monotonic() - begun


def finished(folder: Path, *argv: str) -> Path:
    process = start(folder, *argv)
    said, _ = ended(process)
    assert process.returncode == 0, said
    return max((folder / "out" / "runs").iterdir())


def differences(a: Any, b: Any, at: str = "") -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        return [d for key in a | b for d in differences(a.get(key), b.get(key), f"{at}.{key}")]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in differences(x, y, f"{at}[{i}]")]
    if isinstance(a, float) and isinstance(b, int | float):
        return [] if a == pytest.approx(b, rel=CLOSE["rel"], abs=CLOSE["abs"]) else [f"{at}: {a} and {b}"]
    return [] if a == b else [f"{at}: {a} and {b}"]


def same_run(a: Path, b: Path) -> None:
    """The rows to rounding, the answers token by token, the final evaluation as it is."""
    assert not differences(rows(a), rows(b))
    mine, theirs = (rollouts(path) for path in (a, b))
    assert mine == theirs
    ours, other = (json.loads((path / "per_mode_deploy.json").read_text()) | {"log": ""} for path in (a, b))
    assert not differences(ours, other)


def rollouts(path: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (path / "rollouts.jsonl").read_text().splitlines())
    return [{k: line[k] for k in ("step", "p_idx", "gi", "text", "reward", "hacked", "solved")} for line in lines]


def children(pid: int) -> list[int]:
    """The ranks that a run has forked: processes of its own command line."""
    said = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(line.split()[0]) for line in said.stdout.splitlines() if "vgrout.train" in line]


# --- who does what ---------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 2000), max_size=60), st.integers(1, 9))
def test_every_item_is_one_ranks_in_their_order(costs: list[int], size: int) -> None:
    parts = [_part(costs, r, size) for r in range(size)]
    assert [i for part in parts for i in part] == list(range(len(costs)))
    if costs:  # no rank has more than its share and one item
        assert max(sum(costs[i] for i in part) for part in parts) <= sum(costs) / size + max(costs)


def test_equal_rows_are_dealt_evenly() -> None:
    for n, size in ((32, 2), (32, 3), (6, 4), (7, 7)):
        lengths = [len(_part([1] * n, r, size)) for r in range(size)]
        assert max(lengths) - min(lengths) <= 1, (n, size, lengths)


def test_what_is_free_is_rank_0s() -> None:
    assert [len(_part([0, 0], r, 2)) for r in range(2)] == [2, 0]


def test_how_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def config(asked: Any, model: str = "organism") -> Config:
        scale = ScaleConfig(model=model, problems=model if model == "organism" else "x.jsonl")
        return Config(scale=scale, run=RunConfig(ranks=asked))

    monkeypatch.setattr(peers, "gpu_here", lambda: False)
    monkeypatch.setattr(peers, "idle_cores", lambda: 3)
    assert [peers.ranks_of(config(asked)) for asked in (1, 2, "auto")] == [1, 2, 3]
    assert peers.ranks_of(config("auto", "some/model")) == 1  # it has all cores by threads
    with pytest.raises(ValueError, match=r"--ranks 49: a step has 48 rollouts; give at most as many"):
        peers.ranks_of(config(49))
    torchrun = {"TORCHELASTIC_RUN_ID": "j", "RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)
    assert peers.ranks_of(config(1)) == peers.ranks_of(config(4)) == 1  # it starts none itself
    with pytest.raises(ValueError, match=r"--ranks 2: torchrun has started 4; leave it out"):
        peers.ranks_of(config(2))


@pytest.mark.parametrize("asked", ["0", "-1", "1025", "two"])
@pytest.mark.long
def test_a_number_that_is_none_is_refused(asked: str, tmp_path: Path) -> None:
    process = start(tmp_path, "smoke", "--ranks", asked)
    said, _ = ended(process)
    assert process.returncode == 2
    assert "--ranks" in said
    assert not (tmp_path / "out").exists()


# --- the same rows ---------------------------------------------------------------------------------------------------

EVALUATED = ["--eval-ablate-every", "2", "--eval-n-prompts", "2"]


@pytest.mark.parametrize(
    ("arm", "n"),
    [
        ("route2", 3),
        *(pytest.param(arm, n, marks=pytest.mark.slow) for arm in (*ARMS, READS) for n in (2, 3)),
    ],
)
@pytest.mark.long
def test_rows_do_not_depend_on_the_ranks(arm: str, n: int, shared_run: SharedRuns, tmp_path: Path) -> None:
    """P 2 × G 4 on 3 ranks: a group's rows lie on two of them."""
    argv = flags(arm, "--vhack-refresh-every", "2") if arm == "route2" else flags(arm)
    alone = shared_run(*argv, *EVALUATED)
    together = finished(shared_run.warm(tmp_path), *argv, *EVALUATED, "--ranks", str(n))
    same_run(alone, together)
    assert json.loads((together / "run.json").read_text())["ranks"] == n
    assert not list((tmp_path / "logs").glob("*_rank*"))  # a rank that has nothing to say leaves nothing


@pytest.mark.slow
@pytest.mark.parametrize(
    "argv",
    [
        ("route2", "--monitor", "band"),
        ("route2", "--gate-vote", "rollout", "--random-flags"),
        ("route2", "--rollout-ablate-frac", "0.5", "--rebaseline"),
        ("route2", "--monitor", "labels", "--known-modes", "run_tests"),
        ("sgtm", "--monitor", "detector", "--rollout-ablate-frac", "0.5", "--quarantine", "block:2"),
        ("screen", "--monitor", "twin"),
        ("screen", "--monitor", "relevance", "--monitor-prompts", "40"),
        ("screen", "--monitor", "probe", "--monitor-prompts", "40"),
        ("penalty", "--monitor", "labels"),
        ("penalty", "--monitor", "quarantine", "--seed-monitor", "detector"),
        ("screen", "--monitor", "online_probe", "--seed-monitor", "labels", "--known-modes", "exit_code"),
        ("none", "--control", "advantage_mod"),
        ("none", "--control", "recontextualise"),
        ("none", "--beta", "0.1", "--loss", "icepop"),
        ("erase", "--packing", "padded"),
    ],
    ids=" ".join,
)
def test_nor_do_those_of_a_setting(argv: Sequence[str], shared_run: SharedRuns, tmp_path: Path) -> None:
    command = ["smoke", "--intervention", *argv, "--threads", "1", *flags("none")[5:], *EVALUATED]
    alone = shared_run(*command)
    same_run(alone, finished(shared_run.warm(tmp_path), *command, "--ranks", "2"))


@pytest.mark.slow
@pytest.mark.parametrize(("begun", "gone_on"), [(2, 1), (1, 3)])
def test_a_run_goes_on_with_another_number(begun: int, gone_on: int, shared_run: SharedRuns, tmp_path: Path) -> None:
    argv = flags("route2", "--checkpoint-every", "1", "--steps", "12")
    whole = shared_run(*argv)
    process = start(shared_run.warm(tmp_path), *argv, "--ranks", str(begun))
    path = wait_for_steps(tmp_path, 3, process)
    process.send_signal(signal.SIGTERM)  # of rank 0 alone
    said, _ = ended(process)
    assert process.returncode == 130, said
    assert len(rows(path)) < 12
    again = start(tmp_path, "smoke", "--resume", str(path.relative_to(tmp_path)), "--ranks", str(gone_on))
    said, _ = ended(again)
    assert again.returncode == 0, said
    same_run(whole, path)
    record = json.loads((path / "run.json").read_text())
    assert (record["ranks"], record["resumed"][0]["ranks"]) == (begun, gone_on)


# --- what they tell each other ---------------------------------------------------------------------------------------

TALK = """
from pathlib import Path
import torch
from vgrout import ranks
from vgrout.runs.peers import started

class Odd(Exception):
    def __init__(self, a, b): super().__init__(a + b)

def fails(error):
    if ranks.rank() == 1: raise error

def talk():
    r = ranks.rank()
    print(ranks.gather(lambda: r * 10), ranks.from_first(r), ranks.everywhere(r != 1), ranks.total(torch.ones(2) * r))
    for error in ValueError("x"), Odd("a", "b"):
        try: ranks.gather(lambda: fails(error))
        except Exception as e: print(type(e).__name__, e)

def follow(place, log):
    with ranks.joined(place): talk()

with started(3, follow, Path("said")) as others, ranks.joined(others.place, others.failed_peer): talk()
"""


@pytest.mark.long
def test_every_rank_has_all_values_and_the_first_failure(tmp_path: Path) -> None:
    """Elsewhere it names the rank; what cannot be made from one text is a RuntimeError there."""
    done = subprocess.run([sys.executable, "-c", TALK], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = [done.stdout, *(next(tmp_path.glob(f"said_*_rank{r}.log")).read_text() for r in (1, 2))]
    values = "[0, 10, 20] 0 [1] tensor([3., 3.])"
    elsewhere = [values, "ValueError rank 1: x", "RuntimeError rank 1: Odd: ab"]
    assert [text.splitlines() for text in said] == [elsewhere, [values, "ValueError x", "Odd ab"], elsewhere]


# --- life and death --------------------------------------------------------------------------------------------------


def begun(folder: Path, shared_run: SharedRuns) -> tuple[subprocess.Popen[str], Path, list[int]]:
    argv = flags("route2", "--checkpoint-every", "1", "--steps", "400", "--ranks", "2")
    process = start(shared_run.warm(folder), *argv)
    path = wait_for_steps(folder, 3, process)
    return process, path, children(process.pid)


def is_over(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def goes_on(path: Path, folder: Path, shared_run: SharedRuns) -> None:
    """From a whole checkpoint, with the rows that it would have had."""
    there = len(rows(path))
    process = start(folder, "smoke", "--resume", str(path.relative_to(folder)), "--ranks", "2")
    try:
        deadline = time.monotonic() + 300
        while len(rows(path)) < there + 2:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)
    alone = shared_run(*flags("route2", "--checkpoint-every", "1", "--steps", "400"), stop_after=there + 1)
    assert not differences(rows(path)[: there + 1], rows(alone)[: there + 1])


@pytest.mark.long
def test_a_killed_rank_ends_all_in_one_line(shared_run: SharedRuns, tmp_path: Path) -> None:
    process, path, (child,) = begun(tmp_path, shared_run)
    os.kill(child, signal.SIGKILL)
    said, seconds = ended(process)
    assert process.returncode == 1
    assert seconds < ENDED
    line = f"rank 1 (process {child}) was killed by SIGKILL"
    assert [text for text in said.splitlines() if text.startswith("E ")] == [
        f"E {line}; the last checkpoint stands. Go on with: python -m vgrout.train smoke --resume "
        f"{path.relative_to(tmp_path)}"
    ]
    status = json.loads((path / "status.json").read_text())
    assert (status["state"], status["reason"]) == ("failed", line)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "how"),
    [(0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGSTOP), (0, signal.SIGSTOP)],
    ids=["rank 0 killed", "rank 1 killed", "rank 1 stopped", "rank 0 stopped"],
)
def test_nothing_is_lost_with_a_rank(which: int, how: signal.Signals, shared_run: SharedRuns, tmp_path: Path) -> None:
    process, path, (child,) = begun(tmp_path, shared_run)
    hit, other = (process.pid, child) if which == 0 else (child, process.pid)
    os.kill(hit, how)
    begin = time.monotonic()
    while time.monotonic() < begin + ENDED and not (
        process.poll() is not None if other == process.pid else is_over(other)
    ):
        time.sleep(0.1)
    took = time.monotonic() - begin
    if how == signal.SIGSTOP and which == 0:
        os.kill(process.pid, signal.SIGCONT)
    said, _ = ended(process)
    assert took < ENDED, said
    assert process.returncode == (-9 if (which, how) == (0, signal.SIGKILL) else 1), said
    if (which, how) == (1, signal.SIGSTOP):
        assert f"rank 1 (process {child} on " in said
        assert f"has not answered for {SILENT:.0f} s" in said
    until = time.monotonic() + 15
    while not is_over(child):
        assert time.monotonic() < until, f"{child} is left over"
        time.sleep(0.1)
    goes_on(path, tmp_path, shared_run)


@pytest.mark.slow
def test_torchrun_goes_on_by_itself(shared_run: SharedRuns, tmp_path: Path) -> None:
    """A rank killed, then rank 0: torchrun starts them again, and the run has the rows of one that nothing befell."""
    argv = flags("route2", "--checkpoint-every", "1", "--steps", "30")
    whole = shared_run(*argv)
    shared_run.warm(tmp_path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = subprocess.Popen(
        [*torchrun, "--max-restarts", "2", "-m", "vgrout.train", *argv],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    for rank, n in ((1, 3), (0, 8)):
        path = wait_for_steps(tmp_path, n, process)
        os.kill(sorted(children(process.pid))[rank], signal.SIGKILL)
        time.sleep(2)
    said, _ = ended(process)
    assert process.returncode == 0, said[-3000:]
    assert len(list((tmp_path / "out" / "runs").iterdir())) == 1
    same_run(whole, path)
    resumed = [again["step"] for again in json.loads((path / "run.json").read_text())["resumed"]]
    assert len(resumed) == 2
    assert all(a <= b for a, b in pairwise(resumed))


@pytest.mark.slow
def test_a_user_s_mistake_under_torchrun_is_one_line(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "vgrout.train", "smoke", "--vhack-pairs-path", "none.json", "--intervention", "route"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert said.returncode
    assert sum("none.json" in line and line.startswith("E ") for line in said.stderr.splitlines()) == 1, said.stderr
    assert not (tmp_path / "out" / "runs").exists()


@pytest.mark.slow
def test_bytes_that_cross_are_few(shared_run: SharedRuns, tmp_path: Path) -> None:
    """Two vectors' worth of gradients by source, the gate's cosines, and the answers: said at the end of the log."""
    path = finished(shared_run.warm(tmp_path), *flags("route2"), "--ranks", "2")
    (log,) = (tmp_path / "logs").glob("*.log")
    (line,) = (text for text in log.read_text().splitlines() if "sent" in text and "ranks" in text)
    assert path.name in log.name
    sent = float(line.split(" KiB a step")[0].split()[-1])
    assert 10 < sent < 2000


def test_adapters_stay_alike(shared_run: SharedRuns) -> None:
    """The hash that ranks compare after each step sees a last bit."""
    import torch

    from vgrout.runs.recorder import tensor_hash

    x = torch.linspace(0, 1, 7)
    y = x.clone()
    y[3] = torch.nextafter(y[3], torch.tensor(2.0))
    assert tensor_hash(x, x) == tensor_hash(x.clone(), x)
    assert tensor_hash(x, y) != tensor_hash(x, x)
