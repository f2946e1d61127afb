"""The calls of the inference service, ModelService and InferenceService: each written once, for both clients.

A function here gives a client's method its signature and its documentation, and returns the call to make.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

from bitmill import methods, requests
from bitmill.inference.v1 import inference_service_pb2 as inference_pb
from bitmill.inference.v1 import model_service_pb2 as model_pb
from bitmill.inference.v1.generation_pb2 import TokenIds
from bitmill.inference.v1.model_pb2 import Model
from bitmill.methods import Call, CallOptions, whole
from bitmill.requests import Conversational, EngineKeywords, Prompt, SamplingOptions


def load_model(
    uri: str,
    *,
    name: str = "",
    return_immediately: bool = False,
    timeout: float | None = None,
    request_id: str = "",
    **options: Unpack[EngineKeywords],
) -> Call[Model]:
    """Loads an artifact or a checkpoint directory; returns when it serves, or at once with `return_immediately`.

    `options` as in `EngineKeywords`. Raises FailedPreconditionError when the server's device cannot serve it,
    DataLossError when a file differs from the manifest. The work goes on past the deadline; `watch_model` follows it.
    """
    request = model_pb.LoadModelRequest(
        name=name, uri=uri, engine_options=requests.engine_options(options), return_immediately=return_immediately
    )
    call: CallOptions = {"timeout": timeout, "request_id": request_id}
    return Call(methods.LOAD_MODEL, request, call, lambda response: response.model)


def unload_model(name: str, **options: Unpack[CallOptions]) -> Call[None]:
    """Lets the running calls end, stops the engine and returns."""
    return Call(methods.UNLOAD_MODEL, model_pb.UnloadModelRequest(name=name), options, lambda response: None)


def model(name: str, **options: Unpack[CallOptions]) -> Call[Model]:
    """Returns one model. Raises NotFoundError."""
    return Call(methods.GET_MODEL, model_pb.GetModelRequest(name=name), options, lambda response: response.model)


def models(*, page_size: int = 0, **options: Unpack[CallOptions]) -> Call[Sequence[Model]]:
    """Iterates over the models by name, page by page."""
    request = model_pb.ListModelsRequest(page_size=page_size)
    return Call(methods.LIST_MODELS, request, options, lambda response: response.models)


def watch_model(name: str, **options: Unpack[CallOptions]) -> Call[Model]:
    """Streams the model as it is and then each change; ends after UNLOADED. No deadline unless `timeout`."""
    return Call(methods.WATCH_MODEL, model_pb.WatchModelRequest(name=name), options, lambda response: response.model)


def generate(
    prompt: Prompt,
    *,
    model: str = "",
    timeout: float | None = None,
    request_id: str = "",
    **sampling: Unpack[SamplingOptions],
) -> Call[inference_pb.GenerateResponse]:
    """Streams the continuation of a text or of token ids. `sampling` as in `SamplingOptions`.

    `model` may be empty when exactly one is loaded. The deadline of the call is the deadline of the work.
    """
    request = inference_pb.GenerateRequest(
        model=model, sampling_params=requests.sampling_params(sampling), **_prompt(prompt)
    )
    return Call(methods.GENERATE, request, {"timeout": timeout, "request_id": request_id}, whole)


def generate_unary(
    prompt: Prompt,
    *,
    model: str = "",
    timeout: float | None = None,
    request_id: str = "",
    **sampling: Unpack[SamplingOptions],
) -> Call[inference_pb.GenerateUnaryResponse]:
    """As `generate`, in one piece."""
    request = inference_pb.GenerateUnaryRequest(
        model=model, sampling_params=requests.sampling_params(sampling), **_prompt(prompt)
    )
    return Call(methods.GENERATE_UNARY, request, {"timeout": timeout, "request_id": request_id}, whole)


def generate_text(
    prompt: Prompt,
    *,
    model: str = "",
    timeout: float | None = None,
    request_id: str = "",
    **sampling: Unpack[SamplingOptions],
) -> Call[str]:
    """As `generate_unary`, the text alone."""
    call = generate_unary(prompt, model=model, timeout=timeout, request_id=request_id, **sampling)
    return Call(call.method, call.request, call.options, lambda response: response.sequences[0].text)


def chat(
    messages: Conversational,
    *,
    model: str = "",
    timeout: float | None = None,
    request_id: str = "",
    **sampling: Unpack[SamplingOptions],
) -> Call[inference_pb.ChatResponse]:
    """Streams the next message of a conversation; text alone is one user message. Else as `generate`."""
    request = inference_pb.ChatRequest(
        model=model, messages=requests.chat_messages(messages), sampling_params=requests.sampling_params(sampling)
    )
    return Call(methods.CHAT, request, {"timeout": timeout, "request_id": request_id}, whole)


def chat_unary(
    messages: Conversational,
    *,
    model: str = "",
    timeout: float | None = None,
    request_id: str = "",
    **sampling: Unpack[SamplingOptions],
) -> Call[inference_pb.ChatUnaryResponse]:
    """As `chat`, in one piece."""
    request = inference_pb.ChatUnaryRequest(
        model=model, messages=requests.chat_messages(messages), sampling_params=requests.sampling_params(sampling)
    )
    return Call(methods.CHAT_UNARY, request, {"timeout": timeout, "request_id": request_id}, whole)


def tokenize(
    text: Conversational,
    *,
    model: str = "",
    add_special_tokens: bool | None = None,
    **options: Unpack[CallOptions],
) -> Call[inference_pb.TokenizeResponse]:
    """Turns text, or a conversation through the model's chat template, into token ids."""
    request = inference_pb.TokenizeRequest(model=model, add_special_tokens=add_special_tokens)
    if isinstance(text, str):
        request.text = text
    else:
        request.conversation.messages.extend(requests.chat_messages(text))
    return Call(methods.TOKENIZE, request, options, whole)


def detokenize(
    token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool = False, **options: Unpack[CallOptions]
) -> Call[str]:
    """Turns token ids into text."""
    request = inference_pb.DetokenizeRequest(model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens)
    return Call(methods.DETOKENIZE, request, options, lambda response: response.text)


def _prompt(prompt: Prompt) -> dict[str, Any]:
    return {"text": prompt} if isinstance(prompt, str) else {"token_ids": requests.filled(TokenIds, ids=prompt)}
