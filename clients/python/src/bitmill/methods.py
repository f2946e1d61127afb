"""The calls of both services, and how a client makes each: deadline, retries, channel options.

One table for the sync and the async client; `requests.py` builds what they send.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypedDict, TypeVar

from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message

from bitmill.artifact.v1 import artifact_service_pb2 as artifact_pb
from bitmill.errors import REQUEST_ID_KEY, RequestValueError
from bitmill.inference.v1 import inference_service_pb2 as inference_pb
from bitmill.inference.v1 import model_service_pb2 as model_pb
from bitmill.quantizer.v1 import quantizer_service_pb2 as quantizer_pb

Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

# The servers' own limit: room for a prompt of a million token ids.
MAX_MESSAGE_BYTES = 32 * 1024 * 1024

# Deadlines in seconds. Every answer that needs no bulk work comes within SHORT.
SHORT = 30.0
# The answer of a model: long outputs on a CPU.
GENERATION = 600.0
# Every byte of a large artifact is read, or a large model is loaded.
BULK = 3600.0


class CallOptions(TypedDict, total=False):
    """What every call takes."""

    timeout: float | None
    """Deadline in seconds. Unset or None: the client's, else the call's own default. `math.inf`: none."""
    request_id: str
    """Sent as x-request-id, the id under which the server logs the call: printable ASCII. Unset: a new one."""


@dataclass(frozen=True)
class Method(Generic[Q, R]):
    """One call of a service: what it takes and answers, its default deadline, and whether it may be sent again."""

    service: ServiceDescriptor
    name: str
    request: type[Q]
    response: type[R]
    timeout: float | None
    """Default deadline in seconds. None: none, for streams that end with what they follow."""
    retry: bool = False
    """Sent again after UNAVAILABLE: true only where a second time does no harm and hides nothing."""

    @property
    def path(self) -> str:
        """The path that gRPC sends."""
        return f"/{self.service.full_name}/{self.name}"

    def deadline(self, timeout: float | None, client_timeout: float | None) -> float | None:
        """Returns the call's own timeout, else the client's, else the default; None means no deadline.

        The client's is not for calls without a default: a watch ends with what it follows.
        """
        default = self.timeout if client_timeout is None or self.timeout is None else client_timeout
        chosen = default if timeout is None else timeout
        return None if chosen is None or math.isinf(chosen) else chosen


@dataclass(frozen=True)
class Call(Generic[T]):
    """One call ready to be made, by the sync or the async client: what to send, and what the caller gets of it."""

    method: Method[Any, Any]
    request: Message
    options: CallOptions
    answer: Callable[[Any], T]
    """Takes what the caller wants out of a response: of the only one, of each of a stream, of each page."""

    def sending(
        self, client_timeout: float | None, client_metadata: Sequence[tuple[str, str | bytes]]
    ) -> tuple[str, dict[str, Any]]:
        """Returns the request id, and the keywords that gRPC's callables take."""
        request_id = checked_request_id(self.options.get("request_id", ""))
        return request_id, {
            "timeout": self.method.deadline(self.options.get("timeout"), client_timeout),
            "metadata": ((REQUEST_ID_KEY, request_id), *client_metadata),
        }


def whole(response: R) -> R:
    """The answer of a call whose caller gets the response as it is."""
    return response


_QUANTIZER = quantizer_pb.DESCRIPTOR.services_by_name["QuantizerService"]
_ARTIFACT = artifact_pb.DESCRIPTOR.services_by_name["ArtifactService"]
_INFERENCE = inference_pb.DESCRIPTOR.services_by_name["InferenceService"]
_MODEL = model_pb.DESCRIPTOR.services_by_name["ModelService"]

# Safe to send again: the client always sends a request id, so the server knows the second one.
CREATE_JOB = Method(
    _QUANTIZER,
    "CreateQuantizationJob",
    quantizer_pb.CreateQuantizationJobRequest,
    quantizer_pb.CreateQuantizationJobResponse,
    SHORT,
    retry=True,
)
PLAN = Method(
    _QUANTIZER,
    "PlanQuantization",
    quantizer_pb.PlanQuantizationRequest,
    quantizer_pb.PlanQuantizationResponse,
    SHORT,
    retry=True,
)
GET_JOB = Method(
    _QUANTIZER,
    "GetQuantizationJob",
    quantizer_pb.GetQuantizationJobRequest,
    quantizer_pb.GetQuantizationJobResponse,
    SHORT,
    retry=True,
)
LIST_JOBS = Method(
    _QUANTIZER,
    "ListQuantizationJobs",
    quantizer_pb.ListQuantizationJobsRequest,
    quantizer_pb.ListQuantizationJobsResponse,
    SHORT,
    retry=True,
)
WATCH_JOB = Method(
    _QUANTIZER,
    "WatchQuantizationJob",
    quantizer_pb.WatchQuantizationJobRequest,
    quantizer_pb.WatchQuantizationJobResponse,
    None,
    retry=True,
)
CANCEL_JOB = Method(
    _QUANTIZER,
    "CancelQuantizationJob",
    quantizer_pb.CancelQuantizationJobRequest,
    quantizer_pb.CancelQuantizationJobResponse,
    SHORT,
    retry=True,
)
GET_ARTIFACT = Method(
    _ARTIFACT, "GetArtifact", artifact_pb.GetArtifactRequest, artifact_pb.GetArtifactResponse, SHORT, retry=True
)
LIST_ARTIFACTS = Method(
    _ARTIFACT, "ListArtifacts", artifact_pb.ListArtifactsRequest, artifact_pb.ListArtifactsResponse, SHORT, retry=True
)
VERIFY_ARTIFACT = Method(
    _ARTIFACT, "VerifyArtifact", artifact_pb.VerifyArtifactRequest, artifact_pb.VerifyArtifactResponse, BULK, retry=True
)
# Generation is not sent again: a full queue answers at once so that the caller can go elsewhere.
GENERATE = Method(_INFERENCE, "Generate", inference_pb.GenerateRequest, inference_pb.GenerateResponse, GENERATION)
GENERATE_UNARY = Method(
    _INFERENCE, "GenerateUnary", inference_pb.GenerateUnaryRequest, inference_pb.GenerateUnaryResponse, GENERATION
)
CHAT = Method(_INFERENCE, "Chat", inference_pb.ChatRequest, inference_pb.ChatResponse, GENERATION)
CHAT_UNARY = Method(_INFERENCE, "ChatUnary", inference_pb.ChatUnaryRequest, inference_pb.ChatUnaryResponse, GENERATION)
TOKENIZE = Method(
    _INFERENCE, "Tokenize", inference_pb.TokenizeRequest, inference_pb.TokenizeResponse, SHORT, retry=True
)
DETOKENIZE = Method(
    _INFERENCE, "Detokenize", inference_pb.DetokenizeRequest, inference_pb.DetokenizeResponse, SHORT, retry=True
)
LOAD_MODEL = Method(_MODEL, "LoadModel", model_pb.LoadModelRequest, model_pb.LoadModelResponse, BULK, retry=True)
# Not sent again: after a first one that worked the second would answer NOT_FOUND.
UNLOAD_MODEL = Method(_MODEL, "UnloadModel", model_pb.UnloadModelRequest, model_pb.UnloadModelResponse, GENERATION)
GET_MODEL = Method(_MODEL, "GetModel", model_pb.GetModelRequest, model_pb.GetModelResponse, SHORT, retry=True)
LIST_MODELS = Method(_MODEL, "ListModels", model_pb.ListModelsRequest, model_pb.ListModelsResponse, SHORT, retry=True)
WATCH_MODEL = Method(_MODEL, "WatchModel", model_pb.WatchModelRequest, model_pb.WatchModelResponse, None, retry=True)

METHODS: tuple[Method[Any, Any], ...] = tuple(value for value in globals().values() if isinstance(value, Method))


def service_config() -> str:
    """Returns gRPC's service config: retries after UNAVAILABLE for the calls that may be sent again."""
    return json.dumps(
        {
            "methodConfig": [
                {
                    "name": [
                        {"service": method.service.full_name, "method": method.name}
                        for method in METHODS
                        if method.retry
                    ],
                    "retryPolicy": {
                        "maxAttempts": 4,
                        "initialBackoff": "0.2s",
                        "maxBackoff": "2s",
                        "backoffMultiplier": 2,
                        "retryableStatusCodes": ["UNAVAILABLE"],
                    },
                }
            ],
            # A server that refuses most calls is not hit harder by retries.
            "retryThrottling": {"maxTokens": 10, "tokenRatio": 0.1},
        }
    )


def channel_options(extra: Sequence[tuple[str, str | int]] = ()) -> list[tuple[str, str | int]]:
    """Returns the options of a client's channel; `extra` comes last and wins."""
    return [
        ("grpc.service_config", service_config()),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        # A silent stream whose peer is gone ends after half a minute. The servers allow a ping every 10 s.
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
        # A server that restarts is found again within seconds; gRPC's own back-off grows to two minutes.
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 3_000),
        *extra,
    ]


def checked_request_id(request_id: str = "") -> str:
    """Returns the id to send with a call, a new one when none is given; RequestValueError when gRPC cannot carry it."""
    if not (request_id.isascii() and request_id.isprintable()):
        raise RequestValueError(f"request_id must be printable ASCII, not {request_id!r}")
    return request_id or uuid.uuid4().hex


def checked_address(address: str) -> str:
    """Returns a server's address; RequestValueError for an empty one and for a port that there is not.

    gRPC takes a port above 65535 modulo 65536, which may be another server's.
    """
    port = address.rpartition(":")[2]
    if not address or (port.isdecimal() and not 0 < int(port) < 1 << 16):
        raise RequestValueError(f"an address is host:port with a port from 1 to 65535, not {address!r}")
    return address


def documented_by(build: Callable[..., Call[Any]], method: F) -> F:
    """Gives a client's method the name, the documentation and the parameters of the function that builds its call."""
    signature = inspect.signature(build)
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    functools.update_wrapper(method, build)
    method.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[this, *signature.parameters.values()], return_annotation=inspect.Signature.empty
    )
    return method
