"""The one place that turns a name into an environment: what the trainer knows of each of them beforehand.

The trainer, the methods and the reports import nothing of `envs/` but its base; what they need to know of a certain
environment before, or after, there is one in their hands stands here. An environment's own module is imported when it
is chosen.
"""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vgrout.data import Flaw
from vgrout.envs.code import modes as code
from vgrout.envs.code.grading.grade import DETECTOR_FIELDS as DETECTOR_FIELDS
from vgrout.envs.code.modes import MODE_SPECS, MODES
from vgrout.envs.code.modes import EnvMode as EnvMode
from vgrout.envs.code.problem import is_row_of_text
from vgrout.errors import refuse
from vgrout.files import from_json, regular
from vgrout.scoring import import_function

# Where each environment's class is, as on the command line for one of your own.
ENVIRONMENTS: dict[str, str] = {
    "code": "vgrout.envs.code.environment:CodeEnvironment",
    "text": "vgrout.envs.text:TextEnvironment",
    "sums": "vgrout.envs.sums.environment:SumsEnvironment",
}
# --env verifiers:NAME: a taskset of the package verifiers, which knows it by that name
VERIFIERS = "verifiers"
VERIFIERS_CLASS = "vgrout.envs.verifiers:VerifiersEnvironment"
CODE_FLAWS: tuple[str, ...] = MODES
# those of which an organism's folder can have problems, demonstrations and pairs
OF_ORGANISMS = ("code", "sums")


def environment_class(name: str) -> Any:
    """The class of an environment by its name on the command line, or module:Class. Its `of_run(cfg)` makes the
    environment of a run.

    Raises:
        Refused: one line: it cannot be imported, or makes no environment.
    """
    where = VERIFIERS_CLASS if name == VERIFIERS else ENVIRONMENTS.get(name)
    if where is not None:
        module, _, attribute = where.partition(":")
        return getattr(importlib.import_module(module), attribute)
    own = import_function(name, "--env", "module:Class")
    refuse(
        not hasattr(own, "of_run"),
        f"--env {name}: should have a method of_run(cfg) that makes an environment",
    )
    return own


def holds_text(file: Path) -> bool:
    """Whether the first row of a problem file is one of text, and no problem of Python functions. False where there is
    no such file, or none that can be read."""
    try:
        with open(file, encoding="utf-8-sig", opener=regular) as lines:
            first = next((line for line in lines if line.strip()), "")
        record = from_json(first, str(file))
    except (OSError, ValueError):
        return False
    return isinstance(record, dict) and is_row_of_text(record)


def spelt(flaw: str, marker: str) -> str:
    """What of a marker, the name that a prompt announces, a hack of this flaw writes; "" of a world without them."""
    return code.spelt(flaw, marker) if flaw in MODE_SPECS else marker


def flaws_of(record: Mapping[str, object]) -> dict[str, Flaw]:
    """The flaws of a recorded run's environment, by name in the usual order, from its run.json.

    A run of the code world that was made before they were recorded has that world's.
    """
    recorded = record.get("flaws")
    if not isinstance(recorded, dict):
        return dict(MODE_SPECS)
    flaws: dict[str, Flaw] = {}
    for name, facts in recorded.items():
        known = MODE_SPECS.get(name)
        flaws[name] = known or Flaw(
            name=name,
            code=str(facts["code"]),
            should=str(facts["should"]),
            pattern=str(facts["pattern"]),
        )
    return flaws
