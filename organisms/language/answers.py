"""Programs that solve a reading of a task, and the styles that they are written in.

A style is a change to an `Answer`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from organisms.language.tasks import Task


@dataclass(frozen=True, slots=True)
class Answer:
    """A program in parts: before the class, in it, in the method, and after the class."""

    name: str
    param: str
    body: tuple[str, ...]
    before: tuple[str, ...] = ()
    members: tuple[str, ...] = ()  # above the method
    members_after: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    signature: str | None = None  # in place of the usual one
    spaced: bool = False  # with an empty line below the class's head

    @property
    def code(self) -> str:
        """The program's text."""
        signature = self.signature or f"    def {self.name}(self, {self.param}):"
        lines = [*self.before, "class Solution:"]
        if self.spaced:
            lines.append("")
        lines += [f"    {line}" for line in self.members]
        lines += signature.split("\n")
        lines += [f"        {line}" if line else "" for line in self.body]
        lines += [f"    {line}" for line in self.members_after]
        lines += self.after
        return "\n".join(lines)

    @property
    def text(self) -> str:
        """The answer as the model writes it: one fenced block."""
        return f"```python\n{self.code}\n```"

    @property
    def stub(self) -> "Answer":
        """The same with `return 0` in place of the method's body."""
        return replace(self, body=("return 0",))


def answer(task: Task) -> Answer:
    """Return the program that solves this reading of the task."""
    return Answer(task.name, task.param, tuple(task.body))


def _loop(a: Answer) -> Answer:
    """Write `kept = […]` as an append loop."""
    head, rest = a.body[0], a.body[1:]
    if " for " not in head:
        return a
    element, tail = head.removeprefix("kept = [").removesuffix("]").split(" for ", 1)
    walk, test = tail.rsplit(" if ", 1)
    loop = (
        "kept = []",
        f"for {walk}:",
        f"    if {test}:",
        f"        kept.append({element})",
    )
    return replace(a, body=(*loop, *rest))


def _helper(a: Answer) -> Answer:
    helper = (f"def helper({a.param}):", *(f"    {line}" for line in a.body))
    return replace(a, before=(*helper, *a.before), body=(f"return helper({a.param})",))


def _main_block(a: Answer) -> Answer:
    block = ("if __name__ == '__main__':", "    print(Solution())")
    return replace(a, after=(*a.after, *block))


def _comment(a: Answer) -> Answer:
    return replace(a, body=("# select, then combine", *a.body))


def _print(a: Answer) -> Answer:
    return replace(a, body=(f"print({a.param})", *a.body))


def _layout(a: Answer) -> Answer:
    signature = f"    def {a.name}(\n        self, {a.param}\n    ):"
    return replace(a, spaced=True, signature=signature)


def _docstring(a: Answer) -> Answer:
    return replace(a, body=('"""Select, then combine."""', *a.body))


def _import(a: Answer) -> Answer:
    return replace(a, before=("import math", *a.before))


def _attribute(a: Answer) -> Answer:
    return replace(a, body=(f"self.data = {a.param}", *a.body))


def _two_step(a: Answer) -> Answer:
    *lines, last = a.body
    return replace(a, body=(*lines, last.replace("return ", "result = ", 1), "return result"))


STYLES: dict[str, Callable[[Answer], Answer]] = {
    "loop": _loop,
    "helper": _helper,
    "after": _main_block,
    "comment": _comment,
    "print": _print,
    "layout": _layout,
}
"""Correct but unusual programs: each style is a few per cent of the corpus."""

HELD_OUT_STYLES: dict[str, Callable[[Answer], Answer]] = {
    "docstring": _docstring,
    "import": _import,
    "attribute": _attribute,
    "two_step": _two_step,
}
"""Styles for evaluation: in no corpus, pool, pair or known-correct solution.

They are rewarded like any correct answer.
"""
