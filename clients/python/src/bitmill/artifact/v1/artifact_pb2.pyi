import datetime

from bitmill.artifact.v1 import measurement_pb2 as _measurement_pb2
from bitmill.artifact.v1 import recipe_pb2 as _recipe_pb2
from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Device(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DEVICE_UNSPECIFIED: _ClassVar[Device]
    DEVICE_CPU: _ClassVar[Device]
    DEVICE_CUDA: _ClassVar[Device]
DEVICE_UNSPECIFIED: Device
DEVICE_CPU: Device
DEVICE_CUDA: Device

class DeviceSupport(_message.Message):
    __slots__ = ("device", "min_compute_capability")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MIN_COMPUTE_CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    device: Device
    min_compute_capability: int
    def __init__(self, device: _Optional[_Union[Device, str]] = ..., min_compute_capability: _Optional[int] = ...) -> None: ...

class ArtifactFile(_message.Message):
    __slots__ = ("path", "size_bytes", "sha256")
    PATH_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    path: str
    size_bytes: int
    sha256: str
    def __init__(self, path: _Optional[str] = ..., size_bytes: _Optional[int] = ..., sha256: _Optional[str] = ...) -> None: ...

class Evaluation(_message.Message):
    __slots__ = ("source_perplexity", "artifact_perplexity", "mean_kl_divergence", "num_tokens", "p99_kl_divergence", "top1_agreement", "layer_losses")
    SOURCE_PERPLEXITY_FIELD_NUMBER: _ClassVar[int]
    ARTIFACT_PERPLEXITY_FIELD_NUMBER: _ClassVar[int]
    MEAN_KL_DIVERGENCE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    P99_KL_DIVERGENCE_FIELD_NUMBER: _ClassVar[int]
    TOP1_AGREEMENT_FIELD_NUMBER: _ClassVar[int]
    LAYER_LOSSES_FIELD_NUMBER: _ClassVar[int]
    source_perplexity: float
    artifact_perplexity: float
    mean_kl_divergence: float
    num_tokens: int
    p99_kl_divergence: float
    top1_agreement: float
    layer_losses: _containers.RepeatedCompositeFieldContainer[_measurement_pb2.LayerLoss]
    def __init__(self, source_perplexity: _Optional[float] = ..., artifact_perplexity: _Optional[float] = ..., mean_kl_divergence: _Optional[float] = ..., num_tokens: _Optional[int] = ..., p99_kl_divergence: _Optional[float] = ..., top1_agreement: _Optional[float] = ..., layer_losses: _Optional[_Iterable[_Union[_measurement_pb2.LayerLoss, _Mapping]]] = ...) -> None: ...

class Artifact(_message.Message):
    __slots__ = ("name", "digest", "uri", "size_bytes", "files", "source_uri", "source_digest", "source_size_bytes", "recipe", "calibration", "calibration_digest", "devices", "evaluation", "engine", "versions", "job_id", "create_time", "engine_options", "calibration_use", "modules", "sensitivities", "phase_costs", "verification", "format")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    SOURCE_URI_FIELD_NUMBER: _ClassVar[int]
    SOURCE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SOURCE_SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECIPE_FIELD_NUMBER: _ClassVar[int]
    CALIBRATION_FIELD_NUMBER: _ClassVar[int]
    CALIBRATION_DIGEST_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    ENGINE_OPTIONS_FIELD_NUMBER: _ClassVar[int]
    CALIBRATION_USE_FIELD_NUMBER: _ClassVar[int]
    MODULES_FIELD_NUMBER: _ClassVar[int]
    SENSITIVITIES_FIELD_NUMBER: _ClassVar[int]
    PHASE_COSTS_FIELD_NUMBER: _ClassVar[int]
    VERIFICATION_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    uri: str
    size_bytes: int
    files: _containers.RepeatedCompositeFieldContainer[ArtifactFile]
    source_uri: str
    source_digest: str
    source_size_bytes: int
    recipe: _recipe_pb2.Recipe
    calibration: _recipe_pb2.Calibration
    calibration_digest: str
    devices: _containers.RepeatedCompositeFieldContainer[DeviceSupport]
    evaluation: Evaluation
    engine: str
    versions: _containers.ScalarMap[str, str]
    job_id: str
    create_time: _timestamp_pb2.Timestamp
    engine_options: _struct_pb2.Struct
    calibration_use: _measurement_pb2.CalibrationUse
    modules: _containers.RepeatedCompositeFieldContainer[_measurement_pb2.ModuleResult]
    sensitivities: _containers.RepeatedCompositeFieldContainer[_measurement_pb2.Sensitivity]
    phase_costs: _containers.RepeatedCompositeFieldContainer[_measurement_pb2.PhaseCost]
    verification: _measurement_pb2.Verification
    format: str
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., uri: _Optional[str] = ..., size_bytes: _Optional[int] = ..., files: _Optional[_Iterable[_Union[ArtifactFile, _Mapping]]] = ..., source_uri: _Optional[str] = ..., source_digest: _Optional[str] = ..., source_size_bytes: _Optional[int] = ..., recipe: _Optional[_Union[_recipe_pb2.Recipe, _Mapping]] = ..., calibration: _Optional[_Union[_recipe_pb2.Calibration, _Mapping]] = ..., calibration_digest: _Optional[str] = ..., devices: _Optional[_Iterable[_Union[DeviceSupport, _Mapping]]] = ..., evaluation: _Optional[_Union[Evaluation, _Mapping]] = ..., engine: _Optional[str] = ..., versions: _Optional[_Mapping[str, str]] = ..., job_id: _Optional[str] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., engine_options: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., calibration_use: _Optional[_Union[_measurement_pb2.CalibrationUse, _Mapping]] = ..., modules: _Optional[_Iterable[_Union[_measurement_pb2.ModuleResult, _Mapping]]] = ..., sensitivities: _Optional[_Iterable[_Union[_measurement_pb2.Sensitivity, _Mapping]]] = ..., phase_costs: _Optional[_Iterable[_Union[_measurement_pb2.PhaseCost, _Mapping]]] = ..., verification: _Optional[_Union[_measurement_pb2.Verification, _Mapping]] = ..., format: _Optional[str] = ...) -> None: ...
