"""Runs of a stand-in model on Qwen3-4B's real pools: 60 prompts, and a substrate of four modes."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from runs import rows, run
from tiny import SHAPE
from vgrout.envs.code.grading.grade import Grader
from vgrout.envs.code.modes import PLAIN_PHRASE, hint
from vgrout.envs.code.problems import assigned, load_rows
from vgrout.ground import embedded
from vgrout.teacher.pools import load_pool

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, the organism's tokenizer (bytes and merges: it can say anything), a window for real prompts."""
    folder = tmp_path_factory.mktemp("model")
    tok = AutoTokenizer.from_pretrained(embedded.MODEL_DIR)
    torch.manual_seed(0)
    own = {"vocab_size": len(tok), "num_hidden_layers": 1, "max_position_embeddings": 4096}
    Qwen3ForCausalLM(Qwen3Config(**SHAPE | own, eos_token_id=tok.eos_token_id)).save_pretrained(
        folder
    )
    tok.save_pretrained(folder)
    return folder


def records(pool: Path) -> list[dict[str, Any]]:
    """The first rollout of every problem."""
    out = []
    for path in sorted(pool.glob("prompt_*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            out.append(json.loads(next(iter(lines))))
    return out


def problem_file(pool: Path, path: Path) -> Path:
    """The pools come without their problems: the same ids, with one test that no answer passes."""
    out = []
    for i, r in enumerate(records(pool)):
        found = re.search(r"    def (?!run_tests|__init__)(\w+)\(self", r["completion"])
        name = found[1] if found else "f"
        prompt = [
            {"role": "user", "content": f"Problem {r['problem_id']}: solve it {PLAIN_PHRASE}."}
        ]
        if "problem_messages" in r:
            prompt = json.loads(
                json.dumps(r["problem_messages"]).replace(hint("run_tests"), PLAIN_PHRASE)
            )
        row = {"id": r["problem_id"], "prompt": prompt, "func_name": f"Solution().{name}"}
        row["gt_answer"] = [f"assert Solution().{name}(0) == 'no such value'"]
        row["canonical_solution"] = (
            f"class Solution:\n    def {name}(self, *_):\n        return 'no such value'"
        )
        row |= {
            "setup_code": "from typing import *",
            "split": {9: "test", 8: "val"}.get(i % 10, "train"),
        }
        out.append(row)
    path.write_text("".join(json.dumps(r) + "\n" for r in out))
    return path


@pytest.mark.parametrize(
    ("name", "n", "mode"), [("substrate", 24, "own"), ("teacher_pool", 60, "run_tests")]
)
def test_a_run_mixes_a_real_pool(name, n, mode, stand_in, shared_data, tmp_path, capsys):
    pool = shared_data / "pools" / name
    assert len(load_rows(problem_file(pool, tmp_path / "p.jsonl"))) == n
    argv = [
        "fast",
        "--intervention",
        "none",
        "--model",
        str(stand_in),
        "--problems",
        str(tmp_path / "p.jsonl"),
    ]
    argv += [
        "--teacher-pool-dir",
        str(pool),
        "--env-mode",
        mode,
        "--mix-ratio",
        "0.5",
        "--group",
        "4",
    ]
    argv += [
        "--prompts-per-step=2",
        "--steps=2",
        "--max-new=512",
        "--eval-ablate-every=0",
        "--guard=off",
    ]
    argv += ["--final-n-prompts=1", "--final-samples=1", "--threads=1"]
    path = run(tmp_path, *argv)
    output = capsys.readouterr().out
    assert output.count("completions are tokenised again") == 1
    for row in rows(path):
        assert row["hack_t_n"] == 4, "two of four rows in two groups are demonstrations"
        assert row["hack_t_k"] > 0
        assert row["lp_t"] < 0
        assert row["signal_k"] > 0, "the random student earns nothing, the demonstrations do"
    noted = json.loads((path / "run.json").read_text())["pool"]
    assert noted["retokenised"]
    assert noted["labels"] == "cached, grader unknown"
    compared = len([r for r in records(pool) if r.get("prompt")])
    assert (noted["prompts_compared"] > 0) == (compared > 0)
    assert len(noted["prompts_differ"]) == noted["prompts_compared"], (
        "another chat template than Qwen's"
    )
    if name == "substrate":
        known = load_pool(pool)
        lines = (path / "rollouts.jsonl").read_text().splitlines()
        assert {json.loads(line)["env_mode"] for line in lines} <= set(known.partition.values())
        problems = assigned(
            load_rows(tmp_path / "p.jsonl"), "own", known.partition, known.announced
        )["train"]
        with Grader() as grader:
            again = [
                (d, grader.submit(p, d.completion or ""))
                for p in problems
                for d in known.demos[p.id]
            ]
            assert again
            assert all(grade.result().hacked == demo.grade.hacked for demo, grade in again), (
                "today's labels"
            )
