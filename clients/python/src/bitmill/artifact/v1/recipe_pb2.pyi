from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Scheme(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SCHEME_UNSPECIFIED: _ClassVar[Scheme]
    SCHEME_W4A16: _ClassVar[Scheme]
    SCHEME_W8A16: _ClassVar[Scheme]
    SCHEME_W8A8_INT8: _ClassVar[Scheme]
    SCHEME_FP8_DYNAMIC: _ClassVar[Scheme]
    SCHEME_FP8_STATIC: _ClassVar[Scheme]
    SCHEME_FP8_BLOCK: _ClassVar[Scheme]
    SCHEME_NVFP4A16: _ClassVar[Scheme]
    SCHEME_MXFP4A16: _ClassVar[Scheme]
    SCHEME_UNQUANTIZED: _ClassVar[Scheme]
    SCHEME_ADAPTIVE: _ClassVar[Scheme]

class Algorithm(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ALGORITHM_UNSPECIFIED: _ClassVar[Algorithm]
    ALGORITHM_GPTQ: _ClassVar[Algorithm]
    ALGORITHM_AWQ: _ClassVar[Algorithm]
    ALGORITHM_RTN: _ClassVar[Algorithm]

class ActivationOrder(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ACTIVATION_ORDER_UNSPECIFIED: _ClassVar[ActivationOrder]
    ACTIVATION_ORDER_NONE: _ClassVar[ActivationOrder]
    ACTIVATION_ORDER_STATIC: _ClassVar[ActivationOrder]
    ACTIVATION_ORDER_GROUP: _ClassVar[ActivationOrder]

class KvCacheScheme(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KV_CACHE_SCHEME_UNSPECIFIED: _ClassVar[KvCacheScheme]
    KV_CACHE_SCHEME_FP8: _ClassVar[KvCacheScheme]

class Packing(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PACKING_UNSPECIFIED: _ClassVar[Packing]
    PACKING_CONCATENATE: _ClassVar[Packing]
    PACKING_TRUNCATE: _ClassVar[Packing]
SCHEME_UNSPECIFIED: Scheme
SCHEME_W4A16: Scheme
SCHEME_W8A16: Scheme
SCHEME_W8A8_INT8: Scheme
SCHEME_FP8_DYNAMIC: Scheme
SCHEME_FP8_STATIC: Scheme
SCHEME_FP8_BLOCK: Scheme
SCHEME_NVFP4A16: Scheme
SCHEME_MXFP4A16: Scheme
SCHEME_UNQUANTIZED: Scheme
SCHEME_ADAPTIVE: Scheme
ALGORITHM_UNSPECIFIED: Algorithm
ALGORITHM_GPTQ: Algorithm
ALGORITHM_AWQ: Algorithm
ALGORITHM_RTN: Algorithm
ACTIVATION_ORDER_UNSPECIFIED: ActivationOrder
ACTIVATION_ORDER_NONE: ActivationOrder
ACTIVATION_ORDER_STATIC: ActivationOrder
ACTIVATION_ORDER_GROUP: ActivationOrder
KV_CACHE_SCHEME_UNSPECIFIED: KvCacheScheme
KV_CACHE_SCHEME_FP8: KvCacheScheme
PACKING_UNSPECIFIED: Packing
PACKING_CONCATENATE: Packing
PACKING_TRUNCATE: Packing

class ModuleRule(_message.Message):
    __slots__ = ("pattern", "scheme", "group_size", "symmetric", "algorithm")
    PATTERN_FIELD_NUMBER: _ClassVar[int]
    SCHEME_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    SYMMETRIC_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    pattern: str
    scheme: Scheme
    group_size: int
    symmetric: bool
    algorithm: Algorithm
    def __init__(self, pattern: _Optional[str] = ..., scheme: _Optional[_Union[Scheme, str]] = ..., group_size: _Optional[int] = ..., symmetric: _Optional[bool] = ..., algorithm: _Optional[_Union[Algorithm, str]] = ...) -> None: ...

class AdaptiveCandidate(_message.Message):
    __slots__ = ("scheme", "group_size")
    SCHEME_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    scheme: Scheme
    group_size: int
    def __init__(self, scheme: _Optional[_Union[Scheme, str]] = ..., group_size: _Optional[int] = ...) -> None: ...

class AdaptiveSearch(_message.Message):
    __slots__ = ("candidates", "max_size_bytes", "max_perplexity_ratio", "num_samples")
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    MAX_SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_PERPLEXITY_RATIO_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    candidates: _containers.RepeatedCompositeFieldContainer[AdaptiveCandidate]
    max_size_bytes: int
    max_perplexity_ratio: float
    num_samples: int
    def __init__(self, candidates: _Optional[_Iterable[_Union[AdaptiveCandidate, _Mapping]]] = ..., max_size_bytes: _Optional[int] = ..., max_perplexity_ratio: _Optional[float] = ..., num_samples: _Optional[int] = ...) -> None: ...

class Recipe(_message.Message):
    __slots__ = ("scheme", "group_size", "symmetric", "ignore", "dampening_frac", "seed", "algorithm", "activation_order", "rules", "kv_cache", "smoothing_strength", "adaptive")
    SCHEME_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    SYMMETRIC_FIELD_NUMBER: _ClassVar[int]
    IGNORE_FIELD_NUMBER: _ClassVar[int]
    DAMPENING_FRAC_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_ORDER_FIELD_NUMBER: _ClassVar[int]
    RULES_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_FIELD_NUMBER: _ClassVar[int]
    SMOOTHING_STRENGTH_FIELD_NUMBER: _ClassVar[int]
    ADAPTIVE_FIELD_NUMBER: _ClassVar[int]
    scheme: Scheme
    group_size: int
    symmetric: bool
    ignore: _containers.RepeatedScalarFieldContainer[str]
    dampening_frac: float
    seed: int
    algorithm: Algorithm
    activation_order: ActivationOrder
    rules: _containers.RepeatedCompositeFieldContainer[ModuleRule]
    kv_cache: KvCacheScheme
    smoothing_strength: float
    adaptive: AdaptiveSearch
    def __init__(self, scheme: _Optional[_Union[Scheme, str]] = ..., group_size: _Optional[int] = ..., symmetric: _Optional[bool] = ..., ignore: _Optional[_Iterable[str]] = ..., dampening_frac: _Optional[float] = ..., seed: _Optional[int] = ..., algorithm: _Optional[_Union[Algorithm, str]] = ..., activation_order: _Optional[_Union[ActivationOrder, str]] = ..., rules: _Optional[_Iterable[_Union[ModuleRule, _Mapping]]] = ..., kv_cache: _Optional[_Union[KvCacheScheme, str]] = ..., smoothing_strength: _Optional[float] = ..., adaptive: _Optional[_Union[AdaptiveSearch, _Mapping]] = ...) -> None: ...

class Calibration(_message.Message):
    __slots__ = ("uri", "num_samples", "max_sequence_length", "packing")
    URI_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    PACKING_FIELD_NUMBER: _ClassVar[int]
    uri: str
    num_samples: int
    max_sequence_length: int
    packing: Packing
    def __init__(self, uri: _Optional[str] = ..., num_samples: _Optional[int] = ..., max_sequence_length: _Optional[int] = ..., packing: _Optional[_Union[Packing, str]] = ...) -> None: ...
