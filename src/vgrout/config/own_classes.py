"""What shows of a class of somebody's own without running it: its attributes, its methods' names and arguments.

Everything else is tried on a made-up step (`vgrout.method.contract`). No torch.
"""

import difflib
import inspect
from collections.abc import Mapping, Sequence
from typing import TypeGuard

from vgrout.errors import Refused

# The methods that a run calls, with the names of what they are called with.
OF_BOTH: Mapping[str, tuple[str, ...]] = {
    "make": ("setup",),
    "refresh": ("step",),
    "state_dict": (),
    "load_state_dict": ("state",),
}
CALLED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "Monitor": {
        **OF_BOTH,
        "flag": ("views", "step"),
        "known_hacks": ("view",),
        "flag_gradients": ("step", "number"),
    },
    "Intervention": {
        **OF_BOTH,
        "reward": ("view", "flagged"),
        "advantages": ("view", "set_apart"),
        "route": ("step",),
    },
}
# What `__init__` is called with where `make` is the base class's.
BUILT_WITH = {"Monitor": (), "Intervention": ("spans", "cfg", "device")}
# The methods of which at least one has to be the class's own, by what decides it.
TEXTS, GRADIENTS = ("flag",), ("flag_gradients", "known_hacks", "make", "__init__")
REWARDS, GRADIENT = ("reward",), ("route", "advantages")
CHOICES = {"reads": ("texts", "gradients"), "acts_on": ("nothing", "rewards", "gradient")}
# what a monitor may need, as `specs` explains it
NEEDS = ("seed", "known correct", "detector", "demonstrations")
SWITCHES = ("sees_labels", "signs_random", "reads_flags", "by_rollout", "routes", "has_direction")
# A helper is no misspelt method unless it is as close as one letter is in a word of four.
CLOSE = 0.85


def require_usable(own: type, facts: Mapping[str, object], title: str) -> None:
    """Refuse a class that no run could use. facts: what its row will say. title: of its base class.

    Raises:
        Refused: one line with the class, the attribute or method, and what is expected.
    """
    _require_attributes(own, facts, title)
    base = _base(own, title)
    called = CALLED[title]
    _require_spelling(own, base, called)
    for method, arguments in called.items():
        if hasattr(own, method):
            _require_callable(own, method, arguments)
    if not _is_own(own, base, "make"):
        _require_built(own, BUILT_WITH[title])
    pair = [_is_own(own, base, method) for method in ("state_dict", "load_state_dict")]
    if pair[0] != pair[1]:
        there, absent = ("state_dict", "load_state_dict")[:: 1 if pair[0] else -1]
        raise Refused(
            f"{own.__name__}.{there}: is there without {absent}, so a resumed run would go on without "
            "what it remembers; write both"
        )
    _require_acting(own, base, facts, title)


def _require_attributes(own: type, facts: Mapping[str, object], title: str) -> None:
    """Raises Refused where an attribute that the row is made of has not its type."""
    for name, value in facts.items():
        expected = ""
        if name == "what" and not isinstance(value, str):
            expected = "one line of text"
        if name in ("settings", "needs") and not _is_words(value):
            expected = 'a tuple of names, as ("penalty",): a comma makes the tuple'
        if name == "needs" and _is_words(value) and not {*value} <= {*NEEDS}:
            expected = f"a tuple of {', '.join(map(repr, NEEDS))}"
        if name in CHOICES and value not in CHOICES[name]:
            expected = f"one of {', '.join(CHOICES[name])}"
        if name in SWITCHES and not isinstance(value, bool):
            expected = "True or False"
        if name == "usual_monitor" and not isinstance(value, str):
            expected = "a monitor's name"
        if name in ("usual", "documents") and not isinstance(value, Mapping):
            expected = "a dict of settings"
        if expected:
            raise Refused(f"{own.__name__}.{name}: should be {expected}, got {value!r}")
    if facts.get("reads") == "gradients" and not _reads_gradients(own):
        raise Refused(
            f'{own.__name__}.reads: is "gradients", which only a GradientMonitor of vgrout.method.gates can; '
            f"derive it from that, or leave it out"
        )
    if title == "Monitor" and hasattr(own, "flag_gradients") and facts["reads"] != "gradients":
        raise Refused(f'{own.__name__}.reads: should be "gradients" in a GradientMonitor')
    if title == "Intervention" and facts["acts_on"] == "rewards" and not facts["reads_flags"]:
        raise Refused(
            f'{own.__name__}.reads_flags: should be True with acts_on = "rewards": rewards change by flags'
        )


def _reads_gradients(own: type) -> bool:
    """Whether it derives from the base class of what is asked about gradients."""
    return _derives_from(own, "vgrout.method.gates", "GradientMonitor") is not None


def _is_words(value: object) -> TypeGuard[tuple[str, ...]]:
    return isinstance(value, tuple) and all(isinstance(word, str) for word in value)


def _base(own: type, title: str) -> object:
    """The package's own base class, above which nothing is somebody's own."""
    base = _derives_from(own, "vgrout.method.base", title)
    if base is None:
        raise Refused(f"{own.__name__}: is no {title} of vgrout.method.base")
    return base


def _derives_from(own: type, module: str, name: str) -> type | None:
    """The class of this name that it derives from, found without importing the module; None: it does not."""
    for base in own.__mro__:
        if (base.__module__, base.__name__) == (module, name):
            return base
    return None


def _is_own(own: object, base: object, method: str) -> bool:
    """Whether a method is another one than the base class's."""
    return _function(own, method) is not _function(base, method)


def _function(of: object, method: str) -> object:
    """A method without what it is bound to; None: there is none."""
    found = getattr(of, method, None)
    return getattr(found, "__func__", found)


def _require_spelling(own: type, base: object, called: Mapping[str, Sequence[str]]) -> None:
    """Raises Refused for a method whose name is nearly that of one which a run calls, and which the class has not."""
    absent = [
        method for method in called if hasattr(base, method) and not _is_own(own, base, method)
    ]
    for part in own.__mro__:
        if part.__module__.partition(".")[0] in ("vgrout", "builtins"):
            continue
        for name, value in vars(part).items():
            is_method = inspect.isfunction(value) or isinstance(value, classmethod | staticmethod)
            if not is_method or name.startswith("_") or hasattr(base, name):
                continue
            plain = {method.replace("_", ""): method for method in absent}
            near = difflib.get_close_matches(name.lower().replace("_", ""), plain, 1, CLOSE)
            if near:
                method = plain[near[0]]
                raise Refused(
                    f"{own.__name__}.{name}: no run calls a method of this name; did you mean "
                    f"{method}({', '.join(called[method])})? If it is a helper, begin its name with _"
                )


def _require_callable(own: type, method: str, arguments: Sequence[str]) -> None:
    """Raises Refused where a method cannot be called as a run calls it."""
    found = inspect.getattr_static(own, method)
    expected = f"it is called as {method}({', '.join(arguments)})"
    if method == "make" and not isinstance(found, classmethod | staticmethod):
        raise Refused(f"{own.__name__}.make: should be a @classmethod; {expected}")
    if not callable(getattr(own, method)):
        raise Refused(f"{own.__name__}.{method}: should be a method; {expected}")
    if inspect.iscoroutinefunction(getattr(own, method)):
        raise Refused(f"{own.__name__}.{method}: should not be async; {expected} and not awaited")
    bound = isinstance(found, classmethod | staticmethod) or not inspect.isfunction(found)
    given = [*([] if bound else [None]), *arguments]
    try:
        signature = inspect.signature(getattr(own, method))
    except (TypeError, ValueError):  # of a built-in: only a call can tell
        return
    # a monitor that learns from another one is given that as well
    more = {"seed_monitor": None} if "seed_monitor" in signature.parameters else {}
    try:
        signature.bind(*given, **more)
    except TypeError:
        raise Refused(f"{own.__name__}.{method}{signature}: {expected}") from None


def _require_built(own: type, arguments: Sequence[str]) -> None:
    """Raises Refused where a class needs constructor arguments that nobody gives it."""
    try:
        signature = inspect.signature(own)
        signature.bind(*arguments)
    except TypeError:
        given = f"{own.__name__}({', '.join(arguments)})"
        raise Refused(
            f"{own.__name__}.__init__{inspect.signature(own)}: it is made as {given}; give the other arguments "
            "values of their own, or write a classmethod make(cls, setup) that returns an instance"
        ) from None
    except ValueError:  # of a built-in: only a call can tell
        return


def _require_acting(own: type, base: object, facts: Mapping[str, object], title: str) -> None:
    """Raises Refused for a class that changes nothing: none of the methods that decide is its own."""
    if title == "Monitor":
        needed = GRADIENTS if facts["reads"] == "gradients" else TEXTS
        effect = "nothing would be flagged"
    elif facts["acts_on"] == "rewards":
        needed, effect = REWARDS, "no reward would change"
        if any(_is_own(own, base, method) for method in GRADIENT):
            effect += '; a class with route or advantages says acts_on = "gradient"'
    else:
        needed, effect = GRADIENT, "the run would be plain GRPO"
    if not any(_is_own(own, base, method) for method in needed):
        calls = [f"{name}({', '.join(CALLED[title][name])})" for name in needed[:2]]
        raise Refused(f"{own.__name__}: has no {' or '.join(calls)} of its own, so {effect}")
    if title == "Intervention" and facts["acts_on"] != "rewards" and _is_own(own, base, "reward"):
        raise Refused(
            f'{own.__name__}.reward: is called only with acts_on = "rewards", and acts_on is '
            f'"{facts["acts_on"]}"'
        )
    unread = title == "Intervention" and facts["reads_flags"] and facts["acts_on"] == "nothing"
    if unread and not facts["by_rollout"] and _is_own(own, base, "route"):
        raise Refused(
            f'{own.__name__}.acts_on: should be "gradient" where route reads flags: otherwise flagged rollouts and the '
            "others of a group are one row of g"
        )
