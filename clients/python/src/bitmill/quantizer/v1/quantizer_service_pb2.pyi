import datetime

from bitmill.artifact.v1 import artifact_pb2 as _artifact_pb2
from bitmill.artifact.v1 import recipe_pb2 as _recipe_pb2
from bitmill.quantizer.v1 import quantization_job_pb2 as _quantization_job_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CreateQuantizationJobRequest(_message.Message):
    __slots__ = ("request_id", "spec")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    spec: _quantization_job_pb2.QuantizationSpec
    def __init__(self, request_id: _Optional[str] = ..., spec: _Optional[_Union[_quantization_job_pb2.QuantizationSpec, _Mapping]] = ...) -> None: ...

class CreateQuantizationJobResponse(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: _quantization_job_pb2.QuantizationJob
    def __init__(self, job: _Optional[_Union[_quantization_job_pb2.QuantizationJob, _Mapping]] = ...) -> None: ...

class PlanQuantizationRequest(_message.Message):
    __slots__ = ("spec",)
    SPEC_FIELD_NUMBER: _ClassVar[int]
    spec: _quantization_job_pb2.QuantizationSpec
    def __init__(self, spec: _Optional[_Union[_quantization_job_pb2.QuantizationSpec, _Mapping]] = ...) -> None: ...

class Problem(_message.Message):
    __slots__ = ("field", "reason", "description")
    FIELD_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    field: str
    reason: str
    description: str
    def __init__(self, field: _Optional[str] = ..., reason: _Optional[str] = ..., description: _Optional[str] = ...) -> None: ...

class SchemeSize(_message.Message):
    __slots__ = ("scheme", "artifact_size_bytes", "devices")
    SCHEME_FIELD_NUMBER: _ClassVar[int]
    ARTIFACT_SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    scheme: _recipe_pb2.Scheme
    artifact_size_bytes: int
    devices: _containers.RepeatedCompositeFieldContainer[_artifact_pb2.DeviceSupport]
    def __init__(self, scheme: _Optional[_Union[_recipe_pb2.Scheme, str]] = ..., artifact_size_bytes: _Optional[int] = ..., devices: _Optional[_Iterable[_Union[_artifact_pb2.DeviceSupport, _Mapping]]] = ...) -> None: ...

class PlanQuantizationResponse(_message.Message):
    __slots__ = ("problems", "spec", "architecture", "num_parameters", "num_quantized_parameters", "num_quantized_modules", "source_size_bytes", "estimated_artifact_size_bytes", "estimated_host_memory_bytes", "estimated_disk_bytes", "devices", "estimated_device_memory_bytes", "estimated_duration", "estimated_duration_basis", "scheme_sizes", "skipped_modules")
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    NUM_QUANTIZED_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    NUM_QUANTIZED_MODULES_FIELD_NUMBER: _ClassVar[int]
    SOURCE_SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ESTIMATED_ARTIFACT_SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ESTIMATED_HOST_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    ESTIMATED_DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    ESTIMATED_DEVICE_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    ESTIMATED_DURATION_FIELD_NUMBER: _ClassVar[int]
    ESTIMATED_DURATION_BASIS_FIELD_NUMBER: _ClassVar[int]
    SCHEME_SIZES_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_MODULES_FIELD_NUMBER: _ClassVar[int]
    problems: _containers.RepeatedCompositeFieldContainer[Problem]
    spec: _quantization_job_pb2.QuantizationSpec
    architecture: str
    num_parameters: int
    num_quantized_parameters: int
    num_quantized_modules: int
    source_size_bytes: int
    estimated_artifact_size_bytes: int
    estimated_host_memory_bytes: int
    estimated_disk_bytes: int
    devices: _containers.RepeatedCompositeFieldContainer[_artifact_pb2.DeviceSupport]
    estimated_device_memory_bytes: int
    estimated_duration: _duration_pb2.Duration
    estimated_duration_basis: str
    scheme_sizes: _containers.RepeatedCompositeFieldContainer[SchemeSize]
    skipped_modules: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, problems: _Optional[_Iterable[_Union[Problem, _Mapping]]] = ..., spec: _Optional[_Union[_quantization_job_pb2.QuantizationSpec, _Mapping]] = ..., architecture: _Optional[str] = ..., num_parameters: _Optional[int] = ..., num_quantized_parameters: _Optional[int] = ..., num_quantized_modules: _Optional[int] = ..., source_size_bytes: _Optional[int] = ..., estimated_artifact_size_bytes: _Optional[int] = ..., estimated_host_memory_bytes: _Optional[int] = ..., estimated_disk_bytes: _Optional[int] = ..., devices: _Optional[_Iterable[_Union[_artifact_pb2.DeviceSupport, _Mapping]]] = ..., estimated_device_memory_bytes: _Optional[int] = ..., estimated_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., estimated_duration_basis: _Optional[str] = ..., scheme_sizes: _Optional[_Iterable[_Union[SchemeSize, _Mapping]]] = ..., skipped_modules: _Optional[_Iterable[str]] = ...) -> None: ...

class GetQuantizationJobRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class GetQuantizationJobResponse(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: _quantization_job_pb2.QuantizationJob
    def __init__(self, job: _Optional[_Union[_quantization_job_pb2.QuantizationJob, _Mapping]] = ...) -> None: ...

class ListQuantizationJobsRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "states")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    states: _containers.RepeatedScalarFieldContainer[_quantization_job_pb2.JobState]
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., states: _Optional[_Iterable[_Union[_quantization_job_pb2.JobState, str]]] = ...) -> None: ...

class ListQuantizationJobsResponse(_message.Message):
    __slots__ = ("jobs", "next_page_token")
    JOBS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[_quantization_job_pb2.QuantizationJob]
    next_page_token: str
    def __init__(self, jobs: _Optional[_Iterable[_Union[_quantization_job_pb2.QuantizationJob, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class WatchQuantizationJobRequest(_message.Message):
    __slots__ = ("job_id", "after_sequence")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    after_sequence: int
    def __init__(self, job_id: _Optional[str] = ..., after_sequence: _Optional[int] = ...) -> None: ...

class WatchQuantizationJobResponse(_message.Message):
    __slots__ = ("event",)
    EVENT_FIELD_NUMBER: _ClassVar[int]
    event: _quantization_job_pb2.JobEvent
    def __init__(self, event: _Optional[_Union[_quantization_job_pb2.JobEvent, _Mapping]] = ...) -> None: ...

class CancelQuantizationJobRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class CancelQuantizationJobResponse(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: _quantization_job_pb2.QuantizationJob
    def __init__(self, job: _Optional[_Union[_quantization_job_pb2.QuantizationJob, _Mapping]] = ...) -> None: ...
