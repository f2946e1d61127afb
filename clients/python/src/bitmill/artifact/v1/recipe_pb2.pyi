from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Scheme(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SCHEME_UNSPECIFIED: _ClassVar[Scheme]
    SCHEME_W4A16: _ClassVar[Scheme]
    SCHEME_W8A16: _ClassVar[Scheme]
    SCHEME_W8A8_INT8: _ClassVar[Scheme]
SCHEME_UNSPECIFIED: Scheme
SCHEME_W4A16: Scheme
SCHEME_W8A16: Scheme
SCHEME_W8A8_INT8: Scheme

class Recipe(_message.Message):
    __slots__ = ("scheme", "group_size", "symmetric", "ignore", "dampening_frac", "seed")
    SCHEME_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    SYMMETRIC_FIELD_NUMBER: _ClassVar[int]
    IGNORE_FIELD_NUMBER: _ClassVar[int]
    DAMPENING_FRAC_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    scheme: Scheme
    group_size: int
    symmetric: bool
    ignore: _containers.RepeatedScalarFieldContainer[str]
    dampening_frac: float
    seed: int
    def __init__(self, scheme: _Optional[_Union[Scheme, str]] = ..., group_size: _Optional[int] = ..., symmetric: _Optional[bool] = ..., ignore: _Optional[_Iterable[str]] = ..., dampening_frac: _Optional[float] = ..., seed: _Optional[int] = ...) -> None: ...

class Calibration(_message.Message):
    __slots__ = ("uri", "num_samples", "max_sequence_length")
    URI_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    uri: str
    num_samples: int
    max_sequence_length: int
    def __init__(self, uri: _Optional[str] = ..., num_samples: _Optional[int] = ..., max_sequence_length: _Optional[int] = ...) -> None: ...
