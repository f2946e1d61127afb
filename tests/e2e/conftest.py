"""What the end-to-end tests share: real environments and real, tiny checkpoints."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.inference_process import InferenceProcess, outliving
from support.llmcompressor_engine import quantize_request, run_engine

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def engine_python() -> Path:
    """The interpreter of the llmcompressor engine's environment."""
    python = REPOSITORY / "services/quantizer/engines/llmcompressor/.venv/bin/python"
    assert python.exists(), f"there is no {python}: run make setup"
    return python


@pytest.fixture(scope="session")
def tiny_checkpoints(engine_python: Path) -> Path:
    """The directory of the tiny checkpoints, made once for each version of the script that makes them."""
    script = REPOSITORY / "tests/support/make_tiny_checkpoints.py"
    directory = REPOSITORY / "build/test-checkpoints" / hashlib.sha256(script.read_bytes()).hexdigest()[:12]
    subprocess.run([engine_python, script, directory], check=True, capture_output=True, timeout=120)
    return directory


@pytest.fixture(scope="session")
def tiny_checkpoint(tiny_checkpoints: Path) -> Path:
    """A two-layer Llama that ties its head to its embedding."""
    return tiny_checkpoints / "tied"


@pytest.fixture(scope="session")
def untied_checkpoint(tiny_checkpoints: Path) -> Path:
    """A two-layer Llama with a head of its own."""
    return tiny_checkpoints / "untied"


@pytest.fixture(scope="session")
def tiny_families(engine_python: Path) -> Path:
    """The directory of a tiny checkpoint for each architecture, made once for each version of the scripts."""
    support = REPOSITORY / "tests/support"
    scripts = ("make_tiny_families.py", "make_tiny_checkpoints.py", "make_tiny_gguf.py")
    digest = hashlib.sha256(b"".join((support / script).read_bytes() for script in scripts)).hexdigest()[:12]
    directory = REPOSITORY / "build/test-families" / digest
    subprocess.run([engine_python, support / scripts[0], directory], check=True, capture_output=True, timeout=280)
    return directory


@pytest.fixture(scope="session")
def tiny_w4a16(engine_python: Path, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint as a W4A16 model directory, made by the real engine."""
    directory = tmp_path_factory.mktemp("w4a16")
    run = run_engine(engine_python, quantize_request(tiny_checkpoint, directory / "model"), directory)
    assert run.exit_status == 0, run.stderr
    return directory / "model"


@pytest.fixture(scope="session")
def inference_python() -> Path:
    """The interpreter of the inference environment."""
    python = REPOSITORY / "services/inference/.venv/bin/python"
    assert python.exists(), f"there is no {python}: run make setup"
    return python


@pytest.fixture(scope="session")
def inference_server(
    inference_python: Path, tiny_checkpoints: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[InferenceProcess]:
    """A server with the tiny checkpoint loaded as "tiny". Others may be loaded from pytest's temporary directories."""
    root = tmp_path_factory.getbasetemp()
    flags = ("--metrics-address", "127.0.0.1:0", "--vllm-service-model", "tiny")
    cache = tmp_path_factory.mktemp("inference-cache")
    server = InferenceProcess(inference_python, [tiny_checkpoints, root], cache, flags)
    try:
        server.load("tiny", tiny_checkpoints / "tied")
        yield server
        processes = server.children()
    finally:
        server.terminate()
        status = server.wait()
    assert status == 0
    assert outliving(processes) == []
