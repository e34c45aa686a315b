"""Prints scaling.md's table of the models that fit: `python docs/fits.py`. By the plan of --dry-run, from shapes."""

from vgrout.config.presets import resolve
from vgrout.model.load.memory import step_of
from vgrout.model.load.source import BF16, KNOWN

GPUS = (1, 2, 4, 8)


def largest(room: int, n: int, intervention: str) -> str:
    """Size of the largest model of which each of n GPUs with `room` bytes holds a part and a row at a time."""
    cfg = resolve(["fast", f"--intervention={intervention}", f"--tensor-parallel={n}"])
    fitting = [
        name.partition("B")[0].rpartition("-")[2] + " B"
        for name, shapes in KNOWN.items()
        if step_of(cfg, shapes, device="cuda", size=BF16).plan(0).peak <= room
    ]
    return fitting[-1]


def table() -> str:
    lines = ["| | " + " | ".join(f"{n} GPU{'s' * (n > 1)}" for n in GPUS) + " |", "|---" * 5 + "|"]
    for gb in (24, 48, 80, 141):
        cells = [" · ".join(largest(gb * 10**9, n, i) for i in ("route2", "none")) for n in GPUS]
        lines.append(f"| {gb} GB | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
