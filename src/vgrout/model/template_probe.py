"""Render a chat template once, in a process of its own, which ends even if the template does not.

A template is a program: it can loop for years or ask for more memory than there is, and no
exception stops either. The template's text is standard input. Exit code 0: it came to an end, well
or not.
"""

import json
import re
import resource
import sys
import time

from jinja2.sandbox import ImmutableSandboxedEnvironment

SECONDS = 3  # of CPU time
BYTES = 2**30  # of memory
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


def render(text: str) -> None:
    """Render every kind of conversation that vgrout shows a template.

    The environment is the one that transformers gives it.
    """

    def fail(message: str) -> None:
        raise RuntimeError(message)

    functions = {"raise_exception": fail, "strftime_now": time.strftime}
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **_: json.dumps(value)
    template = environment.from_string(re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", text))
    for messages in CONVERSATIONS:
        for prompt in (True, False):
            try:
                template.render(
                    messages=messages,
                    add_generation_prompt=prompt,
                    enable_thinking=False,
                    **functions,
                )
            except MemoryError:
                raise
            except Exception:  # a fault of the template, which is named where it is used
                continue


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    try:
        render(sys.stdin.read())
    except MemoryError:
        sys.exit(1)
    except Exception:  # a fault of the template's syntax
        sys.exit(0)
