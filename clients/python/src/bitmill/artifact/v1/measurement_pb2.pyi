import datetime

from bitmill.artifact.v1 import recipe_pb2 as _recipe_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CalibrationUse(_message.Message):
    __slots__ = ("num_samples", "num_tokens", "num_documents", "uncalibrated_modules")
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    UNCALIBRATED_MODULES_FIELD_NUMBER: _ClassVar[int]
    num_samples: int
    num_tokens: int
    num_documents: int
    uncalibrated_modules: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, num_samples: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_documents: _Optional[int] = ..., uncalibrated_modules: _Optional[_Iterable[str]] = ...) -> None: ...

class ModuleResult(_message.Message):
    __slots__ = ("name", "scheme", "group_size", "loss", "dampening_frac", "remark")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SCHEME_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    DAMPENING_FRAC_FIELD_NUMBER: _ClassVar[int]
    REMARK_FIELD_NUMBER: _ClassVar[int]
    name: str
    scheme: _recipe_pb2.Scheme
    group_size: int
    loss: float
    dampening_frac: float
    remark: str
    def __init__(self, name: _Optional[str] = ..., scheme: _Optional[_Union[_recipe_pb2.Scheme, str]] = ..., group_size: _Optional[int] = ..., loss: _Optional[float] = ..., dampening_frac: _Optional[float] = ..., remark: _Optional[str] = ...) -> None: ...

class Sensitivity(_message.Message):
    __slots__ = ("modules", "candidate", "kl_divergence", "size_bytes", "chosen")
    MODULES_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_FIELD_NUMBER: _ClassVar[int]
    KL_DIVERGENCE_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    modules: _containers.RepeatedScalarFieldContainer[str]
    candidate: _recipe_pb2.AdaptiveCandidate
    kl_divergence: float
    size_bytes: int
    chosen: bool
    def __init__(self, modules: _Optional[_Iterable[str]] = ..., candidate: _Optional[_Union[_recipe_pb2.AdaptiveCandidate, _Mapping]] = ..., kl_divergence: _Optional[float] = ..., size_bytes: _Optional[int] = ..., chosen: _Optional[bool] = ...) -> None: ...

class LayerLoss(_message.Message):
    __slots__ = ("layer", "relative_error")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    RELATIVE_ERROR_FIELD_NUMBER: _ClassVar[int]
    layer: str
    relative_error: float
    def __init__(self, layer: _Optional[str] = ..., relative_error: _Optional[float] = ...) -> None: ...

class PhaseCost(_message.Message):
    __slots__ = ("phase", "duration", "peak_memory_bytes", "peak_device_memory_bytes")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    DURATION_FIELD_NUMBER: _ClassVar[int]
    PEAK_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    PEAK_DEVICE_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    phase: str
    duration: _duration_pb2.Duration
    peak_memory_bytes: int
    peak_device_memory_bytes: int
    def __init__(self, phase: _Optional[str] = ..., duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., peak_memory_bytes: _Optional[int] = ..., peak_device_memory_bytes: _Optional[int] = ...) -> None: ...

class Verification(_message.Message):
    __slots__ = ("text", "num_tokens", "device", "versions", "skipped")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TEXT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    text: str
    num_tokens: int
    device: str
    versions: _containers.ScalarMap[str, str]
    skipped: str
    def __init__(self, text: _Optional[str] = ..., num_tokens: _Optional[int] = ..., device: _Optional[str] = ..., versions: _Optional[_Mapping[str, str]] = ..., skipped: _Optional[str] = ...) -> None: ...
