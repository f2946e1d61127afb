"""Which options of an engine are valid, which device has enough for them, and how they come and go as messages."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from bitmill.inference.v1 import model_pb2
from bitmill_common.artifact import Device
from bitmill_common.errors import FailedPreconditionError
from bitmill_inference.models.devices import ServerDevice, require_options
from bitmill_inference.models.engine_options import EngineOptions, check_engine_options, options_of
from bitmill_inference.requests.violations import Violations
from bitmill_inference.servicers import convert_model

ALL: dict[str, Any] = {
    "max_model_len": 2048,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 4096,
    "block_size": 16,
    "kv_cache_memory_bytes": 2**40,
    "gpu_memory_utilization": 0.5,
    "enforce_eager": False,
    "enable_prefix_caching": False,
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 3,
    "data_parallel_size": 4,
    "distributed_executor_backend": "mp",
    "dtype": "bfloat16",
    "kv_cache_dtype": "fp8",
    "max_num_queued_reqs": 100,
    "max_num_queued_tokens": 100_000,
    "min_batch_size": 8,
    "batch_timeout": 0.25,
    "scheduling_policy": "priority",
    "enable_chunked_prefill": True,
    "cpu_offload_gb": 1.5,
    "kv_offloading_size": 4.0,
    "enable_lora": True,
    "max_loras": 2,
    "max_lora_rank": 32,
    "max_cpu_loras": 4,
    "enable_sleep_mode": True,
    "tool_call_parser": "hermes",
    "reasoning_parser": "qwen3",
    "runner": "pooling",
    "convert": "embed",
    "hf_overrides": {"sliding_window": 4096, "rope": {"factor": 0.5, "layers": [1, 2.5, "x"]}, "on": True},
}


def reasons(options: EngineOptions) -> dict[str, str]:
    violations = Violations()
    check_engine_options(options, violations)
    return {violation.field.removeprefix("engine_options."): violation.reason for violation in violations.found}


def test_every_option_of_the_message_is_one_of_the_domain() -> None:
    """By the same name, and this file tests with all of them."""
    names = {descriptor.name for descriptor in model_pb2.EngineOptions.DESCRIPTOR.fields}
    assert names == {field.name for field in dataclasses.fields(EngineOptions)} == set(ALL)


def test_options_pass_through_messages_unchanged() -> None:
    """Also when they are false; whole numbers in overrides stay whole."""
    options = EngineOptions(**ALL)
    message = convert_model.engine_options_message(options)
    assert convert_model.engine_options(message) == options
    overrides = convert_model.engine_options(message).hf_overrides or {}
    assert type(overrides["sliding_window"]) is int


@pytest.mark.parametrize("values", [{}, {"dtype": "", "runner": "", "tool_call_parser": ""}])
def test_what_is_unset_is_none(values: dict[str, Any]) -> None:
    """Empty texts are unset."""
    assert convert_model.engine_options(model_pb2.EngineOptions(**values)) == EngineOptions()


def test_options_of_every_kind_at_once_are_valid() -> None:
    """None contradicts another."""
    assert reasons(EngineOptions(**ALL)) == {}


def test_everything_wrong_is_named_at_once() -> None:
    """Numbers out of range, words that there are not, pairs that contradict each other."""
    wrong = EngineOptions(
        max_model_len=0,
        max_num_queued_reqs=0,
        gpu_memory_utilization=1.5,
        kv_offloading_size=math.nan,
        cpu_offload_gb=-1,
        batch_timeout=61,
        min_batch_size=2,
        dtype="int3",
        kv_cache_dtype="fp4",
        scheduling_policy="lifo",
        distributed_executor_backend="threads",
        runner="draft",
        convert="anything",
        max_loras=2,
        max_lora_rank=7,
    )
    assert reasons(wrong) == {
        "max_model_len": "OUT_OF_RANGE",
        "max_num_queued_reqs": "OUT_OF_RANGE",
        "gpu_memory_utilization": "OUT_OF_RANGE",
        "kv_offloading_size": "OUT_OF_RANGE",
        "cpu_offload_gb": "OUT_OF_RANGE",
        "batch_timeout": "OUT_OF_RANGE",
        "dtype": "UNKNOWN_VALUE",
        "kv_cache_dtype": "UNKNOWN_VALUE",
        "scheduling_policy": "UNKNOWN_VALUE",
        "distributed_executor_backend": "UNKNOWN_VALUE",
        "runner": "UNKNOWN_VALUE",
        "convert": "UNKNOWN_VALUE",
        "max_lora_rank": "UNKNOWN_VALUE",
        "enable_lora": "OPTION_MISSING",
        "min_batch_size": "OPTION_CONFLICT",
    }


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"min_batch_size": 8}, {"batch_timeout": "OPTION_MISSING"}),
        ({"min_batch_size": 1}, {}),
        ({"batch_timeout": 1.0}, {"min_batch_size": "OPTION_MISSING"}),
        ({"min_batch_size": 8, "batch_timeout": 1.0, "max_num_seqs": 4}, {"min_batch_size": "OPTION_CONFLICT"}),
        ({"min_batch_size": 8, "batch_timeout": 1.0, "max_num_queued_reqs": 4}, {"min_batch_size": "OPTION_CONFLICT"}),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, {"max_num_seqs": "OPTION_CONFLICT"}),
        ({"max_cpu_loras": 4}, {"enable_lora": "OPTION_MISSING"}),
        ({"enable_lora": True, "max_loras": 4, "max_cpu_loras": 2}, {"max_loras": "OPTION_CONFLICT"}),
        ({"max_model_len": 64, "max_num_batched_tokens": 32}, {}),
        (
            {"max_model_len": 64, "max_num_batched_tokens": 32, "enable_chunked_prefill": False},
            {"max_num_batched_tokens": "OPTION_CONFLICT"},
        ),
        (
            {"distributed_executor_backend": "uni", "tensor_parallel_size": 2},
            {"distributed_executor_backend": "OPTION_CONFLICT"},
        ),
        ({"distributed_executor_backend": "uni", "data_parallel_size": 2}, {}),
        ({"runner": "generate", "convert": "embed"}, {"convert": "OPTION_CONFLICT"}),
    ],
)
def test_options_that_need_or_bound_each_other(options: dict[str, Any], expected: dict[str, str]) -> None:
    """The one to change is named."""
    assert reasons(EngineOptions(**options)) == expected


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        ({"auto_map": {"AutoModel": "evil--model"}}, "auto_map"),
        ({"architectures": ["EvilForCausalLM"]}, "architectures"),
        ({"trust_remote_code": True}, "trust_remote_code"),
        ({"_name_or_path": "/etc"}, "_name_or_path"),
        ({"text_config": {"auto_map": {}}}, "text_config.auto_map"),
        ({"parts": [{"fine": 1}, {"auto_map": {}}]}, "parts[1].auto_map"),
    ],
)
def test_overrides_that_say_which_code_runs_are_refused(overrides: dict[str, Any], path: str) -> None:
    """At whatever depth."""
    assert reasons(EngineOptions(hf_overrides=overrides)) == {f"hf_overrides.{path}": "OVERRIDE_REFUSED"}


def test_options_from_json_are_checked_by_name_and_type() -> None:
    """As a manifest has them."""
    violations = Violations()
    good = {"max_num_seqs": 4, "cpu_offload_gb": 1, "enforce_eager": True, "dtype": "auto", "hf_overrides": {"a": 1}}
    wrong = {"max_model_len": 4.5, "block_size": True, "enable_lora": 1, "kv_cache_dtype": 8, "max_batch": 3}
    assert options_of(good | wrong, violations, "engine_options") == EngineOptions(**good)
    assert {violation.field: violation.reason for violation in violations.found} == {
        "engine_options.max_model_len": "INVALID_TYPE",
        "engine_options.block_size": "INVALID_TYPE",
        "engine_options.enable_lora": "INVALID_TYPE",
        "engine_options.kv_cache_dtype": "INVALID_TYPE",
        "engine_options.max_batch": "UNKNOWN_OPTION",
    }


def test_more_devices_than_there_are_are_told_with_numbers() -> None:
    """All three sizes count; Ray finds devices elsewhere."""
    device = ServerDevice(Device.CUDA, 90, "H200", count=4)
    require_options(EngineOptions(tensor_parallel_size=2, data_parallel_size=2), device)
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "data_parallel_size": 2}
    with pytest.raises(FailedPreconditionError) as caught:
        require_options(EngineOptions(**sizes), device)
    assert caught.value.reason == "DEVICES_MISSING"
    assert (caught.value.metadata["needed"], caught.value.metadata["available"]) == ("8", "4")
    require_options(EngineOptions(**sizes, distributed_executor_backend="ray"), device)


@pytest.mark.parametrize("option", ["cpu_offload_gb", "kv_offloading_size"])
def test_there_is_nothing_to_offload_on_the_cpu(option: str) -> None:
    """vLLM refuses the one after a minute, and does nothing for the other."""
    with pytest.raises(FailedPreconditionError) as caught:
        require_options(EngineOptions(**{option: 1}), ServerDevice(Device.CPU))
    assert caught.value.reason == "OFFLOADING_UNSUPPORTED"
    require_options(EngineOptions(**{option: 1}), ServerDevice(Device.CUDA, 90))


def test_sleep_mode_needs_a_device_that_has_it() -> None:
    """The CPU has none."""
    with pytest.raises(FailedPreconditionError) as caught:
        require_options(EngineOptions(enable_sleep_mode=True), ServerDevice(Device.CPU))
    assert caught.value.reason == "SLEEP_MODE_UNSUPPORTED"
    require_options(EngineOptions(enable_sleep_mode=True), ServerDevice(Device.CUDA, 90, sleep_mode=True))
