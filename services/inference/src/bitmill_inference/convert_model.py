"""Between the messages about models and the domain."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from datetime import datetime

from google.protobuf.timestamp_pb2 import Timestamp

from bitmill.inference.v1 import model_pb2, model_service_pb2
from bitmill_common.errors import FieldViolation, InvalidArgumentError
from bitmill_inference.engine_options import EngineOptions
from bitmill_inference.model import LoadPhase, Model, ModelState

DEFAULT_PAGE_SIZE = 50
MAX_PAGE_SIZE = 1000

_STATES: dict[ModelState, model_pb2.ModelState] = {
    state: getattr(model_pb2, f"MODEL_STATE_{state.name}") for state in ModelState
}
_PHASES: dict[LoadPhase, model_pb2.LoadPhase] = {
    phase: getattr(model_pb2, f"LOAD_PHASE_{phase.name}") for phase in LoadPhase
}
_OPTION_FIELDS = tuple(descriptor.name for descriptor in model_pb2.EngineOptions.DESCRIPTOR.fields)


def engine_options(message: model_pb2.EngineOptions) -> EngineOptions:
    """Engine options; one that is unset is None."""
    return EngineOptions(**{name: getattr(message, name) for name in _OPTION_FIELDS if message.HasField(name)})


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
        create_time=_timestamp(model.create_time),
    )
    for name, value in model.options.set_values().items():
        setattr(message.engine_options, name, value)
    if model.error is not None:
        message.error.CopyFrom(
            model_pb2.ModelError(reason=model.error.reason, message=model.error.message, metadata=model.error.metadata)
        )
    if model.serving_time is not None:
        message.serving_time.CopyFrom(_timestamp(model.serving_time))
    return message


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
