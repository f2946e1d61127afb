"""What the processes of an engine say about why it did not start."""

from __future__ import annotations

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bitmill_inference.vllm.process import _FailureHandler, read_failure

WRITERS, FAILURES = 4, 50


def failed(cause: str) -> logging.LogRecord:
    error = RuntimeError(cause)
    return logging.LogRecord("vllm", logging.ERROR, "", 0, "failed", None, (RuntimeError, error, None))


def test_processes_that_fail_at_once_keep_each_others_words(tmp_path: Path) -> None:
    """As the workers of a model that is split do, whose words are as long as a traceback."""
    path = tmp_path / "failures"
    path.touch()

    def fail(writer: int) -> None:
        handler = _FailureHandler(path)
        for number in range(FAILURES):
            handler.emit(failed(f"{writer} {number} " + "x" * (100 * number)))

    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(fail, range(WRITERS)))
    said = [json.loads(line)["message"].split()[:2] for line in path.read_text().splitlines()]
    assert sorted(said) == sorted([str(writer), str(number)] for writer in range(WRITERS) for number in range(FAILURES))


def test_the_first_failure_is_told(tmp_path: Path) -> None:
    """The later ones follow from it. Once the engine has started, nobody listens."""
    path = tmp_path / "failures"
    _FailureHandler(path).emit(failed("nobody listens"))
    assert not path.exists()
    path.touch()
    assert read_failure(path) == ""
    for cause in ("no memory", "the worker has ended"):
        _FailureHandler(path).emit(failed(cause))
    assert read_failure(path) == "RuntimeError: no memory"
