"""The quantizer server as a process of its own, as an operator runs it, on the fake engine."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from support.quantizing import Place

START_TIMEOUT_S = 60


class QuantizerProcess:
    """A running server: its address, its log so far, and ways to end it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.log: list[dict[str, Any]] = []
        self._arriving: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, args=(process.stderr,), daemon=True)
        self._reader.start()
        self.address = str(self.wait_for("server_started")["address"])

    def wait_for(self, event: str, timeout_s: float = START_TIMEOUT_S) -> dict[str, Any]:
        """Returns the next log line of an event."""
        while True:
            line = self._arriving.get(timeout=timeout_s)
            if line is None:
                raise AssertionError(f"the server ended before {event}: {self.log[-5:]}")
            if line.get("event") == event:
                return line

    def kill(self) -> None:
        """Ends it as a power cut would."""
        self.process.kill()
        self.process.wait()
        self._reader.join()

    def stop(self) -> int:
        """Ends it as an operator does, and returns its exit status."""
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(timeout=START_TIMEOUT_S)
        self._reader.join()
        return status

    def _read(self, stderr: IO[str]) -> None:
        with stderr:
            for text in stderr:
                line = json.loads(text) if text.startswith("{") else {"event": "", "text": text}
                self.log.append(line)
                self._arriving.put(line)
        self._arriving.put(None)


@contextmanager
def quantizer_process(place: Place, *held: str) -> Iterator[QuantizerProcess]:
    """Starts a server in a place; with `held` (phase, before or after, pipe) one that stops for ever in a phase."""
    held_quantizer = Path(__file__).with_name("held_quantizer.py")
    command = [str(held_quantizer), *held] if held else ["-m", "bitmill_quantizer"]
    flags = [
        f"--source-roots={place.sources.as_uri()}",
        f"--artifact-root={place.artifacts.as_uri()}",
        f"--work-dir={place.work}",
        f"--llmcompressor-python={place.engine_python}",
        f"--verifier-python={place.engine_python}",
        "--address=127.0.0.1:0",
    ]
    process = subprocess.Popen(
        [sys.executable, *command, *flags], stderr=subprocess.PIPE, text=True, env={**os.environ, "NO_COLOR": "1"}
    )
    try:
        yield QuantizerProcess(process)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
