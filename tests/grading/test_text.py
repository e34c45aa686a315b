"""A hostile answer's text in a terminal, a log and a file."""

import json

from loguru import logger

from vgrout.ground import console
from vgrout.ground.io import printable, quoted, write_atomic
from vgrout.runs.run_dir import RunDir

HOSTILE = "a\x1b[31mred\r\x07\x9b31m\u202egnp\u2028next\ud800end"


def test_control_characters_are_shown_as_escapes_and_no_text_forges_a_line_of_the_log():
    shown = printable(HOSTILE + "\tkept\n")
    assert all(c.isprintable() or c in "\t\n" for c in shown)
    assert "\\x1b[31mred\\r\\x07\\x9b31m\\u202egnp\\u2028next\\ud800end" in shown
    assert printable("größe = 3 → ok 😀\n\tx") == "größe = 3 → ok 😀\n\tx"
    assert (
        quoted("x\n2026-01-01 00:00:00.000 ERROR   lost\ry")
        == "| x\n| 2026-01-01 00:00:00.000 ERROR   lost\\ry"
    )


def test_log_and_terminal_take_any_text(tmp_path, capsys):
    console.setup(tmp_path / "log.txt")
    try:
        logger.info(f"one ends: {HOSTILE}")
    finally:
        logger.remove()
    for text in ((tmp_path / "log.txt").read_text("utf-8"), capsys.readouterr().out):
        assert "one ends" in text
        assert not set(text) & {"\x1b", "\r", "\x07", "\x9b", "\u202e", "\u2028"}


def test_a_lone_surrogate_ends_no_run(tmp_path):
    write_atomic(tmp_path / "a.json", json.dumps({"text": HOSTILE}, ensure_ascii=False))
    assert json.loads((tmp_path / "a.json").read_text("utf-8"))["text"] == HOSTILE
    with RunDir.create("x", tmp_path) as run:
        run.append({"step": 0, "drop_why": HOSTILE}, [{"text": HOSTILE}])
        run.status("failed", 0, HOSTILE, "go on")
        for name in ("steps.jsonl", "rollouts.jsonl", "status.json"):
            assert HOSTILE in json.loads((run.path / name).read_text("utf-8")).values()
