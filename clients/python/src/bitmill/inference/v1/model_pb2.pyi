import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
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

class EngineOptions(_message.Message):
    __slots__ = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "kv_cache_memory_bytes", "gpu_memory_utilization", "enforce_eager", "enable_prefix_caching", "tensor_parallel_size", "pipeline_parallel_size")
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
    def __init__(self, max_model_len: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., block_size: _Optional[int] = ..., kv_cache_memory_bytes: _Optional[int] = ..., gpu_memory_utilization: _Optional[float] = ..., enforce_eager: _Optional[bool] = ..., enable_prefix_caching: _Optional[bool] = ..., tensor_parallel_size: _Optional[int] = ..., pipeline_parallel_size: _Optional[int] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "uri", "digest", "state", "phase", "error", "max_model_len", "quantization", "engine_options", "create_time", "serving_time")
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
    def __init__(self, name: _Optional[str] = ..., uri: _Optional[str] = ..., digest: _Optional[str] = ..., state: _Optional[_Union[ModelState, str]] = ..., phase: _Optional[_Union[LoadPhase, str]] = ..., error: _Optional[_Union[ModelError, _Mapping]] = ..., max_model_len: _Optional[int] = ..., quantization: _Optional[str] = ..., engine_options: _Optional[_Union[EngineOptions, _Mapping]] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., serving_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...
