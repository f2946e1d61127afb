"""Starts vLLM engines, one after the other, and finds out why one did not start."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import structlog
from vllm.config import StructuredOutputsConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.utils.import_utils import import_pynvml
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.coordinator import DPCoordinatorProc

from bitmill_common.artifact import Device
from bitmill_common.errors import BitmillError, FailedPreconditionError
from bitmill_inference.models.devices import ServerDevice
from bitmill_inference.models.engine_options import EngineOptions
from bitmill_inference.models.host_memory import host_available_bytes
from bitmill_inference.models.memory import (
    DEFAULT_CPU_KV_CACHE_BYTES,
    DeviceMemory,
    ServerMemory,
    gpu_memory_utilization,
)
from bitmill_inference.models.threads import in_thread
from bitmill_inference.ports import accept
from bitmill_inference.requests.violations import Violations
from bitmill_inference.vllm.chat import ChatParsers, check_parsers
from bitmill_inference.vllm.engine import VllmEngine
from bitmill_inference.vllm.pooling import supported_tasks
from bitmill_inference.vllm.process import FAILURES_VARIABLE, read_failure, run_coordinator
from bitmill_inference.vllm.structured import STRUCTURED_BACKEND

log = structlog.get_logger("bitmill.models")

# It loads no plugins, and would outlive a server that was killed.
DPCoordinatorProc.run_coordinator = staticmethod(run_coordinator)


class VllmEngineFactory:
    """An `EngineFactory`. Engines start one at a time: each measures the memory that is free while it starts.

    `directory`: for files that last as long as a start.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._starting = asyncio.Lock()

    def device(self) -> ServerDevice:
        """See `EngineFactory.device`."""
        if not current_platform.is_cuda():
            return ServerDevice(Device.CPU, count=len(os.sched_getaffinity(0)))
        capability = current_platform.get_device_capability()
        return ServerDevice(
            Device.CUDA,
            capability.major * 10 + capability.minor,
            str(current_platform.get_device_name()),
            count=current_platform.device_count(),
            sleep_mode=current_platform.is_sleep_mode_available() and current_platform.is_cumem_allocator_available(),
        )

    def memory(self) -> ServerMemory:
        """See `EngineFactory.memory`."""
        return ServerMemory(host_available_bytes(), _device_memory() if current_platform.is_cuda() else ())

    def check_options(self, options: EngineOptions, violations: Violations) -> None:
        """See `EngineFactory.check_options`."""
        check_parsers(options, violations)

    async def start(
        self, directory: Path, options: EngineOptions, check_memory: Callable[[ServerMemory], None] = accept
    ) -> VllmEngine:
        """See `EngineFactory.start`."""
        arguments = self._arguments(directory, options)
        async with self._starting:
            check_memory(await asyncio.to_thread(self.memory))
            with tempfile.NamedTemporaryFile(prefix="failures-", dir=self._directory) as failures:
                # Processes of the engine inherit the variable; `engine_process` reads it there.
                os.environ[FAILURES_VARIABLE] = failures.name
                try:
                    return await _engine(arguments, options)
                except BitmillError:
                    raise
                # vLLM raises whatever a library below it raises.
                except Exception as error:
                    await asyncio.to_thread(_check_context, arguments)
                    reason = read_failure(Path(failures.name)) or f"{type(error).__name__}: {error}"
                    raise FailedPreconditionError(
                        "ENGINE_START_FAILED", f"vLLM did not start on this model: {reason}", {"reason": reason}
                    ) from error
                finally:
                    del os.environ[FAILURES_VARIABLE]

    def _arguments(self, directory: Path, options: EngineOptions) -> AsyncEngineArgs:
        values = options.set_values()
        if current_platform.is_cpu():
            values.setdefault("kv_cache_memory_bytes", DEFAULT_CPU_KV_CACHE_BYTES)
        if current_platform.is_cuda():
            values["gpu_memory_utilization"] = gpu_memory_utilization(options)
        # An engine knows of reasoning, which its masks leave alone, and not of calls.
        values.pop("tool_call_parser", None)
        # The admission window is in front of the engine.
        for name in ("min_batch_size", "batch_timeout"):
            values.pop(name, None)
        return AsyncEngineArgs(
            model=str(directory),
            load_format="safetensors",
            trust_remote_code=False,
            # For the engine core's numbers; `VllmStats` turns off what they would cost in this process.
            disable_log_stats=False,
            structured_outputs_config=StructuredOutputsConfig(backend=STRUCTURED_BACKEND),
            **values,
        )


def _check_context(arguments: AsyncEngineArgs) -> None:
    """Raises `FailedPreconditionError` when a start failed because the model's context is shorter than was asked for.

    vLLM finds it before it starts a process, and says so among much else.
    """
    asked = arguments.max_model_len
    if asked is None:
        return
    try:
        context = dataclasses.replace(arguments, max_model_len=None).create_model_config().max_model_len
    except (OSError, ValueError):
        # The start failed for that reason then, which is told instead.
        return
    if asked > context:
        raise FailedPreconditionError(
            "MAX_MODEL_LEN_TOO_LARGE",
            f"engine_options.max_model_len is {asked}; the model's context has {context} tokens",
            {"max_model_len": str(asked), "context": str(context)},
        )


def _device_memory() -> tuple[DeviceMemory, ...]:
    """The memory of the GPUs that this process may use, asked without a context on them, which would take some of it.

    Empty where the driver does not tell.
    """
    pynvml = import_pynvml()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        log.warning("gpu_memory_unknown", error=str(error))
        return ()
    try:
        devices = []
        for index in range(current_platform.device_count()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(current_platform.device_id_to_physical_device_id(index))
            # The second version tells apart what the driver keeps for itself, which CUDA and vLLM do not count.
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
            devices.append(DeviceMemory(int(memory.total - memory.reserved), int(memory.free)))
        return tuple(devices)
    except pynvml.NVMLError as error:
        log.warning("gpu_memory_unknown", error=str(error))
        return ()
    finally:
        pynvml.nvmlShutdown()


async def _engine(arguments: AsyncEngineArgs, options: EngineOptions) -> VllmEngine:
    llm, processes = await _construct(arguments)
    try:
        parsers = ChatParsers(llm, options.tool_call_parser or "", options.reasoning_parser or "")
        return VllmEngine(llm, processes, await supported_tasks(llm), parsers)
    except BaseException:
        await in_thread(llm.shutdown)
        raise


async def _construct(arguments: AsyncEngineArgs) -> tuple[AsyncLLM, set[BaseProcess]]:
    """Constructs the engine in a thread, which takes up to minutes, and returns it with the processes that it began.

    A cancellation kills these.
    """
    before = set(multiprocessing.active_children())

    def begun() -> set[BaseProcess]:
        return set(multiprocessing.active_children()) - before

    def kill() -> None:
        for process in begun():
            process.kill()

    llm = await in_thread(AsyncLLM.from_engine_args, arguments, undo=_shut_down, hasten=kill)
    return llm, begun()


def _shut_down(llm: AsyncLLM) -> None:
    """Ends an engine whose processes were killed, which vLLM may complain of."""
    with contextlib.suppress(Exception):
        llm.shutdown()
