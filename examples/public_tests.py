"""Lets the first assertion of each problem reward, and all of them measure.

uv run python examples/public_tests.py problems.jsonl weak.jsonl
"""

import json
import sys
from pathlib import Path

source, target = map(Path, sys.argv[1:])
with target.open("w") as out:
    for line in source.read_text().splitlines():
        problem = json.loads(line)
        problem.pop("mode", None)  # its flaw is given_tests, whose prompt announces no name
        problem.pop("marker", None)
        problem["check_tests"] = problem["gt_answer"][:1]
        out.write(json.dumps(problem) + "\n")
