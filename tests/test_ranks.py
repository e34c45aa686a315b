"""One run on several processes: the rows of one, whoever dies. The real torchrun, real kills."""

import os
import signal
import subprocess
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from files import loaded
from golden import differences
from runs import ARMS, flags, once, only_run, rows, status
from test_train import start, wait_for_steps
from vgrout.ground import ranks
from vgrout.ground.io import json_lines
from vgrout.ground.ranks import _part
from vgrout.runs.recorder import tensor_hash

# Rounding of matrix products in other batches; some columns are 0 but for rounding (mismatch_kl,
# cos_post under erase).
CLOSE = {"rel": 1e-5, "abs": 2e-6}
TRAIN = ("-m", "--", "vgrout.train")


def torchrun(folder, n, *argv, program=TRAIN, restarts=0):
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={n}",
        f"--max-restarts={restarts}",
    ]
    return start(folder, *program, *argv, code=command)


def output_of(process, code=0):
    output, _ = process.communicate(timeout=300)
    assert process.returncode == code, output[-3000:]
    return output


def process_of(job, rank):
    """The process of a rank."""
    children = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(job.pid)], capture_output=True, text=True
    ).stdout
    found = [
        pid
        for pid in children.split()
        if f"\0RANK={rank}\0" in Path(f"/proc/{pid}/environ").read_text()
    ]
    return int(found[0])


def same_run(a, b):
    """Rows and final evaluation are the same to rounding, answers exactly."""
    assert not differences(rows(a), rows(b), close=CLOSE)
    assert rollouts(a) == rollouts(b)
    of_one = {"log": "", "run": "", "files": {}}
    first, second = (loaded(path / "per_mode_deploy.json") | of_one for path in (a, b))
    assert not differences(first, second, close=CLOSE)


def rollouts(path):
    lines = json_lines(path / "rollouts.jsonl")
    return [
        {k: line[k] for k in ("step", "p_idx", "gi", "text", "reward", "hacked", "solved")}
        for line in lines
    ]


@given(st.lists(st.integers(1, 2000), max_size=60), st.integers(1, 9))
def test_items_are_shared_out_in_order(costs, size):
    parts = [_part(costs, r, size) for r in range(size)]
    assert [i for part in parts for i in part] == list(range(len(costs)))
    if costs:  # no rank has more than its share and one item
        assert max(sum(costs[i] for i in part) for part in parts) <= sum(costs) / size + max(costs)
    equal = [len(_part([1] * len(costs), r, size)) for r in range(size)]
    assert max(equal) - min(equal) <= 1
    assert len(_part([0] * len(costs), 0, size)) == len(costs), "free ones go to rank 0"


OTHERS = {"WORLD_SIZE": "4", "RANK": "3"}  # some other launcher's
TORCHRUNS = {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, (1, 0, 1)),
        (OTHERS, (1, 0, 1)),
        (OTHERS | TORCHRUNS, (4, 3, 2)),
        (TORCHRUNS | {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_WORLD_SIZE": "1"}, (1, 0, 1)),
    ],
)
def test_ranks_are_torchruns(environment, found, monkeypatch):
    for name in (OTHERS | TORCHRUNS).keys() - environment.keys():
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (ranks.size(), ranks.rank(), ranks.here()) == found
    assert ranks.first() == (found[1] == 0)


def totals(xs):
    """What `total` gives each of these ranks, and what each has sent; the ranks' exchange is pretended."""

    def rows_with_values(x):
        return [i for i, row in enumerate(x) if row.any()]

    sent = []

    def all_gather(parts, mine, group):
        for part, x in zip(parts, xs, strict=True):
            rows = x[rows_with_values(x)]
            part.zero_()[: len(rows)] = rows
        sent.append(mine)

    with pytest.MonkeyPatch.context() as m:
        m.setattr(ranks, "size", lambda: max(2, len(xs)))
        m.setattr(ranks, "rank", lambda: 0)
        m.setattr(ranks, "gather", lambda make: [rows_with_values(x) for x in xs])
        m.setattr("torch.distributed.all_gather", all_gather)
        return [ranks.total(x) for x in xs], sent


@given(
    st.lists(
        st.lists(st.sampled_from([0.0, 0.1, -0.1, 1e8]), min_size=4, max_size=4),
        min_size=2,
        max_size=4,
    )
)
def test_a_sum_is_that_of_all_rows_in_rank_order(by_rank):
    """In fp64, whichever rows a rank has: 1e8 + 0.1 − 1e8 in fp32 would be 0."""
    xs = [torch.tensor(rows)[:, None] * torch.tensor([1.0, 3.0]) for rows in by_rank]
    got, sent = totals(xs)
    want = torch.stack(xs).double().sum(0).float()
    assert all(torch.equal(x, want) for x in got)
    assert len(sent[0]) == max(1, *(int(x.any(1).sum()) for x in xs))


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=3),
    st.lists(st.booleans(), min_size=2, max_size=4),
    st.sampled_from([torch.float32, torch.float64, torch.int64]),
)
def test_a_sum_has_any_shape_and_a_rank_may_have_nothing(shape, has_values, dtype):
    """Any length may be 0, and no rank, some, or all may have values."""
    ones = torch.ones(shape, dtype=dtype)
    got, _ = totals([ones * has for has in has_values])
    for x in got:
        assert x.dtype == dtype
        assert torch.equal(x, ones * sum(has_values))


EVALUATED = ["--eval-ablate-every", "2", "--eval-n-prompts", "2"]


@pytest.mark.parametrize(
    ("arm", "n"),
    [
        ("route2", 3),
        *(pytest.param(arm, n, marks=pytest.mark.slow) for arm in ARMS for n in (2, 3)),
    ],
)
@pytest.mark.long
def test_rows_do_not_depend_on_the_ranks(arm, n, shared_run, tmp_path):
    """P 2 × G 4 on 3 ranks: a group's rows lie on two of them."""
    argv = flags(arm, "--vhack-refresh-every", "2") if arm == "route2" else flags(arm)
    alone = shared_run(*argv, *EVALUATED)
    output_of(torchrun(shared_run.warm(tmp_path), n, *once([*argv, *EVALUATED])))
    together = only_run(tmp_path)
    same_run(alone, together)
    assert loaded(together / "run.json")["ranks"] == n


@pytest.mark.slow
@pytest.mark.parametrize(
    "argv",
    [
        ("route2", "--monitor", "band"),
        ("route2", "--gate-vote", "rollout", "--random-flags"),
        ("route2", "--rollout-ablate-frac", "0.5", "--rebaseline"),
        ("route2", "--monitor", "labels", "--known-modes", "run_tests"),
        (
            "screen",
            "--monitor",
            "online_probe",
            "--seed-monitor",
            "labels",
            "--known-modes",
            "exit_code",
        ),
        ("none", "--beta", "0.1", "--loss", "icepop"),
    ],
    ids=" ".join,
)
def test_settings_give_the_same_rows_on_two_ranks(argv, shared_run, tmp_path):
    command = ["smoke", "--intervention", *argv, "--threads", "1", *flags("none")[5:], *EVALUATED]
    alone = shared_run(*command)
    output_of(torchrun(shared_run.warm(tmp_path), 2, *once(command)))
    same_run(alone, only_run(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(("started_with", "resumed_with"), [(2, 1), (1, 3)])
def test_resume_with_another_number_of_ranks(started_with, resumed_with, shared_run, tmp_path):
    argv = flags("route2", "--checkpoint-every", "1", "--steps", "12")
    whole = shared_run(*argv)
    process = torchrun(shared_run.warm(tmp_path), started_with, *argv)
    path = wait_for_steps(tmp_path, 3, process)
    os.kill(process_of(process, started_with - 1), signal.SIGTERM)  # of one rank
    output_of(process, 1)
    assert status(path)["state"] == "interrupted"
    assert len(rows(path)) < 12
    output_of(
        torchrun(tmp_path, resumed_with, "smoke", "--resume", str(path.relative_to(tmp_path)))
    )
    same_run(whole, path)
    record = loaded(path / "run.json")
    assert (record["ranks"], record["resumed"][0]["ranks"]) == (started_with, resumed_with)


TALK = """
from pathlib import Path
import torch
from vgrout.ground import ranks

class Odd(Exception):
    def __init__(self, a, b): super().__init__(a + b)

def fails(error):
    if ranks.rank() == 1: raise error

with ranks.joined():
    r = ranks.rank()
    said = [str((
        ranks.gather(lambda: r * 10),
        ranks.from_first(r),
        ranks.everywhere(r != 1),
        ranks.merged(lambda: {r: r}),
        ranks.total(torch.ones(2) * r).tolist(),
    ))]
    for error in ValueError("x"), Odd("a", "b"):
        try: ranks.gather(lambda: fails(error))
        except Exception as e: said.append(f"{type(e).__name__} {e}")
    Path(str(r)).write_text("\\n".join(said))
"""


@pytest.mark.long
def test_exchange(tmp_path):
    """All ranks raise the first failure; elsewhere it names the rank, or is a RuntimeError if it cannot be rebuilt."""
    (tmp_path / "talk.py").write_text(TALK)
    output_of(torchrun(tmp_path, 3, program=["talk.py"]))
    values = "([0, 10, 20], 0, [1], {0: 0, 1: 1, 2: 2}, [3.0, 3.0])"
    elsewhere = [values, "ValueError rank 1: x", "RuntimeError rank 1: Odd: ab"]
    said = [(tmp_path / str(r)).read_text().splitlines() for r in range(3)]
    assert said == [elsewhere, [values, "ValueError x", "Odd ab"], elsewhere]


# what each rank has, and what all should find then
# a reward that is the same for every answer to half of the problems, and one that it is for all
FLAT = """
def sometimes(id, completion):
    return 0.5 if id % 2 else (len(completion) % 7) / 7

def always(id, completion):
    return 0.5
"""


@pytest.mark.parametrize(
    ("reward", "argv"),
    [
        ("sometimes", "--intervention none"),
        *(
            pytest.param(reward, argv, marks=pytest.mark.slow)
            for reward, argv in (
                ("always", "--intervention none"),
                ("sometimes", "--intervention none --beta 0.1 --loss icepop"),
                ("sometimes", "--intervention none --loss dppo_tv"),
                ("sometimes", "--intervention screen --monitor labels"),
                ("sometimes", "--intervention penalty --monitor labels"),
            )
        ),
    ],
)
@pytest.mark.long
def test_steps_without_signal_on_two_ranks(reward, argv, tmp_path):
    """Where all answers of all groups score alike, no rank has a row: the step is skipped, as it is on one process."""
    (tmp_path / "flat.py").write_text(FLAT)
    command = ["smoke", "--reward", f"flat:{reward}", *argv.split(), "--teacher-pool-dir", "none"]
    command += ["--steps", "4", "--prompts-per-step", "1", "--eval-ablate-every", "0"]
    command += ["--final-n-prompts", "2", "--final-samples", "1", "--threads", "1", "--max-new=24"]
    output_of(start(tmp_path, *command, "--output-dir", "one"))
    output_of(torchrun(tmp_path, 2, *command, "--output-dir", "two"))
    with_signal = {row["signal"] > 0 for row in rows(tmp_path / "one")}
    assert with_signal == ({False} if reward == "always" else {False, True})
    same_run(tmp_path / "one", tmp_path / "two")


@pytest.mark.parametrize(
    "kills", [((1, 2),), pytest.param(((1, 2), (0, 6)), marks=pytest.mark.slow)]
)
@pytest.mark.long
def test_torchrun_restarts_the_run(kills, shared_run, tmp_path):
    """kills: (rank, after how many steps). torchrun restarts both ranks, and the rows are those of one whole run."""
    argv = flags("route2", "--checkpoint-every", "1", "--steps", "12" if len(kills) > 1 else "5")
    whole = shared_run(*argv)
    job = torchrun(shared_run.warm(tmp_path), 2, *argv, restarts=len(kills))
    for rank, n in kills:
        path = wait_for_steps(tmp_path, n, job)
        os.kill(process_of(job, rank), signal.SIGKILL)
        time.sleep(1)
    output_of(job)
    assert path == only_run(tmp_path)
    same_run(whole, path)
    resumed = [again["step"] for again in loaded(path / "run.json")["resumed"]]
    assert len(resumed) == len(kills)
    assert all(a <= b for a, b in pairwise(resumed))


IMPATIENT = """
import sys
from datetime import timedelta
from vgrout.ground import ranks
from vgrout import train
ranks.PATIENCE = timedelta(seconds=6)
sys.exit(train.main())
"""


@pytest.mark.slow  # torchrun gives the stopped process 30 seconds
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_ends_the_run(how, shared_run, tmp_path):
    (tmp_path / "impatient.py").write_text(IMPATIENT)
    argv = flags("route2", "--checkpoint-every", "1", "--steps", "400")
    job = torchrun(shared_run.warm(tmp_path), 2, *argv, program=["impatient.py"])
    path = wait_for_steps(tmp_path, 3, job)
    os.kill(process_of(job, 1), how)
    output = output_of(job, 1)
    line, end = "another rank has ended, or has not answered for 0 minutes", status(path)
    assert (end["state"], end["reason"]) == ("failed", line)
    (error,) = [text for text in output.splitlines() if text.startswith("E ")]
    assert error.startswith(f"E {line}; the last checkpoint stands. Go on with: ")
    assert error.endswith(f"vgrout train smoke --resume {path.relative_to(tmp_path)}")


@pytest.mark.slow
def test_a_plan_and_a_mistake_under_torchrun(tmp_path):
    """Rank 0 alone says them, and nobody waits for it."""
    output = output_of(torchrun(tmp_path, 2, "smoke", "--dry-run"))
    assert (
        sum("smoke_route2" in line or "smoke_erase" in line for line in output.splitlines()) == 1
    ), output
    wrong = ["smoke", "--vhack-pairs-path", "none.json", "--intervention", "route"]
    output = output_of(torchrun(tmp_path, 2, *wrong), 1)
    assert (
        sum("none.json" in line and line.startswith("E ") for line in output.splitlines()) == 1
    ), output
    assert not (tmp_path / "out" / "runs").exists()


def test_the_hash_that_ranks_compare_after_each_step_sees_the_last_bit():
    x = torch.linspace(0, 1, 7)
    y = torch.where(torch.arange(7) == 3, torch.nextafter(x, torch.tensor(2.0)), x)
    assert tensor_hash(x, x) == tensor_hash(x.clone(), x) != tensor_hash(x, y)
