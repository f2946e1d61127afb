"""Whether a model fits this server's memory: what it needs at least, from its headers alone, and what there is.

Only what certainly does not fit is refused: every number here is a lower bound of what vLLM takes. What comes on top,
as activations, compiled code and the weights' second form while they are packed, is left to vLLM to find out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bitmill_common.artifact import Device
from bitmill_common.checkpoint import Checkpoint
from bitmill_common.errors import ResourceExhaustedError
from bitmill_common.safetensors import DTYPE_BITS, TensorInfo
from bitmill_inference.models.engine_options import EngineOptions

GIB = 2**30

PROCESS_BYTES = 350 * 2**20
"""What each process of an engine takes on the host beside weights and KV cache, and shares with no other process.

Measured on vLLM 0.32 for the CPU as unique set size, with a model of 0.2 MB: 391 MiB for an engine core, 497 MiB for a
worker. This is less than either.
"""

DEFAULT_CPU_KV_CACHE_BYTES = 2 * GIB
"""The KV cache of a model on the CPU where nobody says."""

# vLLM's default, vllm/config/cache.py.
DEFAULT_GPU_MEMORY_UTILIZATION = 0.92
# As good as none; vLLM takes none below it.
_LEAST_UTILIZATION = 0.001

_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
# Weights of many checkpoints that vLLM leaves out: heads that predict further tokens, and what it computes itself.
_LEFT_OUT = ("rotary_emb.inv_freq", ".g_idx", ".weight_shape")


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one GPU; `total` without what its driver keeps."""

    total: int
    free: int


@dataclass(frozen=True)
class ServerMemory:
    """Bytes that are there: of the host, free or made free on demand, and of each GPU in vLLM's order."""

    host_available: int
    devices: tuple[DeviceMemory, ...] = ()


@dataclass(frozen=True)
class MemoryNeed:
    """What an engine takes at least, in bytes: `weights` of one copy of the model, `kv_cache` of one device."""

    weights: int
    kv_cache: int
    options: EngineOptions
    device: Device

    @property
    def copies(self) -> int:
        """Copies of the weights."""
        return self.options.data_parallel_size or 1

    @property
    def devices_per_copy(self) -> int:
        """Devices, or on the CPU workers, that share one copy."""
        return (self.options.tensor_parallel_size or 1) * (self.options.pipeline_parallel_size or 1)

    @property
    def processes(self) -> int:
        """Processes on the CPU, where each copy has an engine core and its workers are processes of their own."""
        return self.copies * (1 + self.devices_per_copy)


def gpu_memory_utilization(options: EngineOptions) -> float:
    """Returns the fraction of a GPU that has to be free for vLLM to start (`request_memory`, vllm/v1/worker/utils.py).

    It asks so also where the size of the KV cache is given and makes it take no notice of the fraction afterwards.
    """
    if options.gpu_memory_utilization is not None:
        return options.gpu_memory_utilization
    return _LEAST_UTILIZATION if options.kv_cache_memory_bytes else DEFAULT_GPU_MEMORY_UTILIZATION


def memory_need(checkpoint: Checkpoint, options: EngineOptions, device: Device) -> MemoryNeed:
    """Returns what an engine with these options takes at least for a checkpoint."""
    default_kv_cache = DEFAULT_CPU_KV_CACHE_BYTES if device is Device.CPU else 0
    kv_cache = options.kv_cache_memory_bytes or default_kv_cache
    return MemoryNeed(weight_bytes(checkpoint, options), kv_cache, options, device)


def weight_bytes(checkpoint: Checkpoint, options: EngineOptions) -> int:
    """Returns the bytes of the weights as vLLM holds them.

    Floating-point weights take two bytes each unless `dtype` is "float32": with "auto" vLLM makes bfloat16 or float16
    of float32. Quantized ones, and the scales beside them, stay as they are stored.
    """
    width = 32 if options.dtype in ("float32", "float") else 16
    bits = sum(
        tensor.num_elements * _bits(tensor, width, quantized=checkpoint.quantization is not None)
        for name, tensor in checkpoint.tensors.items()
        if _is_held(name, checkpoint.config, options)
    )
    return bits // 8


def _bits(tensor: TensorInfo, width: int, *, quantized: bool) -> int:
    stored = DTYPE_BITS[tensor.dtype]
    if tensor.dtype not in _FLOATS:
        return stored
    return min(stored, width) if quantized else width


def _is_held(name: str, config: Mapping[str, Any], options: EngineOptions) -> bool:
    if name.endswith(_LEFT_OUT) or "mtp." in name or name.startswith("mtp"):
        return False
    if name.endswith("lm_head.weight"):
        pooling = options.runner == "pooling" or options.convert in ("embed", "classify")
        return not (pooling or _text_config(config).get("tie_word_embeddings", config.get("tie_word_embeddings")))
    # Layers beyond the model's own predict further tokens, as DeepSeek's do.
    layers = _text_config({**config, **(options.hf_overrides or {})}).get("num_hidden_layers")
    _, found, rest = name.partition("model.layers.")
    index = rest.partition(".")[0]
    return not (found and index.isdigit() and isinstance(layers, int) and int(index) >= layers)


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def check_fits(need: MemoryNeed, memory: ServerMemory) -> None:
    """Raises `ResourceExhaustedError` INSUFFICIENT_MEMORY, with both numbers and their parts, when it does not fit."""
    # Other hosts have a part of it then.
    if need.options.distributed_executor_backend == "ray":
        return
    if need.device is Device.CPU:
        _check_host(need, memory)
    else:
        _check_devices(need, memory.devices)


def _check_host(need: MemoryNeed, memory: ServerMemory) -> None:
    workers = need.copies * need.devices_per_copy
    weights, kv_cache = need.weights * need.copies, need.kv_cache * workers
    overhead = PROCESS_BYTES * need.processes
    if weights + kv_cache + overhead <= memory.host_available:
        return
    raise _insufficient(
        "the memory of this host",
        needed=weights + kv_cache + overhead,
        available=memory.host_available,
        weights_bytes=weights,
        kv_cache_bytes=kv_cache,
        overhead_bytes=overhead,
    )


def _check_devices(need: MemoryNeed, devices: Sequence[DeviceMemory]) -> None:
    used = need.copies * need.devices_per_copy
    if len(devices) < used:
        return  # vLLM says so itself, or the memory of the devices is unknown.
    weights = math.floor(need.weights / need.devices_per_copy - (need.options.cpu_offload_gb or 0) * GIB)
    weights = max(weights, 0)
    utilization = gpu_memory_utilization(need.options)
    for index, device in enumerate(devices[:used]):
        parts = {
            "weights_bytes": weights,
            "kv_cache_bytes": need.kv_cache,
            "free_bytes": device.free,
            "total_bytes": device.total,
        }
        share = math.floor(device.total * utilization)
        available = device.free if need.kv_cache else min(device.free, share)
        if weights + need.kv_cache > available:
            raise _insufficient(f"GPU {index}", needed=weights + need.kv_cache, available=available, **parts)
        if share > device.free:
            where = f"GPU {index}, of which gpu_memory_utilization {utilization:g} has to be free"
            raise _insufficient(where, needed=share, available=device.free, **parts)


def _insufficient(where: str, *, needed: int, available: int, **parts: int) -> ResourceExhaustedError:
    listed = ", ".join(f"{name} {value}" for name, value in parts.items())
    message = (
        f"the model does not fit {where}: it needs at least {_gib(needed)}, of which {_gib(available)} are available "
        f"({listed})"
    )
    metadata = {"needed_bytes": needed, "available_bytes": available, **parts}
    return ResourceExhaustedError(
        "INSUFFICIENT_MEMORY", message, {name: str(value) for name, value in metadata.items()}
    )


def _gib(count: int) -> str:
    return f"{count / GIB:.2f} GiB"
