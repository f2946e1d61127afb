"""Requests with lists of any length: nothing is done for millions of items that the request is refused for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from google.protobuf import struct_pb2

from bitmill.inference.v1 import generation_pb2, structured_outputs_pb2, tool_pb2
from bitmill.inference.v1 import inference_service_pb2 as pb
from bitmill_common.errors import InvalidArgumentError
from bitmill_inference.requests.calls import MAX_ABORTED_IDS
from bitmill_inference.requests.pooling import MAX_INPUTS
from bitmill_inference.requests.prompts import MAX_MESSAGES, MAX_TEMPLATE_KWARGS_BYTES, MAX_TOOL_CALLS, MAX_TOOLS
from bitmill_inference.requests.sampling import LIST_LIMITS, MAX_CHOICES
from bitmill_inference.servicers import convert, convert_chat, convert_pooling

USER = generation_pb2.ChatMessage(role="user", content="hi")


def sampling(name: str, count: int) -> Sequence[Any]:
    field = generation_pb2.SamplingParams.DESCRIPTOR.fields_by_name[name]
    items: Any = [""] * count if field.type == field.TYPE_STRING else [0] * count
    items = dict.fromkeys(range(count), 0.0) if name == "logit_bias" else items
    converted = getattr(convert.sampling_params(generation_pb2.SamplingParams(**{name: items})), name)
    return tuple(converted)


def choices(count: int) -> Any:
    form = structured_outputs_pb2.StructuredOutputs(choice=structured_outputs_pb2.Choices(texts=[""] * count))
    outputs = convert.sampling_params(generation_pb2.SamplingParams(structured_outputs=form)).structured_outputs
    assert outputs is not None
    return outputs.value


def messages(count: int) -> Sequence[Any]:
    return convert_chat.conversation(pb.ChatRequest(messages=[USER] * count)).messages


def tokenized_messages(count: int) -> Sequence[Any]:
    prompt: Any = convert_chat.tokenize_input(pb.TokenizeRequest(conversation=pb.Conversation(messages=[USER] * count)))
    return tuple(prompt.messages)


def tool_calls(count: int) -> Sequence[Any]:
    message = generation_pb2.ChatMessage(role="assistant", tool_calls=[tool_pb2.ToolCall()] * count)
    return convert_chat.conversation(pb.ChatRequest(messages=[message])).messages[0].tool_calls


def tools(count: int) -> Sequence[Any]:
    return convert_chat.conversation(pb.ChatRequest(messages=[USER], tools=[tool_pb2.Tool()] * count)).tools


LISTS: dict[str, tuple[Callable[[int], Sequence[Any]], int]] = {
    **{name: (lambda count, name=name: sampling(name, count), bound.limit) for name, bound in LIST_LIMITS.items()},
    "choice": (choices, MAX_CHOICES),
    "messages": (messages, MAX_MESSAGES),
    "conversation": (tokenized_messages, MAX_MESSAGES),
    "tool_calls": (tool_calls, MAX_TOOL_CALLS),
    "tools": (tools, MAX_TOOLS),
    "inputs": (lambda count: convert_pooling.embed_inputs(pb.EmbedRequest(inputs=[{}] * count)), MAX_INPUTS),
    "documents": (lambda count: convert_pooling.documents(pb.ScoreRequest(documents=[""] * count)), MAX_INPUTS),
    "request_ids": (lambda count: convert.aborted_ids(pb.AbortRequest(request_ids=[""] * count)), MAX_ABORTED_IDS),
}


def test_every_list_of_sampling_is_bounded() -> None:
    """One that is not in the table is converted whole."""
    fields = generation_pb2.SamplingParams.DESCRIPTOR.fields
    assert {field.name for field in fields if field.is_repeated} == LIST_LIMITS.keys()


@pytest.mark.parametrize("name", LISTS)
def test_of_a_list_over_its_limit_one_item_too_many_is_converted(name: str) -> None:
    """The rest costs nothing; one at its limit is whole."""
    convert_list, limit = LISTS[name]
    assert len(convert_list(limit)) == limit
    assert len(convert_list(limit + 2)) == limit + 1


def test_values_for_a_template_are_bounded_in_bytes() -> None:
    values = struct_pb2.Struct()
    values["text"] = "x" * MAX_TEMPLATE_KWARGS_BYTES
    with pytest.raises(InvalidArgumentError) as caught:
        convert_chat.conversation(pb.ChatRequest(messages=[USER], chat_template_kwargs=values))
    assert [(each.field, each.reason) for each in caught.value.violations] == [("chat_template_kwargs", "TOO_LONG")]
