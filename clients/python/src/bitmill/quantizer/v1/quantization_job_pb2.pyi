import datetime

from bitmill.artifact.v1 import recipe_pb2 as _recipe_pb2
from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JobState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    JOB_STATE_UNSPECIFIED: _ClassVar[JobState]
    JOB_STATE_QUEUED: _ClassVar[JobState]
    JOB_STATE_RUNNING: _ClassVar[JobState]
    JOB_STATE_SUCCEEDED: _ClassVar[JobState]
    JOB_STATE_FAILED: _ClassVar[JobState]
    JOB_STATE_CANCELLED: _ClassVar[JobState]

class JobPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    JOB_PHASE_UNSPECIFIED: _ClassVar[JobPhase]
    JOB_PHASE_RESOLVE: _ClassVar[JobPhase]
    JOB_PHASE_FETCH: _ClassVar[JobPhase]
    JOB_PHASE_PREFLIGHT: _ClassVar[JobPhase]
    JOB_PHASE_QUANTIZE: _ClassVar[JobPhase]
    JOB_PHASE_EVALUATE: _ClassVar[JobPhase]
    JOB_PHASE_SAVE: _ClassVar[JobPhase]
    JOB_PHASE_UPLOAD: _ClassVar[JobPhase]
    JOB_PHASE_PUBLISH: _ClassVar[JobPhase]
    JOB_PHASE_VERIFY: _ClassVar[JobPhase]
JOB_STATE_UNSPECIFIED: JobState
JOB_STATE_QUEUED: JobState
JOB_STATE_RUNNING: JobState
JOB_STATE_SUCCEEDED: JobState
JOB_STATE_FAILED: JobState
JOB_STATE_CANCELLED: JobState
JOB_PHASE_UNSPECIFIED: JobPhase
JOB_PHASE_RESOLVE: JobPhase
JOB_PHASE_FETCH: JobPhase
JOB_PHASE_PREFLIGHT: JobPhase
JOB_PHASE_QUANTIZE: JobPhase
JOB_PHASE_EVALUATE: JobPhase
JOB_PHASE_SAVE: JobPhase
JOB_PHASE_UPLOAD: JobPhase
JOB_PHASE_PUBLISH: JobPhase
JOB_PHASE_VERIFY: JobPhase

class QuantizationSpec(_message.Message):
    __slots__ = ("source_uri", "artifact_name", "recipe", "calibration", "evaluation", "engine_options", "engine")
    SOURCE_URI_FIELD_NUMBER: _ClassVar[int]
    ARTIFACT_NAME_FIELD_NUMBER: _ClassVar[int]
    RECIPE_FIELD_NUMBER: _ClassVar[int]
    CALIBRATION_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    ENGINE_OPTIONS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    source_uri: str
    artifact_name: str
    recipe: _recipe_pb2.Recipe
    calibration: _recipe_pb2.Calibration
    evaluation: EvaluationSpec
    engine_options: _struct_pb2.Struct
    engine: str
    def __init__(self, source_uri: _Optional[str] = ..., artifact_name: _Optional[str] = ..., recipe: _Optional[_Union[_recipe_pb2.Recipe, _Mapping]] = ..., calibration: _Optional[_Union[_recipe_pb2.Calibration, _Mapping]] = ..., evaluation: _Optional[_Union[EvaluationSpec, _Mapping]] = ..., engine_options: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., engine: _Optional[str] = ...) -> None: ...

class EvaluationSpec(_message.Message):
    __slots__ = ("num_tokens",)
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    def __init__(self, num_tokens: _Optional[int] = ...) -> None: ...

class JobProgress(_message.Message):
    __slots__ = ("completed", "total", "unit", "loss")
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    completed: int
    total: int
    unit: str
    loss: float
    def __init__(self, completed: _Optional[int] = ..., total: _Optional[int] = ..., unit: _Optional[str] = ..., loss: _Optional[float] = ...) -> None: ...

class JobError(_message.Message):
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

class QuantizationJob(_message.Message):
    __slots__ = ("job_id", "spec", "state", "phase", "progress", "error", "artifact_uri", "create_time", "start_time", "end_time")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ARTIFACT_URI_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    END_TIME_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    spec: QuantizationSpec
    state: JobState
    phase: JobPhase
    progress: JobProgress
    error: JobError
    artifact_uri: str
    create_time: _timestamp_pb2.Timestamp
    start_time: _timestamp_pb2.Timestamp
    end_time: _timestamp_pb2.Timestamp
    def __init__(self, job_id: _Optional[str] = ..., spec: _Optional[_Union[QuantizationSpec, _Mapping]] = ..., state: _Optional[_Union[JobState, str]] = ..., phase: _Optional[_Union[JobPhase, str]] = ..., progress: _Optional[_Union[JobProgress, _Mapping]] = ..., error: _Optional[_Union[JobError, _Mapping]] = ..., artifact_uri: _Optional[str] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., start_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., end_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class JobEvent(_message.Message):
    __slots__ = ("sequence", "time", "job")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    time: _timestamp_pb2.Timestamp
    job: QuantizationJob
    def __init__(self, sequence: _Optional[int] = ..., time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., job: _Optional[_Union[QuantizationJob, _Mapping]] = ...) -> None: ...
