"""The recipes of CONTRIBUTING.md: what a section says is applied to a copy of the repository.

A step is a sentence and a fenced block. The sentence ends in "In `FILE`, above the line `LINE`:" (or below, or in place
of), or in "A new file `FILE`:". LINE is without its indentation and stands in FILE once; the block goes there.
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
_STEP = re.compile(
    r"(?:In `(?P<file>[^`\n]+)`, (?P<where>above|below|in place of) the line (?P<tick>`+) ?(?P<line>[^\n]+?) ?(?P=tick)"
    r"|A new file `(?P<new>[^`\n]+)`):\n\n```\w*\n(?P<block>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Step:
    """One block and where it goes."""

    file: str
    where: str  # above, below, in place of; "": the whole of a new file
    line: str
    block: str

    def apply(self, folder: Path) -> None:
        """Do it to the copy in `folder`. Raises ValueError where the line is not there exactly once."""
        file = folder / self.file
        if not self.where:
            assert not file.exists(), f"{self.file}: is there already"
            file.write_text(self.block, encoding="utf-8")
            return
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        (at,) = [i for i, line in enumerate(lines) if line.strip() == self.line]
        before, after = {"above": (at, at), "below": (at + 1, at + 1), "in place of": (at, at + 1)}[
            self.where
        ]
        file.write_text("".join([*lines[:before], self.block, *lines[after:]]), encoding="utf-8")


def section(title: str) -> str:
    """What stands under a heading of the second level."""
    text = CONTRIBUTING.read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"CONTRIBUTING.md: no section {title!r}"
    return found[1]


def steps(title: str) -> list[Step]:
    """The steps of a section: all of its blocks of Python, and others that have a place."""
    text = section(title)
    found = [
        Step(m["file"] or m["new"], m["where"] or "", m["line"] or "", m["block"])
        for m in _STEP.finditer(text)
    ]
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    astray = [block for block in blocks if block not in [step.block for step in found]]
    assert found, f"CONTRIBUTING.md, {title}: no step"
    assert not astray, f"CONTRIBUTING.md, {title}: no sentence says where this goes: {astray[0]}"
    return found
