"""What bitmill adds inside vLLM's own processes, engine core and workers. vLLM calls `register` there as a plugin.

A process of an engine dies with the server that started it, even when that was killed outright: vLLM's engine core
would go on alone, holding its memory. Its log lines are JSON as the server's are, and what stops it is written to the
file that the server reads the reason of a failed start from. What vLLM gets wrong there is corrected: see
`vllm_cpu_lora`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from bitmill_common.logs import configure_logging

FAILURES_VARIABLE = "BITMILL_ENGINE_FAILURES"
LOG_LEVEL_VARIABLE = "VLLM_LOGGING_LEVEL"


def register() -> None:
    """Does nothing in the server's own process. vLLM may call it several times in one process."""
    parent = multiprocessing.parent_process()
    if parent is None or any(thread.name == "ParentWatch" for thread in threading.enumerate()):
        return
    configure_logging(os.environ.get(LOG_LEVEL_VARIABLE, "INFO"))
    if path := os.environ.get(FAILURES_VARIABLE):
        logging.getLogger().addHandler(_FailureHandler(Path(path)))
    _watch(parent)
    # Not before: it imports vLLM, which is there in its own processes alone.
    from bitmill_inference.vllm import cpu_lora as vllm_cpu_lora

    vllm_cpu_lora.apply()


def run_coordinator(*arguments: Any, **options: Any) -> None:
    """Runs vLLM's coordinator of data parallel engines, a process without plugins, so that it dies as they do."""
    if (parent := multiprocessing.parent_process()) is not None:
        _watch(parent)
    # Not before: it imports vLLM, which is there in its own processes alone.
    from vllm.v1.engine.coordinator import DPCoordinatorProc

    DPCoordinatorProc.run_coordinator(*arguments, **options)


def _watch(parent: BaseProcess) -> None:
    # The sentinel is a pipe that closes with the parent. PR_SET_PDEATHSIG would fire when the parent's starting thread
    # ends, and the server starts engines from threads.
    threading.Thread(target=_die_with, args=(parent.sentinel,), name="ParentWatch", daemon=True).start()


def _die_with(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


class _FailureHandler(logging.Handler):
    """Appends each logged exception to a file, one JSON object a line, for as long as the file is there."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.ERROR)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info is None or record.exc_info[1] is None:
            return
        error = record.exc_info[1]
        line = json.dumps({"type": type(error).__name__, "message": str(error)})
        # The server removes it once the engine has started.
        with contextlib.suppress(FileNotFoundError):
            # At once and at the end, whichever other process writes.
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND)
            try:
                os.write(descriptor, f"{line}\n".encode())
            finally:
                os.close(descriptor)


def read_failure(path: Path) -> str:
    """Returns the first failure written to `path`: the later ones follow from it. Empty when there is none."""
    lines = path.read_text().splitlines()
    if not lines:
        return ""
    failure = json.loads(lines[0])
    return f"{failure['type']}: {failure['message']}"
