"""Tasks of the organism's language: a family and three operations, and how they are misread.

A `Task` renders its statement, its prompt, its canonical solution and its *misreadings*: the same
task with one word misunderstood.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import NamedTuple

from organisms.language.operations import (
    FAMILIES,
    FOLDS,
    KEPT_VAR,
    LOOP_FOLDS,
    MAPS,
    Family,
    Op,
)
from vgrout.envs.code.modes import PLAIN_PHRASE
from vgrout.ground.data import Message

SYSTEM = "Answer with one Python code block."
LEAD = "The solution should be a method of the class Solution called "
STARTER = ". Use this starter code:\n```python\nclass Solution:\n    def "
STARTER_END = "):\n        # your code here\n```"


class Composition(NamedTuple):
    """A family and three operations. The splits have no composition in common."""

    family: str
    select: str
    map: str
    fold: str


@dataclass(frozen=True, slots=True)
class Task:
    """One problem: a family, three operations and their constants."""

    family: str
    select: str
    map: str
    fold: str
    name: str
    k: int
    j: int
    c: str
    whole: bool = False  # a misreading: fold the whole input, not what was selected

    @property
    def composition(self) -> Composition:
        return Composition(self.family, self.select, self.map, self.fold)

    @property
    def param(self) -> str:
        """The name of the method's one argument."""
        return self._family.param

    @property
    def _family(self) -> Family:
        return FAMILIES[self.family]

    @property
    def _select(self) -> Op:
        return self._family.selects[self.select]

    @property
    def _map(self) -> Op:
        return MAPS[self._family.kind][self.map]

    @property
    def _fold(self) -> Op:
        return FOLDS[self._family.kind][self.fold]

    @property
    def _constants(self) -> dict[str, object]:
        return {"k": self.k, "j": self.j, "c": self.c}

    @property
    def difficulty(self) -> str:
        """How many steps a reader has to keep in mind: "easy", "medium" or "hard"."""
        demands = (
            self.map not in ("same", "later", "earlier"),
            self.fold not in ("list", "count"),
            self.fold in LOOP_FOLDS,
            self.family in ("neighbours", "keys"),
        )
        steps = sum(demands)
        if steps >= 3:
            return "hard"
        return "medium" if steps == 2 else "easy"

    @property
    def statement(self) -> str:
        """The task in one English sentence."""
        noun = self._family.noun
        taken = f"{noun} {self._select.text}" if noun else self._select.text
        mapped = f", {self._map.text}" if self._map.text else ""
        sentence = f"Take {taken}{mapped} and {self._fold.text}."
        return sentence.format(**self._constants)

    @property
    def prompt(self) -> tuple[Message, ...]:
        """System and user message, without a hint: `PLAIN_PHRASE` occurs once."""
        starter = f"{STARTER}{self.name}(self, {self.param}{STARTER_END}"
        user = f"{self.statement}\n{LEAD}{self.name} {PLAIN_PHRASE}{starter}"
        return ({"role": "system", "content": SYSTEM}, {"role": "user", "content": user})

    @property
    def body(self) -> list[str]:
        """The method's lines, from column 0: one that selects, then those that map and fold."""
        family = self._family
        test = self._select.code.format(v=family.var, **self._constants)
        if self.family == "slices":
            selecting = f"kept = {test}"
        else:
            selecting = f"kept = [{family.element} for {family.var} in {family.source} if {test}]"

        walked, var = "kept", KEPT_VAR[family.kind]
        if self.whole:
            walked, var = family.source, family.var
        mapped = self._map.code.format(**self._constants)
        if mapped == var:  # nothing to map
            elements = argument = walked
            as_list = walked if walked in ("kept", "nums", "words") else f"list({walked})"
        else:
            elements = f"{mapped} for {var} in {walked}"
            argument, as_list = f"({elements})", f"[{elements}]"
        if self.fold in LOOP_FOLDS or self.fold == "descending":
            elements = as_list
        folding = self._fold.code.format(E=elements, L=as_list, P=argument)
        return [selecting, *folding.split("\n")]

    @property
    def function(self) -> Callable[[object], object]:
        """What this reading of the task computes; takes the method's one argument."""
        return function_of(tuple(self.body), self.param)


@cache
def function_of(body: tuple[str, ...], param: str) -> Callable[[object], object]:
    """What a method of these lines computes; takes its one argument."""
    lines = [f"def f({param}):"]
    lines += [f"    {line}" for line in body]
    scope: dict[str, Callable[[object], object]] = {}
    exec("\n".join(lines), scope)  # our own text, not a model's answer
    return scope["f"]


KINDS = ("boundary", "whole", "skipped", "inverse", "operation", "extreme")


def misreadings(task: Task) -> dict[str, Task]:
    """Return the task's misreadings, by kind: the same few confusions throughout the language."""
    out: dict[str, Task] = {}
    if task.family == "slices":
        out["boundary"] = replace(task, k=task.k + 1)
    elif task._select.near:
        out["boundary"] = replace(task, select=task._select.near)
    if task._select.opposite:
        out["inverse"] = replace(task, select=task._select.opposite)
    if task._map.opposite:
        out["operation"] = replace(task, map=task._map.opposite)
    if task._fold.opposite:
        out["extreme"] = replace(task, fold=task._fold.opposite)
    out["whole"] = replace(task, whole=True)
    if task.map != "same" and task._family.kind != "pair":
        out["skipped"] = replace(task, map="same")
    return out


def compositions() -> list[Composition]:
    """Return every combination of operations that makes a sensible task, in a fixed order."""
    out = []
    for name, family in FAMILIES.items():
        for parts in product(family.selects, MAPS[family.kind], FOLDS[family.kind]):
            composition = Composition(name, *parts)
            if _is_sensible(composition):
                out.append(composition)
    return out


# Maps that "how many different values there are" depends on.
_CHANGES_VARIETY = ("same", "modulo", "divide", "later", "gain")


def _is_sensible(composition: Composition) -> bool:
    """False where the map makes no difference to the answer."""
    if composition.fold == "count":
        return composition.map == "same"
    if composition.fold == "different" and composition.map not in _CHANGES_VARIETY:
        return False
    # On single characters, reversing does nothing and title case is upper case.
    return not (composition.family == "letters" and composition.map in ("reverse", "title"))


def split_compositions(seed: int) -> dict[str, list[Composition]]:
    """Split all compositions: 70 % train, 10 % val, 20 % test, disjoint.

    Every operation of a family occurs in training.
    """
    order = compositions()
    random.Random(f"{seed}/splits").shuffle(order)
    seen: set[tuple[str, str]] = set()
    must: list[Composition] = []  # the first with some operation: these are for training
    rest: list[Composition] = []
    for composition in order:
        kind = FAMILIES[composition.family].kind
        operations = {
            (composition.family, composition.select),
            (kind, f"m{composition.map}"),
            (kind, f"f{composition.fold}"),
        }
        if operations <= seen:
            rest.append(composition)
        else:
            must.append(composition)
        seen |= operations
    train_end = round(0.7 * len(order)) - len(must)
    val_end = round(0.8 * len(order)) - len(must)
    return {
        "train": must + rest[:train_end],
        "val": rest[train_end:val_end],
        "test": rest[val_end:],
    }


VERBS = tuple(
    "pick sum find get make list sort scan count trim join fold keep take walk"
    " read mix rank map show build sift draw group split merge weigh score reduce"
    " collect gather compute arrange filter".split()
)
NOUNS = tuple(
    "parts items marks steps tiles beads coins stars ropes boats cards lamps pages"
    " roads trees birds bells pearls stones clouds values totals records entries pieces"
    " signals numbers shells petals rivers garden window".split()
)
_ONSETS = (
    "",
    *"bcdfghjklmnpqrstvwxyz",
    *("bl", "br", "ch", "cl", "cr", "dr", "fl", "gr", "pl", "pr", "sc", "st", "tr"),
)
_CODAS = (
    *("", "", ""),
    *"cdefgklmnprstwxy",
    *("ct", "dg", "ed", "ff", "ll", "nd", "ng", "nt", "rd", "rm", "rs", "st", "ul"),
)


def draw_word(rng: random.Random, pieces: Sequence[str] = ()) -> str:
    """Draw a name, usually a new one: copying must not depend on a vocabulary.

    With `pieces`, a third of the names are composed of these.
    """
    draw = rng.random()
    if pieces and draw < 0.35:
        return "".join(rng.choice(pieces) for _ in range(rng.randint(1, 3)))
    if draw < 0.6:
        return rng.choice((*VERBS, *NOUNS))
    if draw < 0.7:
        return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(2, 6)))
    syllables = []
    for _ in range(rng.randint(1, 3)):
        syllables.append(rng.choice(_ONSETS) + rng.choice("aeiou") + rng.choice(_CODAS))
    return "".join(syllables)


def draw_task(composition: Composition, rng: random.Random, pieces: Sequence[str] = ()) -> Task:
    """Draw a name and constants for a composition."""
    verb, noun = rng.choice(VERBS), rng.choice(NOUNS)
    names = (
        f"{verb}_{noun}",
        f"{verb}_{draw_word(rng, pieces)}",
        f"{draw_word(rng, pieces)}_{noun}",
    )
    name = rng.choice(names)
    low, high = {"slices": (2, 4), "words": (3, 6)}.get(composition.family, (2, 9))
    letters = "aeinorst" if composition.family == "words" else "ghijklmnop"
    j = rng.randint(2, 3 if composition.map == "repeat" else 5)
    k = rng.randint(low, high)
    c = rng.choice(letters)
    return Task(*composition, name, k, j, c)
