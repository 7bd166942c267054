"""Chromium without a window, driven through its debugging pipe (descriptors 3 and 4), which needs no library."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One page of a browser with a profile of its own."""

    def __init__(self, profile: Path) -> None:
        self._answers, theirs_out = os.pipe()
        theirs_in, self._commands = os.pipe()
        # descriptors 3 and 4 may be in use here, so a shell moves ours to them
        words = [str(PROGRAM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                 "--remote-debugging-pipe", f"--user-data-dir={profile}", "--window-size=900,640", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", *words],
            pass_fds=(theirs_in, theirs_out), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL)
        os.close(theirs_in)
        os.close(theirs_out)
        self._read, self._number = b"", 0
        self.messages: list[str] = []  # that the page's scripts left on the console, faults included
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session: dict[str, str] = {}
        self._session = {"sessionId": self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        self.send("Runtime.enable")
        self.send("Log.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Sends a command of the DevTools protocol and returns its result."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": parameters, **getattr(self, "_session", {})}
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        end = time.monotonic() + 120
        while True:
            while b"\0" not in self._read:
                assert select.select([self._answers], [], [], max(0.0, end - time.monotonic()))[0], method
                block = os.read(self._answers, 1 << 20)
                assert block, "the browser has ended"
                self._read += block
            message, _, self._read = self._read.partition(b"\0")
            answer = json.loads(message)
            if answer.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
                self.messages.append(json.dumps(answer["params"]))
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def value(self, script: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited."""
        result = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, script: str, seconds: float = 60) -> None:
        """Waits until a JavaScript expression is true."""
        end = time.monotonic() + seconds
        while not self.value(script):
            assert time.monotonic() < end, f"{script} is never true"
            time.sleep(0.02)

    def key(self, key: str, code: int, modifiers: int = 0) -> None:
        """Presses a key. Modifiers: 2 is Ctrl."""
        for kind in ("rawKeyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code,
                      modifiers=modifiers)

    def click(self, element: str) -> None:
        """Clicks into the middle of the element with this id."""
        x, y = self.value(f"(r => [r.x + r.width / 2, r.y + r.height / 2])(document.getElementById('{element}')"
                          ".getBoundingClientRect())")
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def photograph(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)
