"""Starts both bitmill servers on free loopback ports and takes them down again, with everything they started."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
START_TIMEOUT_S = 120
STOP_TIMEOUT_S = 60


class ServerDiedError(RuntimeError):
    """The server ended, or said nothing in time, before it was serving."""


@contextlib.contextmanager
def server(module: str, python: Path, environment: Mapping[str, str], log_path: Path) -> Iterator[str]:
    """Runs `python -m module` and yields the address it serves on; its JSON log goes to `log_path`."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        [python, "-m", module],
        env={**os.environ, **environment},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    addresses: queue.Queue[str | None] = queue.Queue()
    reader = threading.Thread(target=_copy_log, args=(process, log_path, addresses), daemon=True)
    reader.start()
    try:
        try:
            address = addresses.get(timeout=START_TIMEOUT_S)
        except queue.Empty:
            raise ServerDiedError(f"{module} said nothing for {START_TIMEOUT_S} s; its log: {log_path}") from None
        if address is None:
            raise ServerDiedError(f"{module} ended with {process.wait()}; its log: {log_path}")
        yield address
    finally:
        _stop(process)
        reader.join(timeout=STOP_TIMEOUT_S)


def _copy_log(process: subprocess.Popen[bytes], log_path: Path, addresses: queue.Queue[str | None]) -> None:
    assert process.stderr is not None
    with log_path.open("wb") as log:
        for line in process.stderr:
            log.write(line)
            log.flush()
            if b'"server_started"' in line:
                addresses.put(json.loads(line)["address"])
    addresses.put(None)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def quantizer(*, source_root: Path, artifact_root: Path, work_dir: Path, log_path: Path) -> Iterator[str]:
    """Runs the quantizer over a file:// store and yields its address."""
    services = ROOT / "services"
    engine = services / "quantizer/engines/llmcompressor/.venv/bin/python"
    environment = {
        "BITMILL_QUANTIZER_ADDRESS": "127.0.0.1:0",
        "BITMILL_QUANTIZER_SOURCE_ROOTS": source_root.resolve().as_uri(),
        "BITMILL_QUANTIZER_ARTIFACT_ROOT": artifact_root.resolve().as_uri(),
        "BITMILL_QUANTIZER_WORK_DIR": str(work_dir),
        "BITMILL_QUANTIZER_LLMCOMPRESSOR_PYTHON": str(engine),
    }
    with server("bitmill_quantizer", services / "quantizer/.venv/bin/python", environment, log_path) as address:
        yield address


@contextlib.contextmanager
def inference(*, model_roots: list[Path], cache_dir: Path, log_path: Path) -> Iterator[str]:
    """Runs the inference service over directories of this host and yields its address."""
    environment = {
        "BITMILL_INFERENCE_ADDRESS": "127.0.0.1:0",
        "BITMILL_INFERENCE_MODEL_ROOTS": ",".join(root.resolve().as_uri() for root in model_roots),
        "BITMILL_INFERENCE_CACHE_DIR": str(cache_dir),
    }
    with server("bitmill_inference", ROOT / "services/inference/.venv/bin/python", environment, log_path) as address:
        yield address
