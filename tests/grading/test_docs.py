"""The tests that docs/grading.md names exist, one for each thing that it claims is held."""

import re
from pathlib import Path

HERE = Path(__file__).parent
TEXT = (HERE.parents[1] / "docs" / "grading.md").read_text("utf-8")
REFERENCE = re.compile(r"`((?:\.\./)?test_\w+\.py)(?:::(test_\w+))?`")


def test_every_test_named_in_the_document_exists():
    references = REFERENCE.findall(TEXT)
    assert len(references) > 20
    for file, test in references:
        source = (HERE / file).read_text("utf-8")
        assert f"def {test}(" in source or not test, f"{file}::{test}"


def test_every_row_of_the_table_names_a_test():
    table = TEXT.split("### What is held")[1].split("Not held")[0]
    rows = [
        line
        for line in table.splitlines()
        if line.startswith("| ") and not line.startswith("| held")
    ]
    assert len(rows) > 15
    assert [row for row in rows if not REFERENCE.search(row)] == []
