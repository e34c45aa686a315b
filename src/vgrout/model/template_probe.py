"""Render a chat template once, in a process of its own, which ends even if the template does not.

A template is a program: it can loop for years or ask for more memory than there is, and no
exception stops either. The template's text is standard input. Exit code 0: it came to an end, well
or not. With the argument `thinking` it is asked whether it knows of thoughts; SAME: it does not.
"""

import json
import re
import resource
import sys
import time
from contextlib import suppress

from jinja2 import Template, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

SECONDS = 3  # of CPU time
BYTES = 2**30  # of memory
SAME = 3  # exit code: the prompt is the same with thoughts and without
SYSTEM = {"role": "system", "content": "(sys)"}
USER = {"role": "user", "content": "(user)"}
ANSWER = {"role": "assistant", "content": "(answer)"}
LONG = {"role": "user", "content": "word " * 5000}
CONVERSATIONS = (
    [SYSTEM, USER],
    [USER],
    [USER, ANSWER],
    [USER, ANSWER, USER, ANSWER],
    [LONG],
)


def environment() -> ImmutableSandboxedEnvironment:
    """The environment that transformers gives a template."""
    like_transformers = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    like_transformers.filters["tojson"] = lambda value, **_: json.dumps(value)
    return like_transformers


def _without_generation_marks(text: str) -> str:
    """The template without a tag that transformers alone knows."""
    return re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", text)


def syntax_error(text: str) -> str:
    """What is wrong with a template's syntax, or "". Nothing of it is run."""
    try:
        environment().parse(_without_generation_marks(text))
    except (TemplateSyntaxError, RecursionError) as error:
        return " ".join(str(error).split())[:160]
    return ""


def _template(text: str) -> Template:
    return environment().from_string(_without_generation_marks(text))


def _rendered(template: Template, messages: list[dict[str, str]], **asked: bool) -> str:
    """What a template makes of messages. Raises whatever it raises."""

    def fail(message: str) -> None:
        raise RuntimeError(message)

    functions = {"raise_exception": fail, "strftime_now": time.strftime}
    return template.render(messages=messages, **asked, **functions)


def render(text: str) -> None:
    """Render every kind of conversation that vgrout shows a template."""
    template = _template(text)
    for messages in CONVERSATIONS:
        for prompt, thinking in ((True, False), (False, False), (True, True)):
            try:
                _rendered(
                    template, messages, add_generation_prompt=prompt, enable_thinking=thinking
                )
            except MemoryError:
                raise
            except Exception:  # a fault of the template, which is named where it is used
                continue


def knows_thoughts(text: str) -> bool:
    """Whether a template writes another prompt where thoughts are asked for, or opens one anyway."""
    template = _template(text)
    prompts: list[str] = []
    for thinking in (False, True):
        prompts.append(
            _rendered(template, [USER], add_generation_prompt=True, enable_thinking=thinking)
        )
    return prompts[0] != prompts[1] or prompts[1].rstrip().endswith("<think>")


def limit(kind: int, most: int) -> None:
    """Lower a limit of this process, where the system lets it be lowered.

    macOS refuses RLIMIT_AS. Whoever started this process still ends it after a time.
    """
    with suppress(ValueError, OSError):
        resource.setrlimit(kind, (most, most))


if __name__ == "__main__":
    limit(resource.RLIMIT_CPU, SECONDS)
    limit(resource.RLIMIT_AS, BYTES)
    try:
        if sys.argv[1:] == ["thinking"]:
            sys.exit(0 if knows_thoughts(sys.stdin.read()) else SAME)
        render(sys.stdin.read())
    except MemoryError:
        sys.exit(1)
    except Exception:  # a fault of the template's syntax
        sys.exit(0)
