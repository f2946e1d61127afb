"""What stands between a job and the engine that it names: the server's hardware, and what the checkpoint is. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from bitmill_common.checkpoint import GGUF_SUFFIX, Checkpoint
from bitmill_common.errors import InvalidArgumentError
from bitmill_quantizer.plans.problems import Problem
from bitmill_quantizer.ports import Host
from bitmill_quantizer.recipes.engines import DEFAULT_ENGINE, ENGINES, UNSUPPORTED

FIELD = "spec.engine"


def device_problems(engine: str, host: Host) -> Iterator[Problem]:
    """Yields what this server's machine lacks for the engine."""
    if ENGINES[engine].needs_cuda and not host.has_cuda():
        yield Problem(
            "",
            "DEVICE_MISSING",
            f"the engine {engine} needs CUDA, and this server has no NVIDIA GPU",
            metadata={"engine": engine, "device": "cuda"},
        )


def checkpoint_problems(engine: str, checkpoint: Checkpoint) -> Iterator[Problem]:
    """Yields what of a checkpoint that the server takes is not for this engine."""
    traits = ENGINES[engine]
    if not traits.reads_gguf and any(file.path.endswith(GGUF_SUFFIX) for file in checkpoint.files):
        yield _unsupported(f"{engine} reads no GGUF files; {DEFAULT_ENGINE} does")
    if traits.architectures is not None and checkpoint.architecture not in traits.architectures:
        known = ", ".join(sorted(traits.architectures))
        yield _unsupported(f"{engine} does not do {checkpoint.architecture or '(none)'}; it does {known}")


def _unsupported(description: str) -> Problem:
    return Problem(FIELD, UNSUPPORTED, description, kind=InvalidArgumentError)
