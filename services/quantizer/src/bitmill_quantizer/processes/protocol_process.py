"""Runs a program that speaks the engine protocol as a child, in its own environment and process group.

engines/README.md describes the protocol.
"""

from __future__ import annotations

import errno
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import structlog

from bitmill_common.errors import FailedPreconditionError, InternalError
from bitmill_common.json_fields import nullable, take_count, take_number
from bitmill_common.safetensors import require_unicode
from bitmill_quantizer.jobs.job import Progress
from bitmill_quantizer.ports import JobControl

PROTOCOL_VERSION = 2
MAX_EVENT_BYTES = 8 << 20
_POLL_S = 0.25
_TERM_GRACE_S = 2.0
# Unloading a large model takes a while; after its result an engine has nothing else left to do.
_EXIT_GRACE_S = 60.0
_LOG_TAIL_BYTES = 4000
_LOG_NAME = "engine.log"
# A virtual environment whose own interpreter is gone, or a file that is no program.
_NO_PROGRAM = (errno.ENOENT, errno.EACCES, errno.ENOEXEC)
# What the journal's columns hold.
_COUNT_BITS = 63
_MAX_UNIT_CHARACTERS = 16
# The server's environment holds store keys, which an engine has no use for.
_PASSED_VARIABLES = ("PATH", "HOME", "LANG", "TMPDIR", "TZ", "LD_LIBRARY_PATH", "XDG_CACHE_HOME")
_PASSED_PREFIXES = (
    "LC_",
    "OMP_",
    "MKL_",
    "CUDA_",
    "NVIDIA_",
    "TORCH_",
    "PYTORCH_",
    "BITMILL_ENGINE_",
    "GPTQMODEL_",
    "VLLM_",
)

log = structlog.get_logger("bitmill.engine")

Event = dict[str, Any]


class ProtocolProcess:
    """A program by its interpreter and module; `install_hint` says how to get it where it is missing."""

    def __init__(self, name: str, python: Path, module: str, install_hint: str) -> None:
        self.name = name
        self._python = python
        self._module = module
        self._install_hint = install_hint

    def require_installed(self) -> None:
        """Raises `FailedPreconditionError` ENGINE_NOT_INSTALLED, which says how to install it."""
        if not self._python.is_file():
            raise self._not_installed(f"there is no {self._python}")
        if not os.access(self._python, os.X_OK):
            raise self._not_installed(f"{self._python} may not be run")

    def _not_installed(self, cause: str) -> FailedPreconditionError:
        return FailedPreconditionError(
            "ENGINE_NOT_INSTALLED",
            f"the engine {self.name} is not installed: {cause}; {self._install_hint}",
            {"engine": self.name},
        )

    def run(self, request: Mapping[str, object], directory: Path, control: JobControl) -> Event:
        """Runs one request to its end and returns the result event.

        The request and, as `engine.log`, what the program prints outside the protocol go to `directory`. Raises
        `BitmillError` with the program's own reason when it refuses, `InternalError` ENGINE_CRASHED when it dies, and
        whatever `control.check` raises; in each case the work is ended first.
        """
        self.require_installed()
        operation = str(request["operation"])
        request_path = directory / f"{operation}.json"
        request_path.write_text(
            json.dumps({"protocol_version": PROTOCOL_VERSION, "parent_pid": os.getpid(), **request}), encoding="utf-8"
        )
        log_path = directory / _LOG_NAME
        with log_path.open("wb") as engine_log:
            process = self._start(request_path, engine_log)
        log.info("engine_started", engine=self.name, operation=operation, pid=process.pid)
        last: Event | None = None
        with _ended_with_its_group(process):
            for event in _events(process, control.check):
                if event["event"] == "progress":
                    with as_protocol_fault(self.name):
                        progress = _progress_of(event)
                    control.report(progress)
                else:
                    last = event
            _wait_for_exit(process, _EXIT_GRACE_S, control.check)
        log.info("engine_ended", engine=self.name, operation=operation, exit_status=process.returncode)
        return self._result(process.returncode, last, log_path)

    def _start(self, request_path: Path, engine_log: IO[bytes]) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                [self._python, "-m", self._module, request_path],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=engine_log,
                env=_environment(),
                cwd=request_path.parent,
                start_new_session=True,
            )
        except OSError as error:
            if error.errno not in _NO_PROGRAM:
                raise
            raise self._not_installed(f"{self._python} cannot be run: {error.strerror}") from error

    def _result(self, status: int, last: Event | None, log_path: Path) -> Event:
        if last is not None and last["event"] == "error":
            raise FailedPreconditionError(
                str(last.get("reason") or "ENGINE_FAILED"),
                str(last.get("message") or "the engine failed and did not say why"),
                _metadata_of(last),
            )
        if status == 0 and last is not None:
            return last
        metadata = {"engine": self.name}
        if status < 0:
            name = signal.Signals(-status).name
            how = f"was ended by {name}"
            metadata["signal"] = name
            if -status == signal.SIGKILL:
                how += ", as the kernel does when memory runs out"
        else:
            how = f"ended with status {status} and no result"
            metadata["exit_status"] = str(status)
        raise InternalError(
            "ENGINE_CRASHED", f"the engine {self.name} {how}. The end of its log:\n{_tail(log_path)}", metadata
        )


@contextmanager
def as_protocol_fault(name: str) -> Iterator[None]:
    """Takes an event whose fields are not as agreed for the program's fault: `InternalError` ENGINE_PROTOCOL."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        message = f"the engine {name} sent an event that the protocol does not allow: {error}"
        raise InternalError("ENGINE_PROTOCOL", message) from error


def _environment() -> dict[str, str]:
    passed = {
        name: value
        for name, value in os.environ.items()
        if name in _PASSED_VARIABLES or name.startswith(_PASSED_PREFIXES)
    }
    # Everything that an engine reads is on the disk; a hub that does not answer must not hold it up.
    return passed | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


def _events(process: subprocess.Popen[bytes], check: Callable[[], None]) -> Iterator[Event]:
    """Yields the events until no more can come, calling `check` a few times a second."""
    stdout = cast(IO[bytes], process.stdout)
    buffer = b""
    os.set_blocking(stdout.fileno(), False)
    with selectors.DefaultSelector() as selector:
        selector.register(stdout, selectors.EVENT_READ)
        while True:
            check()
            if not selector.select(_POLL_S):
                # A child of the engine's own may hold the pipe open for longer than the engine lives.
                if _has_exited(process):
                    break
                continue
            piece = os.read(stdout.fileno(), 1 << 16)
            if not piece:
                break
            *lines, buffer = (buffer + piece).split(b"\n")
            for line in lines:
                yield _parse_event(line)
            if len(buffer) > MAX_EVENT_BYTES:
                raise _protocol_error(f"sent a line of more than {MAX_EVENT_BYTES} bytes")
    if buffer:
        # A last line without its newline: the engine died while it wrote it.
        log.warning("engine_event_cut", num_bytes=len(buffer))


def _parse_event(line: bytes) -> Event:
    try:
        event = json.loads(line)
        require_unicode(event)
    except (ValueError, RecursionError):
        event = None
    if not isinstance(event, dict) or event.get("event") not in ("progress", "result", "error"):
        raise _protocol_error(f"sent a line that is no event: {line[:200]!r}")
    return event


def _progress_of(event: Event) -> Progress:
    def count(key: str) -> int:
        return nullable(event, key, lambda: take_count(event, key, bits=_COUNT_BITS)) or 0

    return Progress(
        completed=count("completed"),
        total=count("total"),
        unit=str(event.get("unit") or "")[:_MAX_UNIT_CHARACTERS],
        loss=nullable(event, "loss", lambda: take_number(event, "loss")),
    )


def _metadata_of(event: Event) -> dict[str, str]:
    metadata = event.get("metadata")
    return {key: str(value) for key, value in metadata.items()} if isinstance(metadata, dict) else {}


def _protocol_error(fault: str) -> InternalError:
    return InternalError("ENGINE_PROTOCOL", f"the engine {fault}")


def _wait_for_exit(process: subprocess.Popen[bytes], timeout_s: float, check: Callable[[], None]) -> bool:
    """Waits for the leader to exit without reaping it, so that its group's number cannot become another's."""
    deadline = time.monotonic() + timeout_s
    while not _has_exited(process):
        check()
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _has_exited(process: subprocess.Popen[bytes]) -> bool:
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


@contextmanager
def _ended_with_its_group(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Leaves no process of the group behind, whatever happens inside: SIGTERM first, SIGKILL two seconds later."""
    try:
        yield
    finally:
        if not _has_exited(process):
            os.killpg(process.pid, signal.SIGTERM)
            _wait_for_exit(process, _TERM_GRACE_S, lambda: None)
        # The leader is not reaped yet, so the group is still ours.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        cast(IO[bytes], process.stdout).close()


def _tail(path: Path) -> str:
    with path.open("rb") as reader:
        reader.seek(max(0, path.stat().st_size - _LOG_TAIL_BYTES))
        return reader.read().decode(errors="replace").strip() or "(empty)"
