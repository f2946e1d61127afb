from bitmill.artifact.v1 import artifact_pb2 as _artifact_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FileFaultKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FILE_FAULT_KIND_UNSPECIFIED: _ClassVar[FileFaultKind]
    FILE_FAULT_KIND_MISSING: _ClassVar[FileFaultKind]
    FILE_FAULT_KIND_SIZE_MISMATCH: _ClassVar[FileFaultKind]
    FILE_FAULT_KIND_DIGEST_MISMATCH: _ClassVar[FileFaultKind]
    FILE_FAULT_KIND_UNEXPECTED: _ClassVar[FileFaultKind]
FILE_FAULT_KIND_UNSPECIFIED: FileFaultKind
FILE_FAULT_KIND_MISSING: FileFaultKind
FILE_FAULT_KIND_SIZE_MISMATCH: FileFaultKind
FILE_FAULT_KIND_DIGEST_MISMATCH: FileFaultKind
FILE_FAULT_KIND_UNEXPECTED: FileFaultKind

class GetArtifactRequest(_message.Message):
    __slots__ = ("uri",)
    URI_FIELD_NUMBER: _ClassVar[int]
    uri: str
    def __init__(self, uri: _Optional[str] = ...) -> None: ...

class GetArtifactResponse(_message.Message):
    __slots__ = ("artifact",)
    ARTIFACT_FIELD_NUMBER: _ClassVar[int]
    artifact: _artifact_pb2.Artifact
    def __init__(self, artifact: _Optional[_Union[_artifact_pb2.Artifact, _Mapping]] = ...) -> None: ...

class ListArtifactsRequest(_message.Message):
    __slots__ = ("name", "page_size", "page_token")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    name: str
    page_size: int
    page_token: str
    def __init__(self, name: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListArtifactsResponse(_message.Message):
    __slots__ = ("artifacts", "next_page_token")
    ARTIFACTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    artifacts: _containers.RepeatedCompositeFieldContainer[_artifact_pb2.Artifact]
    next_page_token: str
    def __init__(self, artifacts: _Optional[_Iterable[_Union[_artifact_pb2.Artifact, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class VerifyArtifactRequest(_message.Message):
    __slots__ = ("uri",)
    URI_FIELD_NUMBER: _ClassVar[int]
    uri: str
    def __init__(self, uri: _Optional[str] = ...) -> None: ...

class FileFault(_message.Message):
    __slots__ = ("path", "kind")
    PATH_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    path: str
    kind: FileFaultKind
    def __init__(self, path: _Optional[str] = ..., kind: _Optional[_Union[FileFaultKind, str]] = ...) -> None: ...

class VerifyArtifactResponse(_message.Message):
    __slots__ = ("intact", "faults", "verified_bytes")
    INTACT_FIELD_NUMBER: _ClassVar[int]
    FAULTS_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_BYTES_FIELD_NUMBER: _ClassVar[int]
    intact: bool
    faults: _containers.RepeatedCompositeFieldContainer[FileFault]
    verified_bytes: int
    def __init__(self, intact: _Optional[bool] = ..., faults: _Optional[_Iterable[_Union[FileFault, _Mapping]]] = ..., verified_bytes: _Optional[int] = ...) -> None: ...
