"""Golden runs: rows of each method, of distillation and of DPO in tests/golden/. `just golden` records them again; a
difference is explained in CHANGELOG.md, or it is a bug."""

import json
import platform
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import pytest

from runs import ARMS, IMITATIONS, PAIRS, SETTINGS, flags, imitate, imitation_rows, rows, run

FOLDER = Path(__file__).parent / "golden"

# Counts are exact. Another CPU sums in another order: 1e-7 a logit, a few 1e-5 relative in a norm
# after five steps of Adam; a changed formula moves at least one column by more than 1e-3.
CLOSE = {"rel": 1e-3, "abs": 1e-5}


def versions():
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        **{name: version(name) for name in ("torch", "transformers", "tokenizers")},
    }


def differences(got, want, where="", close=CLOSE):
    """Every place where `got` is not what was recorded."""
    if isinstance(want, dict) and isinstance(got, dict):
        keys = sorted(want.keys() | got.keys())
        return [
            d for k in keys for d in differences(got.get(k), want.get(k), f"{where}.{k}", close)
        ]
    if isinstance(want, list) and isinstance(got, list) and len(want) == len(got):
        both = enumerate(zip(got, want, strict=True))
        return [d for i, (a, b) in both for d in differences(a, b, f"{where}[{i}]", close)]
    if isinstance(want, float) and isinstance(got, int | float):
        return [] if got == pytest.approx(want, **close) else [f"{where}: {got} (golden: {want})"]
    return [] if got == want else [f"{where}: {got} (golden: {want})"]


def record(*names):
    """Record the golden files of these names, or of all."""
    FOLDER.mkdir(exist_ok=True)
    for name in names or (*ARMS, *PAIRS, *SETTINGS, *IMITATIONS):
        with tempfile.TemporaryDirectory() as folder:
            if name in IMITATIONS:
                command = ["vgrout", *IMITATIONS[name]]
                recorded = imitation_rows(imitate(Path(folder), *command[1:]))
            else:
                command = ["vgrout.train", *flags(name)]
                recorded = rows(run(Path(folder), *command[1:]))
        lines = ",\n".join(f"  {json.dumps(row)}" for row in recorded)
        head = {
            "command": ["python", "-m", *command],
            "versions": versions(),
        }
        text = f'{json.dumps(head, indent=1).removesuffix("}").rstrip()},\n "rows": [\n{lines}\n ]\n}}\n'
        (FOLDER / f"{name}.json").write_text(text)


if __name__ == "__main__":
    record(*sys.argv[1:])
