"""A real HTTP server that speaks OpenAI's chat protocol, in a thread, with the faults that such servers have."""

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def reply(text, finish="stop"):
    """The body of an answer."""
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": finish}
    return {"choices": [choice], "usage": {"prompt_tokens": 11, "completion_tokens": 3}}


# faults that are no more than another body
SENT = {
    "garbage JSON": b'{"choices": [',
    "a list": b"[]",
    "empty choices": b'{"choices": []}',
    "null content": b'{"choices": [{"message": {"content": null}}]}',
    "huge": json.dumps(reply("yes " * 2**20)).encode(),
    "deep": b"[" * 100_000,
    "cut off": json.dumps(reply("I see no", "length")).encode(),
    "no verdict": json.dumps(reply("Yes, I think that it is fine.")).encode(),
}


class JudgeServer(ThreadingHTTPServer):
    """fault: what every request meets, by its name below; `asked` has all bodies, `headers` all headers."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, answer, fault=""):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer, self.fault = answer, fault
        self.asked = []
        self.headers = []
        self.at_once, self.most_at_once, self.lock = 0, 0, threading.Lock()
        self.closing = threading.Event()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, request, client_address):
        """A client that hung up is no news."""


class _Handler(BaseHTTPRequestHandler):
    server: JudgeServer

    def log_message(self, format, *args):
        pass

    def do_POST(self):
        server = self.server
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with server.lock:
            server.asked.append(json.loads(body) | {"path": self.path})
            server.headers.append(dict(self.headers))
            n = len(server.asked)
        self._answer(n, json.loads(body)["messages"][-1]["content"])

    def _answer(self, n, text):
        server, fault = self.server, self.server.fault
        good = json.dumps(reply(server.answer(text))).encode()
        if fault in SENT:
            return self._send(SENT[fault])
        if fault == "slow":
            server.closing.wait(30)
        elif fault == "a little slow":
            # counted before the answer goes out: a client may have asked again by then
            with server.lock:
                server.at_once += 1
                server.most_at_once = max(server.most_at_once, server.at_once)
            time.sleep(0.2)
            with server.lock:
                server.at_once -= 1
        elif fault == "429 then right" and n == 1:
            return self._send(b'{"error": "busy"}', 429, **{"Retry-After": "0"})
        elif fault == "two 503 then right" and n <= 2:
            return self._send(b"<html>down</html>", 503)
        elif fault == "500 for ever":
            return self._send(b"oops", 500)
        elif fault == "401":
            return self._send(f"wrong key {self.headers['Authorization']}".encode(), 401)
        elif fault == "redirect":
            return self._send(b"", 302, Location=f"{server.url}/elsewhere")
        elif fault == "no UTF-8":
            return self._send(good.replace(b"assistant", b"\xff\xfe"))
        elif fault == "hang-up":
            return self._send(good[:20], length=len(good))
        elif fault == "hang-up at once":
            return self.connection.close()
        elif fault == "drip":
            return self._drip(good)
        elif fault == "bad usage":
            body = reply(server.answer(text)) | {"usage": {"prompt_tokens": "many"}}
            return self._send(json.dumps(body).encode())
        elif fault == "parts":
            body = reply("")
            body["choices"][0]["message"]["content"] = [
                {"type": "text", "text": server.answer(text)},
                {"type": "image"},
            ]
            return self._send(json.dumps(body).encode())
        self._send(good)

    def _send(self, body, status=200, length=None, **headers):
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)

    def _drip(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        for i in range(len(body)):
            if self.server.closing.wait(0.1):
                return
            self.wfile.write(body[i : i + 1])


@contextmanager
def serving(answer, fault=""):
    """A server at a port of this machine, within the context."""
    server = JudgeServer(answer, fault)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()
