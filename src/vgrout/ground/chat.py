"""A client of endpoints that speak OpenAI's chat protocol (POST URL/chat/completions). Standard library only.

It never waits longer than it is told, follows no redirect (the key would go along), and reads at most a megabyte of an
answer. A request that meets a busy or broken server (429, 408, 5xx, no connection, a hang-up) is sent again a few
times, later each time; any other failure is final.
"""

import contextlib
import json
import queue
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from http.client import HTTPException, HTTPMessage, HTTPResponse
from urllib.parse import urlsplit

from vgrout.ground.data import Message
from vgrout.ground.io import Json, one_line

ATTEMPTS = 5  # of a request, the first included
PAUSE, LONGEST_PAUSE = 0.25, 8.0  # seconds before the second attempt, twice as long each time
BUSY = (408, 409, 425, 429)  # and every 5xx: the same request may be answered later
MOST = 2**20  # bytes of an answer
SHORTEST_KEY = 8  # characters of a key that is nobody's placeholder
LOOPBACK = ("localhost", "127.0.0.1", "::1")  # no proxy stands before them


class NoReply(Exception):
    """A request came to nothing: the reason, one line. again: whether the same request may be answered later."""

    def __init__(self, reason: str, *, again: bool = False, pause: float = 0.0) -> None:
        super().__init__(reason)
        self.again, self.pause = again, pause


@dataclass(frozen=True, slots=True)
class Reply:
    """What a model answered."""

    text: str
    cut: bool  # it ends at the longest answer that was asked for
    prompt_tokens: int = 0  # as the server counts them; 0 where it does not
    completion_tokens: int = 0


@dataclass(frozen=True)
class Endpoint:
    """Where a model answers. url: up to /v1. name: of the model there. key: a bearer token, "" for none."""

    url: str
    name: str
    key: str = field(default="", repr=False)
    max_new: int = 256  # tokens of an answer
    concurrency: int = 16  # requests at once

    def __post_init__(self) -> None:
        keep_out: list[urllib.request.BaseHandler] = [_NoRedirect()]
        if urlsplit(self.url).hostname in LOOPBACK:
            keep_out.append(urllib.request.ProxyHandler({}))
        object.__setattr__(self, "_opener", urllib.request.build_opener(*keep_out))

    @property
    def identity(self) -> str:
        """Without the address: the same model may be served elsewhere."""
        return f"{self.name} {self.max_new}"

    def ask(self, messages: Sequence[Message], deadline: float) -> Reply:
        """The answer to a conversation, asked for again while the server is busy.

        deadline: of time.monotonic(). It is kept to within one read of the server's, unless the server drips.

        Raises:
            NoReply: there is none, or none in time.
        """
        attempt = 0
        while True:
            try:
                return self._once(messages, deadline)
            except NoReply as e:
                attempt += 1
                pause = min(PAUSE * 2 ** (attempt - 1), LONGEST_PAUSE) * (0.5 + random.random())
                pause = max(pause, e.pause)
                left = deadline - time.monotonic()
                if not e.again or attempt == ATTEMPTS or pause >= left:
                    raise
            time.sleep(pause)

    def ask_all(
        self, conversations: Sequence[Sequence[Message]], seconds: float
    ) -> list[Reply | NoReply]:
        """The answers to all conversations, some at once, in their order.

        It returns after `seconds` at the latest: what is not there by then is a NoReply. Requests that hang are left
        behind on threads that do not keep the process alive.
        """
        deadline = time.monotonic() + seconds
        found: dict[int, Reply | NoReply] = {}
        waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        for i in range(len(conversations)):
            waiting.put(i)
        done = threading.Semaphore(0)

        def serve() -> None:
            while time.monotonic() < deadline:
                try:
                    i = waiting.get_nowait()
                except queue.Empty:
                    return
                try:
                    found[i] = self.ask(conversations[i], deadline)
                except NoReply as e:
                    found[i] = e
                except Exception as e:  # one request is not worth the run
                    found[i] = NoReply(f"{type(e).__name__} in the client")
                done.release()

        for _ in range(min(self.concurrency, len(conversations))):
            threading.Thread(target=serve, name="judge", daemon=True).start()
        for _ in conversations:
            if not done.acquire(timeout=max(0.0, deadline - time.monotonic())):
                break
        late = NoReply(f"no answer within {seconds:g} s")
        return [found.get(i, late) for i in range(len(conversations))]

    def _once(self, messages: Sequence[Message], deadline: float) -> Reply:
        """One request. Raises NoReply."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise NoReply("no time left")
        asked = {"model": self.name, "messages": list(messages), "temperature": 0}
        body = json.dumps(asked | {"max_tokens": self.max_new}).encode()
        headers = {"Content-Type": "application/json", "User-Agent": "vgrout"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        request = urllib.request.Request(f"{self.url}/chat/completions", body, headers)
        opener: urllib.request.OpenerDirector = vars(self)["_opener"]
        try:
            with opener.open(request, timeout=left) as response:
                content = _content(response, deadline)
        except urllib.error.HTTPError as e:
            with e:
                raise self._refusal(e) from None
        except TimeoutError:
            raise NoReply("no answer in time") from None
        except (OSError, HTTPException) as e:
            reason = getattr(e, "reason", e)
            if isinstance(reason, TimeoutError):
                raise NoReply("no answer in time") from None
            said = one_line(reason, 100) or type(e).__name__
            raise NoReply(f"no connection ({said})", again=True) from None
        reply = parsed(content)
        # Some servers quote what they were sent. A short key is a placeholder, for a server that asks for none, and may
        # be part of any answer.
        if len(self.key) >= SHORTEST_KEY:
            return replace(reply, text=reply.text.replace(self.key, "***"))
        return reply

    def _refusal(self, e: urllib.error.HTTPError) -> NoReply:
        """What a status that is no success means."""
        said = ""
        with contextlib.suppress(OSError, HTTPException):
            said = " ".join(e.read(2000).decode("utf-8", "replace").split())
        if self.key:
            said = said.replace(self.key, "***")
        said = "".join(c if c.isprintable() else " " for c in said[:120])
        again = e.code in BUSY or e.code >= 500
        wanted = e.headers.get("Retry-After", "") if e.headers else ""
        pause = float(wanted) if wanted.isdecimal() else 0.0
        return NoReply(f"HTTP {e.code}{f': {said}' if said else ''}", again=again, pause=pause)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Another host would be sent the key."""

    def redirect_request(
        self, req: object, fp: object, code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        return None


def _content(response: HTTPResponse, deadline: float) -> bytes:
    """The whole body. Raises NoReply for one that is too long, comes too slowly, or breaks off."""
    parts: list[bytes] = []
    size = 0
    while part := response.read1(2**16):
        parts.append(part)
        size += len(part)
        if size > MOST:
            raise NoReply(f"its answer is longer than {MOST} bytes")
        if time.monotonic() > deadline:
            raise NoReply("no answer in time")
    announced = response.headers.get("Content-Length", "")
    if announced.isdecimal() and size < int(announced):
        raise NoReply("the server hung up in the middle of its answer", again=True)
    return b"".join(parts)


def parsed(content: bytes) -> Reply:
    """The answer in a response's body. Raises NoReply where it has none."""
    try:
        data: Json = json.loads(content.decode("utf-8"))
    except UnicodeDecodeError:
        raise NoReply("its answer is not UTF-8") from None
    except (ValueError, RecursionError):
        raise NoReply("its answer is not JSON") from None
    try:
        choice = data["choices"][0]
        text = choice["message"]["content"]
    except (KeyError, IndexError, TypeError):
        raise NoReply("its answer has no choices[0].message.content") from None
    if isinstance(text, list):  # parts, of which some are text
        text = "".join(part["text"] for part in text if _is_text(part))
    if not isinstance(text, str):
        raise NoReply("its answer's content is no text")
    usage = data.get("usage")
    counted = usage if isinstance(usage, dict) else {}
    return Reply(
        text,
        choice.get("finish_reason") == "length",
        _count(counted.get("prompt_tokens")),
        _count(counted.get("completion_tokens")),
    )


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def _count(value: object) -> int:
    return value if type(value) is int and 0 <= value < 10**9 else 0
