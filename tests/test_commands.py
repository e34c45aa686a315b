"""Every command that `vgrout` lists does something when it is called by its name."""

import subprocess
import sys

import pytest

from vgrout.__main__ import COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_answers_in_a_process_of_its_own(name: str) -> None:
    """A module that does not call its `main` would print nothing, and exit with 0."""
    ran = subprocess.run(
        [sys.executable, "-m", "vgrout", name, "--help"], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert f"vgrout {name}" in ran.stdout
