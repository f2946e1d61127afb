"""The calls of both services, and how a client makes each: deadline, retries, channel options.

One table for the sync and the async client; `requests.py` builds what they send.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from bitmill.artifact.v1 import artifact_service_pb2 as artifact_pb
from bitmill.errors import REQUEST_ID_KEY, RequestValueError
from bitmill.inference.v1 import inference_service_pb2 as inference_pb
from bitmill.inference.v1 import model_service_pb2 as model_pb
from bitmill.keywords import CallOptions, check
from bitmill.quantizer.v1 import quantizer_service_pb2 as quantizer_pb

R = TypeVar("R", bound=Message)
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

CALLER_ID_KEY = "x-caller-id"
# https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md: Header-Name
_KEY = re.compile(r"[0-9a-z_.-]+")

# The servers' own limit: room for a prompt of a million token ids.
MAX_MESSAGE_BYTES = 32 * 1024 * 1024

# Deadlines in seconds. Every answer that needs no bulk work comes within SHORT.
SHORT = 30.0
# The answer of a model: long outputs on a CPU.
GENERATION = 600.0
# Every byte of a large artifact is read, or a large model is loaded.
BULK = 3600.0


@dataclass(frozen=True)
class Method:
    """One call of a service: its default deadline, and whether it may be sent again."""

    service: ServiceDescriptor
    name: str
    timeout: float | None
    """Default deadline in seconds. None: none, for streams that end with what they follow."""
    retry: bool = False
    """Sent again after UNAVAILABLE: true only where a second time does no harm and hides no success."""

    @property
    def path(self) -> str:
        """The path that gRPC sends."""
        return f"/{self.service.full_name}/{self.name}"

    @property
    def response(self) -> type[Message]:
        """The message that the call answers."""
        return GetMessageClass(self.service.methods_by_name[self.name].output_type)

    def deadline(self, timeout: float | None, client_timeout: float | None) -> float | None:
        """Returns the call's own timeout, else the client's, else the default; None means no deadline.

        The client's is not for calls without a default: a watch ends with what it follows.
        """
        default = self.timeout if client_timeout is None or self.timeout is None else client_timeout
        chosen = default if timeout is None else timeout
        return None if chosen is None or math.isinf(chosen) else chosen


@dataclass(frozen=True)
class Sender:
    """What a client adds to each of its calls."""

    timeout: float | None
    caller_id: str
    metadata: tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True)
class Call(Generic[T]):
    """One call ready to be made, by the sync or the async client: what to send, and what the caller gets of it."""

    method: Method
    request: Message
    options: CallOptions
    answer: Callable[[Any], T]
    """Takes what the caller wants out of a response: of the only one, of each of a stream, of each page."""

    def __post_init__(self) -> None:
        """Raises TypeError for an option that no call takes."""
        check(CallOptions, self.options)

    def codec(self) -> tuple[str, Callable[[Any], bytes], Callable[[bytes], Any]]:
        """Returns the path, and how a request becomes bytes and bytes a response."""
        return self.method.path, type(self.request).SerializeToString, self.method.response.FromString

    def sending(self, sender: Sender) -> tuple[str, dict[str, Any]]:
        """Returns the request id, and the keywords that gRPC's callables take."""
        request_id = checked_request_id(self.options.get("request_id", ""))
        caller_id = self.options.get("caller_id") or sender.caller_id
        headers = {
            REQUEST_ID_KEY: request_id,
            **({CALLER_ID_KEY: checked_header("caller_id", caller_id)} if caller_id else {}),
            **{
                checked_key("trace_headers", key.lower()): checked_header(f"trace_headers[{key!r}]", value)
                for key, value in self.options.get("trace_headers", {}).items()
            },
        }
        return request_id, {
            "timeout": self.method.deadline(self.options.get("timeout"), sender.timeout),
            "metadata": (*headers.items(), *sender.metadata),
        }


def whole(response: R) -> R:
    """The answer of a call whose caller gets the response as it is."""
    return response


_QUANTIZER = quantizer_pb.DESCRIPTOR.services_by_name["QuantizerService"]
_ARTIFACT = artifact_pb.DESCRIPTOR.services_by_name["ArtifactService"]
_INFERENCE = inference_pb.DESCRIPTOR.services_by_name["InferenceService"]
_MODEL = model_pb.DESCRIPTOR.services_by_name["ModelService"]

# Safe to send again: the client always sends a request id, so the server knows the second one.
CREATE_JOB = Method(_QUANTIZER, "CreateQuantizationJob", SHORT, retry=True)
PLAN = Method(_QUANTIZER, "PlanQuantization", SHORT, retry=True)
GET_JOB = Method(_QUANTIZER, "GetQuantizationJob", SHORT, retry=True)
LIST_JOBS = Method(_QUANTIZER, "ListQuantizationJobs", SHORT, retry=True)
WATCH_JOB = Method(_QUANTIZER, "WatchQuantizationJob", None, retry=True)
CANCEL_JOB = Method(_QUANTIZER, "CancelQuantizationJob", SHORT, retry=True)

GET_ARTIFACT = Method(_ARTIFACT, "GetArtifact", SHORT, retry=True)
LIST_ARTIFACTS = Method(_ARTIFACT, "ListArtifacts", SHORT, retry=True)
VERIFY_ARTIFACT = Method(_ARTIFACT, "VerifyArtifact", BULK, retry=True)

# A model's work is not sent again: a full queue answers at once so that the caller can go elsewhere.
GENERATE = Method(_INFERENCE, "Generate", GENERATION)
GENERATE_UNARY = Method(_INFERENCE, "GenerateUnary", GENERATION)
CHAT = Method(_INFERENCE, "Chat", GENERATION)
CHAT_UNARY = Method(_INFERENCE, "ChatUnary", GENERATION)
EMBED = Method(_INFERENCE, "Embed", GENERATION)
SCORE = Method(_INFERENCE, "Score", GENERATION)
ABORT = Method(_INFERENCE, "Abort", SHORT, retry=True)
TOKENIZE = Method(_INFERENCE, "Tokenize", SHORT, retry=True)
DETOKENIZE = Method(_INFERENCE, "Detokenize", SHORT, retry=True)

LOAD_MODEL = Method(_MODEL, "LoadModel", BULK, retry=True)
# What removes something by name is not sent again: after a first one that worked the second would answer NOT_FOUND.
UNLOAD_MODEL = Method(_MODEL, "UnloadModel", GENERATION)
GET_MODEL = Method(_MODEL, "GetModel", SHORT, retry=True)
LIST_MODELS = Method(_MODEL, "ListModels", SHORT, retry=True)
WATCH_MODEL = Method(_MODEL, "WatchModel", None, retry=True)
SET_ALIAS = Method(_MODEL, "SetAlias", SHORT, retry=True)
DELETE_ALIAS = Method(_MODEL, "DeleteAlias", SHORT)
LOAD_ADAPTER = Method(_MODEL, "LoadAdapter", BULK, retry=True)
UNLOAD_ADAPTER = Method(_MODEL, "UnloadAdapter", GENERATION)
SLEEP_MODEL = Method(_MODEL, "SleepModel", GENERATION, retry=True)
WAKE_MODEL = Method(_MODEL, "WakeModel", GENERATION, retry=True)
GET_LOAD = Method(_MODEL, "GetLoad", SHORT, retry=True)

METHODS: tuple[Method, ...] = tuple(value for value in globals().values() if isinstance(value, Method))


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
    return checked_header("request_id", request_id) or uuid.uuid4().hex


def checked_header(name: str, value: str) -> str:
    """Returns a value of a call's metadata; RequestValueError naming it when gRPC cannot carry it."""
    if not (value.isascii() and value.isprintable()):
        raise RequestValueError(f"{name} must be printable ASCII, not {value!r}")
    return value


def checked_key(name: str, key: str) -> str:
    """Returns a key of a call's metadata; RequestValueError when gRPC cannot carry it, or takes it for bytes."""
    if not _KEY.fullmatch(key) or key.endswith("-bin"):
        raise RequestValueError(f"{name} has a key that no header has: {key!r}")
    return key


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
