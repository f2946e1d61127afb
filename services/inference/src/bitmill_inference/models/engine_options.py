"""Options of an engine, in vLLM's terms, and which of them are valid."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from bitmill_inference.requests.violations import Violations

# Of the widest option in `model.proto`; JSON has whole numbers of any size.
_INTEGER_LIMIT = 2**64


@dataclass(frozen=True)
class EngineOptions:
    """Options of an engine; None takes vLLM's default for the model and the device. Sizes as in `model.proto`.

    `batch_timeout` is in seconds. `hf_overrides` holds plain JSON values.
    """

    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    enforce_eager: bool | None = None
    enable_prefix_caching: bool | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    data_parallel_size: int | None = None
    distributed_executor_backend: str | None = None
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    min_batch_size: int | None = None
    batch_timeout: float | None = None
    scheduling_policy: str | None = None
    enable_chunked_prefill: bool | None = None
    cpu_offload_gb: float | None = None
    kv_offloading_size: float | None = None
    enable_lora: bool | None = None
    max_loras: int | None = None
    max_lora_rank: int | None = None
    max_cpu_loras: int | None = None
    enable_sleep_mode: bool | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    runner: str | None = None
    convert: str | None = None
    hf_overrides: Mapping[str, Any] | None = None

    def with_defaults(self, defaults: EngineOptions) -> EngineOptions:
        """Returns these options with every unset one taken from `defaults`."""
        unset = {f.name: getattr(defaults, f.name) for f in fields(self) if getattr(self, f.name) is None}
        return replace(self, **unset)

    def set_values(self) -> dict[str, Any]:
        """Returns the options that are set, by name."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}

    @property
    def num_devices(self) -> int:
        """Devices that an engine with these options runs on."""
        sizes = (self.tensor_parallel_size, self.pipeline_parallel_size, self.data_parallel_size)
        return math.prod(size or 1 for size in sizes)


def options_of(values: Mapping[str, Any], violations: Violations, prefix: str) -> EngineOptions:
    """Options from plain JSON values. Notes every name that there is not and every value of another type."""
    options = {}
    for name, value in values.items():
        kinds = _KINDS.get(name)
        if kinds is None:
            violations.add(f"{prefix}.{name}", "there is no such option", "UNKNOWN_OPTION")
        elif not isinstance(value, kinds) or isinstance(value, bool) != (kinds is bool):
            expected = " or ".join(kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))
            violations.add(f"{prefix}.{name}", f"must be of type {expected}, got {value!r}", "INVALID_TYPE")
        elif isinstance(value, int) and abs(value) >= _INTEGER_LIMIT:
            violations.add(f"{prefix}.{name}", "has more than 64 bits", "OUT_OF_RANGE")
        else:
            options[name] = value
    return EngineOptions(**options)


def check_engine_options(options: EngineOptions, violations: Violations, prefix: str = "engine_options") -> None:
    """Notes every option that no engine would take, and every pair that contradicts itself.

    An option that has no effect without another one needs that one from the same place.
    """
    for name, value in options.set_values().items():
        path = f"{prefix}.{name}"
        if name in _CHOICES:
            if value not in _CHOICES[name]:
                choices = ", ".join(str(choice) for choice in _CHOICES[name])
                violations.add(path, f"must be one of {choices}, got {value!r}", "UNKNOWN_VALUE")
        elif name in _RANGES:
            least, most, expected = _RANGES[name]
            violations.range(path, value, least < value <= most, expected)
        elif _KINDS[name] is int:
            violations.range(path, value, value >= 1, "at least 1")
    _check_dependencies(options, violations, prefix)
    check_consistency(options, violations, prefix)
    _check_overrides(options.hf_overrides or {}, violations, f"{prefix}.hf_overrides")


def check_consistency(options: EngineOptions, violations: Violations, prefix: str = "engine_options") -> None:
    """Notes every option that is above another one that bounds it."""
    for lower, upper in _ORDERED:
        low, high = getattr(options, lower), getattr(options, upper)
        if low is not None and high is not None and low > high:
            violations.add(
                f"{prefix}.{lower}", f"must be at most {upper}, which is {high}, got {low}", "OPTION_CONFLICT"
            )
    is_chunked = options.enable_chunked_prefill is not False
    batched, length = options.max_num_batched_tokens, options.max_model_len
    if not is_chunked and batched is not None and length is not None and batched < length:
        description = (
            f"must be at least max_model_len, which is {length}, without enable_chunked_prefill, got {batched}"
        )
        violations.add(f"{prefix}.max_num_batched_tokens", description, "OPTION_CONFLICT")
    if options.distributed_executor_backend == "uni" and options.num_devices > (options.data_parallel_size or 1):
        violations.add(
            f"{prefix}.distributed_executor_backend",
            '"uni" runs one worker; tensor_parallel_size and pipeline_parallel_size need "mp" or "ray"',
            "OPTION_CONFLICT",
        )
    if options.runner == "generate" and options.convert in ("embed", "classify"):
        violations.add(f"{prefix}.convert", f'{options.convert!r} needs runner "pooling"', "OPTION_CONFLICT")


def _check_dependencies(options: EngineOptions, violations: Violations, prefix: str) -> None:
    if (options.min_batch_size or 1) > 1 and options.batch_timeout is None:
        violations.add(f"{prefix}.batch_timeout", "is required with min_batch_size above 1", "OPTION_MISSING")
    if options.batch_timeout is not None and (options.min_batch_size or 1) == 1:
        violations.add(f"{prefix}.min_batch_size", "batch_timeout needs one above 1", "OPTION_MISSING")
    for name in ("max_loras", "max_lora_rank", "max_cpu_loras"):
        if getattr(options, name) is not None and not options.enable_lora:
            violations.add(f"{prefix}.enable_lora", f"{name} needs it", "OPTION_MISSING")


def _check_overrides(value: object, violations: Violations, path: str) -> None:
    """Notes keys that name code, files or repositories, at whatever depth."""
    items: Iterable[tuple[str, object]] = ()
    if isinstance(value, Mapping):
        for key in value:
            if key.startswith("_") or key in _CODE_KEYS:
                violations.add(f"{path}.{key}", "may not be overridden: it says which code runs", "OVERRIDE_REFUSED")
        items = [(f"{path}.{key}", inner) for key, inner in value.items()]
    elif isinstance(value, list | tuple):
        items = [(f"{path}[{index}]", inner) for index, inner in enumerate(value)]
    for inner_path, inner in items:
        _check_overrides(inner, violations, inner_path)


_KINDS: dict[str, Any] = {
    f.name: {"int": int, "float": (int, float), "bool": bool, "str": str}.get(str(f.type).split(" ")[0], dict)
    for f in fields(EngineOptions)
}
# Above the first, at most the second.
_RANGES = {
    "gpu_memory_utilization": (0.0, 1.0, "above 0 and at most 1"),
    "batch_timeout": (0.0, 60.0, "above 0 and at most 60 s"),
    "cpu_offload_gb": (0.0, math.inf, "above 0"),
    "kv_offloading_size": (0.0, math.inf, "above 0"),
}
_CHOICES: dict[str, tuple[object, ...]] = {
    "distributed_executor_backend": ("uni", "mp", "ray"),
    "dtype": ("auto", "bfloat16", "float16", "float32"),
    "kv_cache_dtype": ("auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"),
    "scheduling_policy": ("fcfs", "priority"),
    "max_lora_rank": (1, 8, 16, 32, 64, 128, 256, 320, 512),
    "runner": ("auto", "generate", "pooling"),
    "convert": ("auto", "none", "embed", "classify"),
}
_ORDERED = (
    ("max_num_seqs", "max_num_batched_tokens"),
    ("max_loras", "max_cpu_loras"),
    ("min_batch_size", "max_num_seqs"),
    ("min_batch_size", "max_num_queued_reqs"),
)
_CODE_KEYS = frozenset(
    {
        "architectures",
        "auto_map",
        "custom_pipelines",
        "model_type",
        "name_or_path",
        "tokenizer_class",
        "trust_remote_code",
    }
)
