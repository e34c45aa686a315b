"""A headless Chromium, driven through its DevTools protocol over a pair of pipes: no port, no client library."""

import json
import os
import shutil
import subprocess

CHROMIUM = next(
    (p for name in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(name))),
    None,
)


class Browser:
    """One page. `with Browser(folder) as page:`; folder is for its profile."""

    def __init__(self, folder):
        assert CHROMIUM is not None
        answers, browser_out = os.pipe()
        browser_in, commands = os.pipe()
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        command = [
            *(
                CHROMIUM,
                "--headless",
                "--remote-debugging-pipe",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                *sandbox,
            ),
            *(
                f"--user-data-dir={folder}",
                "--no-first-run",
                "--window-size=1400,1000",
                "about:blank",
            ),
        ]
        # Chromium reads commands from descriptor 3 and answers on 4.
        wired = f'exec 3<&{browser_in} 4>&{browser_out}; exec "$@"'
        self.process = subprocess.Popen(
            ["bash", "-c", wired, "-", *command],
            pass_fds=(browser_in, browser_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(browser_in)
        os.close(browser_out)
        self.read, self.write = os.fdopen(answers, "rb"), os.fdopen(commands, "wb")
        self.sent, self.buffer = 0, b""
        self.events = []
        (target,) = [
            t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"
        ]
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    session: str | None = None

    def _message(self):
        while b"\0" not in self.buffer:
            chunk = os.read(self.read.fileno(), 1 << 20)
            assert chunk, "chromium went away"
            self.buffer += chunk
        first, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(first)

    def call(self, method, **params):
        self.sent += 1
        request = {"id": self.sent, "method": method, "params": params}
        self.write.write(
            json.dumps(request | ({"sessionId": self.session} if self.session else {})).encode()
            + b"\0"
        )
        self.write.flush()
        while True:
            message = self._message()
            if message.get("id") == self.sent:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    def js(self, code):
        """The value of an expression; a promise is waited for. Raises AssertionError where it throws."""
        found = self.call(
            "Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def open(self, url):
        self.call("Page.navigate", url="about:blank")
        self.events.clear()
        self.call("Page.navigate", url=url)
        self.js(
            """new Promise((done) => {
                const count = () => document.getElementById("count")?.textContent ?? "loading";
                const look = () => (/loading/.test(count()) ? setTimeout(look, 5) : done());
                look();
            })"""
        )

    def problems(self):
        """Errors on the page, and every address that it requested beside its own and data."""
        found = []
        for event in self.events:
            params = event.get("params", {})
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
                found.append(params["entry"]["text"])
            elif event["method"] == "Network.requestWillBeSent":
                url = params["request"]["url"]
                if not url.startswith(("file:", "data:", "about:", "blob:")):
                    found.append(f"requested {url}")
        return found

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.read.close()
        self.write.close()
