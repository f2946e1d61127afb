"""The calls of InferenceService: each written once, for the sync and the async client.

A function here gives a client's method its signature and its documentation, and returns the call to make.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

from bitmill import conversation, methods, requests
from bitmill.conversation import Conversational
from bitmill.filling import filled
from bitmill.inference.v1 import inference_service_pb2 as inference_pb
from bitmill.keywords import (
    CallOptions,
    ChatOptions,
    ConversationOptions,
    GenerationOptions,
    PoolingOptions,
    call_options,
    taken,
)
from bitmill.methods import Call, whole
from bitmill.requests import Prompt


def generate(
    prompt: Prompt, *, model: str = "", **options: Unpack[GenerationOptions]
) -> Call[inference_pb.GenerateResponse]:
    """Streams the continuation of a text or of token ids. `options` as in `GenerationOptions`.

    `model` may be empty when exactly one is loaded. The deadline of the call is the deadline of the work. A stream that
    breaks is not resumed. Raises UnavailableError with `retry_delay` when the model takes no more, which is not tried
    again here, NotFoundError, InvalidArgumentError with every wrong field, FailedPreconditionError for a model that
    does not generate.
    """
    request = filled(inference_pb.GenerateRequest, model=model, **requests.prompt_field(prompt), **_how(options))
    return Call(methods.GENERATE, request, call_options(GenerationOptions, options), whole)


def generate_unary(
    prompt: Prompt, *, model: str = "", **options: Unpack[GenerationOptions]
) -> Call[inference_pb.GenerateUnaryResponse]:
    """As `generate`, in one piece."""
    request = filled(inference_pb.GenerateUnaryRequest, model=model, **requests.prompt_field(prompt), **_how(options))
    return Call(methods.GENERATE_UNARY, request, call_options(GenerationOptions, options), whole)


def generate_text(prompt: Prompt, *, model: str = "", **options: Unpack[GenerationOptions]) -> Call[str]:
    """As `generate_unary`, the text of the first sequence alone."""
    call: Call[Any] = generate_unary(prompt, model=model, **options)
    return replace(call, answer=lambda response: response.sequences[0].text)


def chat(
    messages: Conversational, *, model: str = "", **options: Unpack[ChatOptions]
) -> Call[inference_pb.ChatResponse]:
    """Streams the next message of a conversation; text alone is one user message. Else as `generate`.

    `options` as in `ChatOptions`. `bitmill.conversation.joined` makes one message of the chunks.
    """
    request = filled(inference_pb.ChatRequest, model=model, **_conversation(messages, options), **_how(options))
    return Call(methods.CHAT, request, call_options(ChatOptions, options), whole)


def chat_unary(
    messages: Conversational, *, model: str = "", **options: Unpack[ChatOptions]
) -> Call[inference_pb.ChatUnaryResponse]:
    """As `chat`, in one piece. The message of a choice can go back into the conversation as it is."""
    request = filled(inference_pb.ChatUnaryRequest, model=model, **_conversation(messages, options), **_how(options))
    return Call(methods.CHAT_UNARY, request, call_options(ChatOptions, options), whole)


def embed(
    inputs: str | Iterable[Prompt],
    *,
    model: str = "",
    dimensions: int | None = None,
    normalize: bool | None = None,
    truncate_prompt_tokens: int | None = None,
    **options: Unpack[PoolingOptions],
) -> Call[inference_pb.EmbedResponse]:
    """Returns one vector for each input, text or token ids; text alone is one input.

    `dimensions` cuts the vectors of a model trained for it; `normalize` scales them to length 1;
    `truncate_prompt_tokens` keeps the last tokens of each input. Raises FailedPreconditionError naming the tasks that
    the model does, else as `generate`.
    """
    request = filled(
        inference_pb.EmbedRequest,
        model=model,
        inputs=requests.pooling_inputs(inputs),
        dimensions=dimensions,
        normalize=normalize,
        truncate_prompt_tokens=truncate_prompt_tokens,
        request_options=requests.request_options(options),
    )
    return Call(methods.EMBED, request, call_options(PoolingOptions, options), whole)


def score(
    query: str,
    documents: str | Iterable[str],
    *,
    model: str = "",
    truncate_prompt_tokens: int | None = None,
    **options: Unpack[PoolingOptions],
) -> Call[inference_pb.ScoreResponse]:
    """Returns how well each document fits the query, larger is better; text alone is one document. Else as `embed`."""
    request = filled(
        inference_pb.ScoreRequest,
        model=model,
        query=query,
        documents=requests.texts(documents),
        truncate_prompt_tokens=truncate_prompt_tokens,
        request_options=requests.request_options(options),
    )
    return Call(methods.SCORE, request, call_options(PoolingOptions, options), whole)


def abort(request_ids: str | Iterable[str], **options: Unpack[CallOptions]) -> Call[int]:
    """Ends the running calls with these request ids and returns how many were told to.

    They end with FINISH_REASON_ABORT and what they have, or as CancelledError when they have not begun. An id that no
    call has is no error.
    """
    request = filled(inference_pb.AbortRequest, request_ids=requests.texts(request_ids))
    return Call(methods.ABORT, request, options, lambda response: response.aborted_calls)


def tokenize(
    text: Conversational,
    *,
    model: str = "",
    add_special_tokens: bool | None = None,
    **options: Unpack[CallOptions],
) -> Call[inference_pb.TokenizeResponse]:
    """Turns text, or a conversation through the model's chat template, into token ids."""
    given: dict[str, Any] = (
        {"text": text}
        if isinstance(text, str)
        else {"conversation": inference_pb.Conversation(messages=conversation.chat_messages(text))}
    )
    request = filled(inference_pb.TokenizeRequest, model=model, add_special_tokens=add_special_tokens, **given)
    return Call(methods.TOKENIZE, request, options, whole)


def detokenize(
    token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool = False, **options: Unpack[CallOptions]
) -> Call[str]:
    """Turns token ids into text."""
    request = filled(
        inference_pb.DetokenizeRequest, model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
    )
    return Call(methods.DETOKENIZE, request, options, lambda response: response.text)


def _how(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a request that say how to generate."""
    return {
        "sampling_params": requests.sampling_params(options),
        "request_options": requests.request_options(options),
    }


def _conversation(messages: Conversational, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a request that say what is asked; those of Chat and of ChatUnary are the same."""
    given = taken(ConversationOptions, options)
    if "tools" in given:
        given["tools"] = conversation.tools(given["tools"])
    if "tool_choice" in given:
        given["tool_choice"] = conversation.tool_choice(given["tool_choice"])
    if "chat_template_kwargs" in given:
        given["chat_template_kwargs"] = requests.struct("chat_template_kwargs", given["chat_template_kwargs"])
    return {"messages": conversation.chat_messages(messages), **given}
