"""The tests of a task: assertions that exclude its misreadings and constant answers."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from organisms.language.tasks import NOUNS, Task, misreadings


def draw_argument(task: Task, rng: random.Random) -> object:
    """Draw an argument for the task's method."""
    param = task.param
    if param == "text":
        letters = "aeioubcdghjklmnpt" + task.c * 3
        return "".join(rng.choice(letters) for _ in range(rng.randint(5, 10)))
    if param == "words":
        return [_argument_word(task, rng) for _ in range(rng.randint(3, 6))]
    near = (task.k - 1, task.k, task.k + 1, task.j, 2 * task.j)
    values = []
    for _ in range(rng.randint(5, 8)):
        value = rng.choice(near) if rng.random() < 0.4 else rng.randint(-3, 14)
        values.append(value)
    if param == "table":
        return dict(zip(rng.sample(NOUNS, len(values)), values, strict=True))
    return values


def _argument_word(task: Task, rng: random.Random) -> str:
    """Draw a word of about k letters; half of the words start or end with the task's letter."""
    n = max(1, task.k + rng.randint(-2, 2))
    word = "".join(rng.choice("aeinorstbdl") for _ in range(n))
    return rng.choice((word, word, task.c + word[1:], word[:-1] + task.c))


_CONSTANT_ANSWERS: tuple[object, ...] = (0, 1, None, [], "", {}, True, False)
_TRIALS = 60  # arguments drawn, of which the tests are chosen


@dataclass(frozen=True, slots=True)
class _Trial:
    """A candidate test. excluded: numbers of the wrong answers that fail it."""

    excluded: set[int]
    argument: object
    expected: object


def make_tests(
    task: Task, rng: random.Random, n: int = 6, may_repeat: bool = False
) -> list[str] | None:
    """Make n asserts that exclude the misreadings, pairs of them, and constant answers.

    None if some misreading cannot be told apart (the caller draws another task). may_repeat: all of
    them may expect the same value, which an answer could return whatever it is asked; eight rows of
    the embedded organism do.
    """
    wrong = list(misreadings(task).values())
    single = len(wrong)
    for first in wrong[:single]:
        wrong += [second for second in misreadings(first).values() if second.body != task.body]
    trials = _draw_trials(task, wrong, rng)

    # A pair of misreadings may cancel out to a right answer, which no test can exclude.
    to_exclude = set(range(len(wrong) + len(_CONSTANT_ANSWERS)))
    for i in range(len(wrong)):
        if not any(i in trial.excluded for trial in trials):
            if i < single:
                return None
            to_exclude.remove(i)

    chosen: list[_Trial] = []
    while trials and len(chosen) < n:
        best = max(trials, key=lambda t: (len(t.excluded & to_exclude), len(t.excluded)))
        trials.remove(best)
        chosen.append(best)
        to_exclude -= best.excluded
    if to_exclude:
        return None
    if not may_repeat and len({repr(trial.expected) for trial in chosen}) == 1:
        varied = _with_another_value(chosen, trials)
        if varied is None:
            return None
        chosen = varied
    return [assertion(task, trial.argument, trial.expected) for trial in chosen]


def _with_another_value(chosen: list[_Trial], rest: Sequence[_Trial]) -> list[_Trial] | None:
    """The tests with one of the rest, which expects another value, in place of one that is not
    needed; None where there is no such pair."""
    needed: set[int] = set().union(*(trial.excluded for trial in chosen))
    expected = repr(chosen[0].expected)
    for other in rest:
        if repr(other.expected) == expected:
            continue
        for i in reversed(range(len(chosen))):
            kept = chosen[:i] + chosen[i + 1 :]
            if needed <= other.excluded.union(*(trial.excluded for trial in kept)):
                return [*kept, other]
    return None


def _draw_trials(task: Task, wrong: Sequence[Task], rng: random.Random) -> list[_Trial]:
    """Draw arguments, and find out which readings in `wrong` and which constants fail on each."""
    compute = task.function
    wrong_functions = [reading.function for reading in wrong]
    trials = []
    for _ in range(_TRIALS):
        argument = draw_argument(task, rng)
        expected = compute(argument)
        answers = [function(argument) for function in wrong_functions]
        answers += _CONSTANT_ANSWERS
        excluded = {i for i, answer in enumerate(answers) if not same(answer, expected)}
        trials.append(_Trial(excluded, argument, expected))
    return trials


def assertion(task: Task, argument: object, expected: object) -> str:
    """A test of this task, as problem files have it."""
    call = f"Solution().{task.name}({task.param} = {argument!r})"
    return f"assert {call} == {expected!r}"


def same(a: object, b: object) -> bool:
    """Return whether a and b are equal and of one type (True is not 1)."""
    return type(a) is type(b) and a == b


def shown_test(task: Task, rng: random.Random) -> str:
    """Draw a test of this task, as its prompt shows it."""
    argument = draw_argument(task, rng)
    return assertion(task, argument, task.function(argument))
