import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ModelState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODEL_STATE_UNSPECIFIED: _ClassVar[ModelState]
    MODEL_STATE_LOADING: _ClassVar[ModelState]
    MODEL_STATE_SERVING: _ClassVar[ModelState]
    MODEL_STATE_DRAINING: _ClassVar[ModelState]
    MODEL_STATE_FAILED: _ClassVar[ModelState]
    MODEL_STATE_UNLOADED: _ClassVar[ModelState]
    MODEL_STATE_RESTARTING: _ClassVar[ModelState]
    MODEL_STATE_SLEEPING: _ClassVar[ModelState]

class LoadPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOAD_PHASE_UNSPECIFIED: _ClassVar[LoadPhase]
    LOAD_PHASE_RESOLVE: _ClassVar[LoadPhase]
    LOAD_PHASE_FETCH: _ClassVar[LoadPhase]
    LOAD_PHASE_VERIFY: _ClassVar[LoadPhase]
    LOAD_PHASE_START_ENGINE: _ClassVar[LoadPhase]
    LOAD_PHASE_WARM_UP: _ClassVar[LoadPhase]
MODEL_STATE_UNSPECIFIED: ModelState
MODEL_STATE_LOADING: ModelState
MODEL_STATE_SERVING: ModelState
MODEL_STATE_DRAINING: ModelState
MODEL_STATE_FAILED: ModelState
MODEL_STATE_UNLOADED: ModelState
MODEL_STATE_RESTARTING: ModelState
MODEL_STATE_SLEEPING: ModelState
LOAD_PHASE_UNSPECIFIED: LoadPhase
LOAD_PHASE_RESOLVE: LoadPhase
LOAD_PHASE_FETCH: LoadPhase
LOAD_PHASE_VERIFY: LoadPhase
LOAD_PHASE_START_ENGINE: LoadPhase
LOAD_PHASE_WARM_UP: LoadPhase

class ModelError(_message.Message):
    __slots__ = ("reason", "message", "metadata")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    metadata: _containers.ScalarMap[str, str]
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ..., metadata: _Optional[_Mapping[str, str]] = ...) -> None: ...

class LoadProgress(_message.Message):
    __slots__ = ("completed_bytes", "total_bytes")
    COMPLETED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    completed_bytes: int
    total_bytes: int
    def __init__(self, completed_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ...) -> None: ...

class EngineOptions(_message.Message):
    __slots__ = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "kv_cache_memory_bytes", "gpu_memory_utilization", "enforce_eager", "enable_prefix_caching", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "distributed_executor_backend", "dtype", "kv_cache_dtype", "max_num_queued_reqs", "max_num_queued_tokens", "min_batch_size", "batch_timeout", "scheduling_policy", "enable_chunked_prefill", "cpu_offload_gb", "kv_offloading_size", "enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras", "enable_sleep_mode", "tool_call_parser", "reasoning_parser", "runner", "convert", "hf_overrides")
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    GPU_MEMORY_UTILIZATION_FIELD_NUMBER: _ClassVar[int]
    ENFORCE_EAGER_FIELD_NUMBER: _ClassVar[int]
    ENABLE_PREFIX_CACHING_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    DISTRIBUTED_EXECUTOR_BACKEND_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_QUEUED_REQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    BATCH_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    SCHEDULING_POLICY_FIELD_NUMBER: _ClassVar[int]
    ENABLE_CHUNKED_PREFILL_FIELD_NUMBER: _ClassVar[int]
    CPU_OFFLOAD_GB_FIELD_NUMBER: _ClassVar[int]
    KV_OFFLOADING_SIZE_FIELD_NUMBER: _ClassVar[int]
    ENABLE_LORA_FIELD_NUMBER: _ClassVar[int]
    MAX_LORAS_FIELD_NUMBER: _ClassVar[int]
    MAX_LORA_RANK_FIELD_NUMBER: _ClassVar[int]
    MAX_CPU_LORAS_FIELD_NUMBER: _ClassVar[int]
    ENABLE_SLEEP_MODE_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_PARSER_FIELD_NUMBER: _ClassVar[int]
    REASONING_PARSER_FIELD_NUMBER: _ClassVar[int]
    RUNNER_FIELD_NUMBER: _ClassVar[int]
    CONVERT_FIELD_NUMBER: _ClassVar[int]
    HF_OVERRIDES_FIELD_NUMBER: _ClassVar[int]
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    kv_cache_memory_bytes: int
    gpu_memory_utilization: float
    enforce_eager: bool
    enable_prefix_caching: bool
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    distributed_executor_backend: str
    dtype: str
    kv_cache_dtype: str
    max_num_queued_reqs: int
    max_num_queued_tokens: int
    min_batch_size: int
    batch_timeout: _duration_pb2.Duration
    scheduling_policy: str
    enable_chunked_prefill: bool
    cpu_offload_gb: float
    kv_offloading_size: float
    enable_lora: bool
    max_loras: int
    max_lora_rank: int
    max_cpu_loras: int
    enable_sleep_mode: bool
    tool_call_parser: str
    reasoning_parser: str
    runner: str
    convert: str
    hf_overrides: _struct_pb2.Struct
    def __init__(self, max_model_len: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., block_size: _Optional[int] = ..., kv_cache_memory_bytes: _Optional[int] = ..., gpu_memory_utilization: _Optional[float] = ..., enforce_eager: _Optional[bool] = ..., enable_prefix_caching: _Optional[bool] = ..., tensor_parallel_size: _Optional[int] = ..., pipeline_parallel_size: _Optional[int] = ..., data_parallel_size: _Optional[int] = ..., distributed_executor_backend: _Optional[str] = ..., dtype: _Optional[str] = ..., kv_cache_dtype: _Optional[str] = ..., max_num_queued_reqs: _Optional[int] = ..., max_num_queued_tokens: _Optional[int] = ..., min_batch_size: _Optional[int] = ..., batch_timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., scheduling_policy: _Optional[str] = ..., enable_chunked_prefill: _Optional[bool] = ..., cpu_offload_gb: _Optional[float] = ..., kv_offloading_size: _Optional[float] = ..., enable_lora: _Optional[bool] = ..., max_loras: _Optional[int] = ..., max_lora_rank: _Optional[int] = ..., max_cpu_loras: _Optional[int] = ..., enable_sleep_mode: _Optional[bool] = ..., tool_call_parser: _Optional[str] = ..., reasoning_parser: _Optional[str] = ..., runner: _Optional[str] = ..., convert: _Optional[str] = ..., hf_overrides: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "uri", "digest", "rank", "running_calls", "load_time")
    NAME_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    RUNNING_CALLS_FIELD_NUMBER: _ClassVar[int]
    LOAD_TIME_FIELD_NUMBER: _ClassVar[int]
    name: str
    uri: str
    digest: str
    rank: int
    running_calls: int
    load_time: _timestamp_pb2.Timestamp
    def __init__(self, name: _Optional[str] = ..., uri: _Optional[str] = ..., digest: _Optional[str] = ..., rank: _Optional[int] = ..., running_calls: _Optional[int] = ..., load_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "uri", "digest", "state", "phase", "error", "max_model_len", "quantization", "engine_options", "create_time", "serving_time", "aliases", "load_progress", "supported_tasks", "adapters", "restarts", "restart_time")
    NAME_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    ENGINE_OPTIONS_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    SERVING_TIME_FIELD_NUMBER: _ClassVar[int]
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    LOAD_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    SUPPORTED_TASKS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    RESTART_TIME_FIELD_NUMBER: _ClassVar[int]
    name: str
    uri: str
    digest: str
    state: ModelState
    phase: LoadPhase
    error: ModelError
    max_model_len: int
    quantization: str
    engine_options: EngineOptions
    create_time: _timestamp_pb2.Timestamp
    serving_time: _timestamp_pb2.Timestamp
    aliases: _containers.RepeatedScalarFieldContainer[str]
    load_progress: LoadProgress
    supported_tasks: _containers.RepeatedScalarFieldContainer[str]
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    restarts: int
    restart_time: _timestamp_pb2.Timestamp
    def __init__(self, name: _Optional[str] = ..., uri: _Optional[str] = ..., digest: _Optional[str] = ..., state: _Optional[_Union[ModelState, str]] = ..., phase: _Optional[_Union[LoadPhase, str]] = ..., error: _Optional[_Union[ModelError, _Mapping]] = ..., max_model_len: _Optional[int] = ..., quantization: _Optional[str] = ..., engine_options: _Optional[_Union[EngineOptions, _Mapping]] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., serving_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., aliases: _Optional[_Iterable[str]] = ..., load_progress: _Optional[_Union[LoadProgress, _Mapping]] = ..., supported_tasks: _Optional[_Iterable[str]] = ..., adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., restarts: _Optional[int] = ..., restart_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class ModelLoad(_message.Message):
    __slots__ = ("model", "state", "running_requests", "waiting_requests", "kv_cache_usage", "prompt_tokens_per_second", "generation_tokens_per_second", "refused_calls", "max_num_seqs", "max_num_queued_reqs")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_USAGE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    GENERATION_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    REFUSED_CALLS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_QUEUED_REQS_FIELD_NUMBER: _ClassVar[int]
    model: str
    state: ModelState
    running_requests: int
    waiting_requests: int
    kv_cache_usage: float
    prompt_tokens_per_second: float
    generation_tokens_per_second: float
    refused_calls: int
    max_num_seqs: int
    max_num_queued_reqs: int
    def __init__(self, model: _Optional[str] = ..., state: _Optional[_Union[ModelState, str]] = ..., running_requests: _Optional[int] = ..., waiting_requests: _Optional[int] = ..., kv_cache_usage: _Optional[float] = ..., prompt_tokens_per_second: _Optional[float] = ..., generation_tokens_per_second: _Optional[float] = ..., refused_calls: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_num_queued_reqs: _Optional[int] = ...) -> None: ...
