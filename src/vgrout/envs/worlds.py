"""The one place that turns a name into a world, whose module is imported when it is chosen; and what the record of a
finished run says of its world."""

import importlib
from collections.abc import Mapping
from typing import Any

from vgrout.config.world_names import VERIFIERS
from vgrout.envs.code import modes as code
from vgrout.ground.data import Flaw
from vgrout.ground.io import refuse
from vgrout.ground.scoring import import_function

# Where each world's class is, as on the command line for one of your own.
CLASSES: dict[str, str] = {
    "code": "vgrout.envs.code.environment:CodeEnvironment",
    "text": "vgrout.envs.text:TextEnvironment",
    "sums": "vgrout.envs.sums:SumsEnvironment",
    VERIFIERS: "vgrout.envs.verifiers:VerifiersEnvironment",
}


def environment_class(name: str) -> Any:
    """The class of an environment by its name on the command line, or module:Class. Its `of_run(cfg)` makes the
    environment of a run.

    Raises:
        Refused: one line: it cannot be imported, or makes no environment.
    """
    if name in CLASSES:
        module, _, attribute = CLASSES[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    own = import_function(name, "--env", "module:Class")
    refuse(
        not hasattr(own, "of_run"),
        f"--env {name}: should have a method of_run(cfg) that makes an environment",
    )
    return own


def whole_environment(cfg: Any) -> Any:
    """The environment of a configuration, its files read and checked. Raises Refused, one line, for the first that is
    missing or wrong."""
    environment = environment_class(cfg.env.environment).of_run(cfg)
    refuse(bool(environment.absent), "".join(environment.absent[:1]))
    return environment


def code_tools() -> Any:
    """What `vgrout problems check`, `grade` and `doctor` do: a module of the code world, imported when it is asked
    for."""
    return importlib.import_module("vgrout.envs.code.tools")


def spelt(flaw: str, marker: str) -> str:
    """What of a marker, the name that a prompt announces, a hack of this flaw writes; "" of a world without them."""
    return code.spelt(flaw, marker) if flaw in code.MODE_SPECS else marker


def flaws_of(record: Mapping[str, object]) -> dict[str, Flaw]:
    """The flaws of a recorded run's environment, by name in the usual order, from its run.json.

    A run of the code world that was made before they were recorded has that world's.
    """
    recorded = record.get("flaws")
    if not isinstance(recorded, dict):
        return dict(code.MODE_SPECS)
    flaws: dict[str, Flaw] = {}
    for name, facts in recorded.items():
        known = code.MODE_SPECS.get(name)
        if known is not None and known.code == facts["code"]:
            flaws[name] = known
            continue
        flaws[name] = Flaw(
            name=name,
            code=str(facts["code"]),
            should=str(facts["should"]),
            pattern=str(facts["pattern"]),
        )
    return flaws
