"""Options of an engine, in vLLM's terms, and which of them are valid."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from bitmill_inference.violations import Violations


@dataclass(frozen=True)
class EngineOptions:
    """Options of an engine; None takes vLLM's default for the model and the device. Sizes as in `model.proto`."""

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

    def with_defaults(self, defaults: EngineOptions) -> EngineOptions:
        """Returns these options with every unset one taken from `defaults`."""
        unset = {f.name: getattr(defaults, f.name) for f in fields(self) if getattr(self, f.name) is None}
        return replace(self, **unset)

    def set_values(self) -> dict[str, int | float | bool]:
        """Returns the options that are set, by name."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}


def check_engine_options(options: EngineOptions, violations: Violations, prefix: str = "engine_options") -> None:
    """Notes every option that no engine would take."""
    for name, value in options.set_values().items():
        if isinstance(value, bool):
            continue
        if name == "gpu_memory_utilization":
            violations.range(f"{prefix}.{name}", value, 0 < value <= 1, "above 0 and at most 1")
        else:
            violations.range(f"{prefix}.{name}", value, value >= 1, "at least 1")
