"""Who is flagged, and what is done about it: the classes behind the rows of `vgrout.config.method`."""

from vgrout.config import method as config
from vgrout.config.method import InterventionSpec
from vgrout.method.base import Intervention, Monitor, Setup
from vgrout.method.gates import Band, Gate
from vgrout.method.interventions import SGTM, Erase, Penalty, Route, Route2, Screen
from vgrout.method.labels import Labels, Twin, WeakDetector
from vgrout.method.method import Method
from vgrout.method.online_probe import Fingerprint, OnlineProbe
from vgrout.method.quarantine import Quarantine
from vgrout.method.rules import ConstantReturn, SyntaxEdge, UnreadArgument
from vgrout.method.text_scores import NLL, PMI, Length
from vgrout.model.policy import modules_of_block

INTERVENTIONS: dict[str, type[Intervention]] = {
    "none": Intervention,
    "erase": Erase,
    "route": Route,
    "screen": Screen,
    "penalty": Penalty,
    "route2": Route2,
    "sgtm": SGTM,
}
MONITORS: dict[str, type[Monitor]] = {
    "none": Monitor,
    "gate": Gate,
    "band": Band,
    "labels": Labels,
    "detector": WeakDetector,
    "pmi": PMI,
    "nll": NLL,
    "length": Length,
    "twin": Twin,
    "quarantine": Quarantine,
    "online_probe": OnlineProbe,
    "fingerprint": Fingerprint,
    "unread_argument": UnreadArgument,
    "constant_return": ConstantReturn,
    "syntax_edge": SyntaxEdge,
}


def make_method(setup: Setup) -> Method:
    """A run's method, on its policy's modules.

    Raises:
        ValueError: no pairs where they are needed, files that do not fit this model, a base that is rewarded for
            nothing; one line.
    """
    cfg = setup.cfg.method
    block, own = cfg.quarantine_block, frozenset()
    if block is not None:
        own = frozenset(modules_of_block(setup.policy, setup.sizes, block))
    return Method(
        setup.cfg,
        INTERVENTIONS[cfg.intervention].make(setup),
        make_monitor(setup, cfg.monitor_name),
        own_modules=own,
        policy=setup.policy,
        shadows={name: make_monitor(setup, name) for name in cfg.in_shadow},
    )


def make_monitor(setup: Setup, name: str) -> Monitor:
    """A monitor of this name, with a seed of its own where it learns from one. Raises ValueError as `make_method`."""
    seed = setup.cfg.method.seed_monitor
    seeded = {"seed_monitor": make_monitor(setup, seed)} if config.MONITORS[name].learns else {}
    return MONITORS[name].make(setup, **seeded)


def register_intervention(intervention: type[Intervention], what: str, *, routes: bool = False) -> type[Intervention]:
    """Let `--intervention` find your own class, in this process: by its `name`, with `what` as its line of help.

    routes: whether it hands anything to the quarantine δS_hack.

    Raises:
        ValueError: its name is none, or is one of the package's own interventions.
    """
    config.register(intervention.name, InterventionSpec(what, routes=routes))
    INTERVENTIONS[intervention.name] = intervention
    return intervention
