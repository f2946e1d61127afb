"""Between the messages about models and the domain."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from google.protobuf import json_format
from google.protobuf.timestamp_pb2 import Timestamp

from bitmill.inference.v1 import model_pb2, model_service_pb2
from bitmill_common.errors import BitmillError, FieldViolation, InvalidArgumentError
from bitmill_common.structs import struct_values
from bitmill_inference.models.engine_options import EngineOptions
from bitmill_inference.models.model import Adapter, LoadPhase, Model, ModelLoad, ModelState
from bitmill_inference.models.preload import ModelRequest

DEFAULT_PAGE_SIZE = 50
MAX_PAGE_SIZE = 1000

_STATES: dict[ModelState, model_pb2.ModelState] = {
    state: getattr(model_pb2, f"MODEL_STATE_{state.name}") for state in ModelState
}
_PHASES: dict[LoadPhase, model_pb2.LoadPhase] = {
    phase: getattr(model_pb2, f"LOAD_PHASE_{phase.name}") for phase in LoadPhase
}
# Options that are messages, each with a conversion of its own; every other one passes through.
_BATCH_TIMEOUT, _HF_OVERRIDES = "batch_timeout", "hf_overrides"


def engine_options(message: model_pb2.EngineOptions) -> EngineOptions:
    """Engine options; one that is unset is None, and so is an empty string."""
    values: dict[str, Any] = {descriptor.name: value for descriptor, value in message.ListFields()}
    if _BATCH_TIMEOUT in values:
        timeout = values[_BATCH_TIMEOUT]
        values[_BATCH_TIMEOUT] = timeout.seconds + timeout.nanos / 1e9
    if _HF_OVERRIDES in values:
        values[_HF_OVERRIDES] = struct_values(values[_HF_OVERRIDES], "engine_options.hf_overrides")
    return EngineOptions(**values)


def engine_options_message(options: EngineOptions) -> model_pb2.EngineOptions:
    """Engine options as their message."""
    values = options.set_values()
    timeout: float | None = values.pop(_BATCH_TIMEOUT, None)
    overrides: Mapping[str, Any] | None = values.pop(_HF_OVERRIDES, None)
    message = model_pb2.EngineOptions(**values)
    if timeout is not None:
        message.batch_timeout.FromTimedelta(timedelta(seconds=timeout))
    if overrides is not None:
        message.hf_overrides.SetInParent()
        message.hf_overrides.update(overrides)
    return message


def model_message(model: Model) -> model_pb2.Model:
    """A model as its message."""
    message = model_pb2.Model(
        name=model.name,
        uri=model.uri,
        digest=model.digest,
        state=_STATES[model.state],
        phase=_PHASES[model.phase] if model.phase else model_pb2.LOAD_PHASE_UNSPECIFIED,
        max_model_len=model.max_model_len,
        quantization=model.quantization,
        engine_options=engine_options_message(model.options),
        create_time=_timestamp(model.create_time),
        aliases=model.aliases,
        supported_tasks=model.supported_tasks,
        adapters=[adapter_message(adapter) for adapter in model.adapters],
        restarts=model.restarts,
    )
    if model.error is not None:
        message.error.CopyFrom(
            model_pb2.ModelError(reason=model.error.reason, message=model.error.message, metadata=model.error.metadata)
        )
    if model.serving_time is not None:
        message.serving_time.CopyFrom(_timestamp(model.serving_time))
    if model.restart_time is not None:
        message.restart_time.CopyFrom(_timestamp(model.restart_time))
    if model.state is ModelState.LOADING:
        message.load_progress.completed_bytes = model.progress.completed_bytes
        message.load_progress.total_bytes = model.progress.total_bytes
    return message


def adapter_message(adapter: Adapter) -> model_pb2.Adapter:
    """An adapter as its message."""
    return model_pb2.Adapter(
        name=adapter.name,
        uri=adapter.uri,
        digest=adapter.digest,
        rank=adapter.rank,
        running_calls=adapter.running_calls,
        load_time=_timestamp(adapter.load_time),
    )


def load_message(load: ModelLoad) -> model_pb2.ModelLoad:
    """The load of a model as its message."""
    return model_pb2.ModelLoad(
        model=load.model,
        state=_STATES[load.state],
        running_requests=load.running_requests,
        waiting_requests=load.waiting_requests,
        kv_cache_usage=load.kv_cache_usage,
        prompt_tokens_per_second=load.prompt_tokens_per_second,
        generation_tokens_per_second=load.generation_tokens_per_second,
        refused_calls=load.refused_calls,
        max_num_seqs=load.max_num_seqs,
        max_num_queued_reqs=load.max_num_queued_reqs,
    )


def preload_requests(text: str) -> list[ModelRequest]:
    """The models to load at the server's start, from its setting: `name=uri,…`, or a JSON list of those and of objects.

    Raises ValueError, which says what is wrong.
    """
    if text.lstrip().startswith("["):
        items = json.loads(text)
    else:
        items = [item.strip() for item in text.split(",") if item.strip()]
    requests = [_preload_request(item) for item in items]
    names = [request.name for request in requests]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"two models have the name {min(twice)!r}")
    return requests


def _preload_request(item: object) -> ModelRequest:
    message = model_service_pb2.LoadModelRequest()
    match item:
        case str():
            message.name, _, message.uri = item.partition("=")
        case dict():
            try:
                json_format.ParseDict(item, message)
            except json_format.ParseError as error:
                raise ValueError(str(error)) from error
    if not message.name or not message.uri:
        raise ValueError(f"{item!r} is neither name=URI nor an object with a name and a uri")
    try:
        options = engine_options(message.engine_options)
    except BitmillError as error:
        raise ValueError(error.message) from error
    return ModelRequest(message.name, message.uri, options, tuple(message.aliases), message.unload_replaced)


def load_response(loads: Sequence[ModelLoad], time: datetime) -> model_service_pb2.GetLoadResponse:
    """The loads, taken at a time."""
    return model_service_pb2.GetLoadResponse(loads=map(load_message, loads), time=_timestamp(time))


def models_page(
    request: model_service_pb2.ListModelsRequest, models: Sequence[Model]
) -> model_service_pb2.ListModelsResponse:
    """The page of `models`, which are all there are by name, that the request asks for."""
    after = _decode_token(request.page_token)
    size = min(request.page_size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)
    rest = [model for model in models if model.name > after]
    page = rest[:size]
    return model_service_pb2.ListModelsResponse(
        models=[model_message(model) for model in page],
        next_page_token=_encode_token(page[-1].name) if len(rest) > size else "",
    )


def _encode_token(name: str) -> str:
    return base64.urlsafe_b64encode(name.encode()).decode()


def _decode_token(token: str) -> str:
    try:
        return base64.b64decode(token, altchars=b"-_", validate=True).decode()
    except ValueError as error:
        violation = FieldViolation("page_token", "is not a token that ListModels returned", "INVALID_PAGE_TOKEN")
        raise InvalidArgumentError([violation]) from error


def _timestamp(time: datetime) -> Timestamp:
    message = Timestamp()
    message.FromDatetime(time)
    return message
