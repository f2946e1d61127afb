"""Starts vLLM engines, one after the other, and finds out why one did not start."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import tempfile
from multiprocessing.process import BaseProcess
from pathlib import Path

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM

from bitmill_common.artifact import Device
from bitmill_common.errors import FailedPreconditionError
from bitmill_inference.devices import ServerDevice
from bitmill_inference.engine_options import EngineOptions
from bitmill_inference.engine_process import FAILURES_VARIABLE, read_failure
from bitmill_inference.vllm_engine import VllmEngine

DEFAULT_CPU_KV_CACHE_BYTES = 2 * 1024**3
# How often a cancelled start looks for processes that it has begun meanwhile.
KILL_INTERVAL_S = 0.2


class VllmEngineFactory:
    """An `EngineFactory`. Engines start one at a time: each measures the memory that is free while it starts."""

    def __init__(self, defaults: EngineOptions) -> None:
        self._defaults = defaults
        self._starting = asyncio.Lock()

    def device(self) -> ServerDevice:
        """See `EngineFactory.device`."""
        if not current_platform.is_cuda():
            return ServerDevice(Device.CPU)
        capability = current_platform.get_device_capability()
        return ServerDevice(
            Device.CUDA, capability.major * 10 + capability.minor, str(current_platform.get_device_name())
        )

    async def start(self, directory: Path, options: EngineOptions) -> VllmEngine:
        """See `EngineFactory.start`."""
        arguments = self._arguments(directory, options)
        async with self._starting:
            with tempfile.NamedTemporaryFile(prefix="bitmill-engine-failures-") as failures:
                # Processes of the engine inherit the variable; `engine_process` reads it there.
                os.environ[FAILURES_VARIABLE] = failures.name
                try:
                    return VllmEngine(*await _construct(arguments))
                # vLLM raises whatever a library below it raises.
                except Exception as error:
                    reason = read_failure(Path(failures.name)) or f"{type(error).__name__}: {error}"
                    raise FailedPreconditionError(
                        "ENGINE_START_FAILED", f"vLLM did not start on this model: {reason}", {"reason": reason}
                    ) from error
                finally:
                    del os.environ[FAILURES_VARIABLE]

    def _arguments(self, directory: Path, options: EngineOptions) -> AsyncEngineArgs:
        values = options.with_defaults(self._defaults).set_values()
        if current_platform.is_cpu():
            values.setdefault("kv_cache_memory_bytes", DEFAULT_CPU_KV_CACHE_BYTES)
        return AsyncEngineArgs(
            model=str(directory),
            load_format="safetensors",
            trust_remote_code=False,
            disable_log_stats=True,
            **values,
        )


async def _construct(arguments: AsyncEngineArgs) -> tuple[AsyncLLM, set[BaseProcess]]:
    """Constructs the engine in a thread, which takes up to minutes, and returns it with the processes that it began.

    A cancellation kills these.
    """
    before = set(multiprocessing.active_children())
    construction = asyncio.ensure_future(asyncio.to_thread(AsyncLLM.from_engine_args, arguments))
    try:
        llm = await asyncio.shield(construction)
    except asyncio.CancelledError:
        while not construction.done():
            _kill(set(multiprocessing.active_children()) - before)
            await asyncio.wait({construction}, timeout=KILL_INTERVAL_S)
        with contextlib.suppress(Exception):
            await asyncio.to_thread(construction.result().shutdown)
        raise
    return llm, set(multiprocessing.active_children()) - before


def _kill(processes: set[BaseProcess]) -> None:
    for process in processes:
        process.kill()
