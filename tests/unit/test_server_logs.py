"""The servers' log lines: one JSON object each, with the bound ids, and never a frame's local variables."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from bitmill_common.logs import configure_logging


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def fail_with(api_key: str) -> None:
    prompt = f"the prompt of {api_key}"
    raise RuntimeError(f"a failure of {len(prompt)} characters")


def test_structlog_and_the_standard_library_write_the_same_json(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging()
    structlog.contextvars.bind_contextvars(request_id="r1")
    structlog.get_logger("ours").info("job_failed", job_id="j1")
    logging.getLogger("theirs").warning("%d files", 3)
    ours, theirs = lines(capsys)
    assert (ours["event"], ours["job_id"], ours["request_id"], ours["level"]) == ("job_failed", "j1", "r1", "info")
    assert (theirs["event"], theirs["logger"], theirs["request_id"]) == ("3 files", "theirs", "r1")


def test_a_level_leaves_out_what_is_below_it(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("WARNING")
    structlog.get_logger("ours").info("quiet")
    structlog.get_logger("ours").warning("loud")
    assert [line["event"] for line in lines(capsys)] == ["loud"]


def test_a_traceback_has_frames_and_no_local_variables(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging()
    try:
        fail_with("s3cr3t")
    except RuntimeError as error:
        structlog.get_logger("ours").error("call_failed", exc_info=error)
    text = capsys.readouterr().err
    assert "s3cr3t" not in text
    (exception,) = json.loads(text)["exception"]
    assert exception["exc_value"] == "a failure of 20 characters"
    assert exception["frames"][-1]["name"] == "fail_with"
