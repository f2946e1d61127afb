"""InferenceService over a socket, with a fake engine behind the port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from bitmill.inference.v1 import generation_pb2
from bitmill.inference.v1 import inference_service_pb2 as pb
from bitmill_inference.requests.generation import RequestOptions
from bitmill_inference.requests.sampling import OutputForm, RepetitionDetection, SamplingParams, StructuredOutputs
from support.fake_inference_engine import TEXT
from support.inference_serving import TIMEOUT_S, Serving, error_info, serving, violations

PROMPT = "hello"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Serving]:
    """A server with one model, "tiny"."""
    async with serving(tmp_path) as server:
        await server.load()
        yield server


def params(**fields: object) -> generation_pb2.SamplingParams:
    return generation_pb2.SamplingParams(**fields)


def user(content: str) -> generation_pb2.ChatMessage:
    return generation_pb2.ChatMessage(role="user", content=content)


async def test_the_chunks_make_the_unary_answer(server: Serving) -> None:
    """Text, token ids and log probabilities, whether for a prompt or for a conversation."""
    sampling = params(logprobs=2, stop=["🌍"])
    chunks = [c async for c in server.inference.Generate(pb.GenerateRequest(text=PROMPT, sampling_params=sampling))]
    unary = await server.inference.GenerateUnary(pb.GenerateUnaryRequest(text=PROMPT, sampling_params=sampling))
    (sequence,) = unary.sequences
    assert "".join(chunk.text for chunk in chunks) == sequence.text == TEXT
    assert [token_id for chunk in chunks for token_id in chunk.token_ids] == sequence.token_ids
    assert [position for chunk in chunks for position in chunk.logprobs] == sequence.logprobs
    assert len(sequence.logprobs) == len(sequence.token_ids)
    assert (chunks[-1].finish, chunks[-1].usage) == (sequence.finish, unary.usage)
    assert [chunk.HasField("finish") for chunk in chunks] == [False] * (len(chunks) - 1) + [True]

    messages = [user(PROMPT)]
    chat = [c async for c in server.inference.Chat(pb.ChatRequest(messages=messages, sampling_params=sampling))]
    answer = await server.inference.ChatUnary(pb.ChatUnaryRequest(messages=messages, sampling_params=sampling))
    (choice,) = answer.choices
    assert "".join(chunk.content for chunk in chat) == choice.message.content == TEXT
    assert choice.message.role == "assistant"
    assert [token_id for chunk in chat for token_id in chunk.token_ids] == choice.token_ids
    assert (chat[-1].finish, chat[-1].usage) == (choice.finish, answer.usage)


@pytest.mark.parametrize(
    ("fields", "finish"),
    [
        ({}, {"reason": generation_pb2.FINISH_REASON_STOP}),
        ({"max_tokens": 2}, {"reason": generation_pb2.FINISH_REASON_LENGTH}),
        ({"stop": ["x"]}, {"reason": generation_pb2.FINISH_REASON_STOP, "stop_string": "x"}),
        ({"stop_token_ids": [0]}, {"reason": generation_pb2.FINISH_REASON_STOP, "stop_token_id": 0}),
    ],
)
async def test_the_finish_says_why_and_what_matched(
    fields: dict[str, object], finish: dict[str, object], server: Serving
) -> None:
    """Token 0 is a match too; nothing set means the end-of-sequence token."""
    request = pb.GenerateUnaryRequest(text=PROMPT, sampling_params=params(**fields))
    response = await server.inference.GenerateUnary(request)
    assert response.sequences[0].finish == generation_pb2.Finish(**finish)


async def test_unset_fields_stay_unset_and_zeros_stay_zeros(server: Serving) -> None:
    """The engine tells a temperature of 0 from none, which is the model's own."""
    await server.inference.GenerateUnary(pb.GenerateUnaryRequest(text=PROMPT))
    zeros = params(temperature=0, top_k=0, min_tokens=0, seed=0, logprobs=0, ignore_eos=False)
    await server.inference.GenerateUnary(pb.GenerateUnaryRequest(text=PROMPT, sampling_params=zeros))
    unset, zero = (request.params for request in server.engine.requests[-2:])
    assert (unset.temperature, unset.top_k, unset.min_tokens, unset.seed) == (None, None, None, None)
    assert (zero.temperature, zero.top_k, zero.min_tokens, zero.seed) == (0, 0, 0, 0)
    assert (unset.logprobs, zero.logprobs, unset.ignore_eos, zero.ignore_eos) == (None, 0, None, False)


async def test_every_sampling_field_reaches_the_engine(server: Serving) -> None:
    """Each under its own name, whatever its kind."""
    sampling = params(
        n=2,
        logit_bias={5: 1.5, 6: -2},
        prompt_logprobs=3,
        truncate_prompt_tokens=4,
        bad_words=["bad"],
        allowed_token_ids=[1, 2],
        logprob_token_ids=[3, 4],
        structured_outputs={"json_schema": "{}", "disable_any_whitespace": True},
        thinking_token_budget=7,
        spaces_between_special_tokens=False,
        detokenize=False,
        stream_interval=2,
        repetition_detection={"max_pattern_size": 3, "min_count": 2},
    )
    await server.inference.GenerateUnary(pb.GenerateUnaryRequest(text=PROMPT, sampling_params=sampling))
    assert server.engine.requests[-1].params == SamplingParams(
        n=2,
        logit_bias={5: 1.5, 6: -2},
        prompt_logprobs=3,
        truncate_prompt_tokens=4,
        bad_words=("bad",),
        allowed_token_ids=(1, 2),
        logprob_token_ids=(3, 4),
        structured_outputs=StructuredOutputs(OutputForm.JSON, "{}", disable_any_whitespace=True),
        thinking_token_budget=7,
        spaces_between_special_tokens=False,
        detokenize=False,
        stream_interval=2,
        repetition_detection=RepetitionDetection(3, 0, 2),
    )


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ({"json_schema": "{}"}, StructuredOutputs(OutputForm.JSON, "{}")),
        ({"json_object": True}, StructuredOutputs(OutputForm.JSON_OBJECT, True)),
        ({"regex": "a+"}, StructuredOutputs(OutputForm.REGEX, "a+")),
        ({"grammar": 'root ::= "a"'}, StructuredOutputs(OutputForm.GRAMMAR, 'root ::= "a"')),
        ({"choice": {"texts": ["a", "b"]}}, StructuredOutputs(OutputForm.CHOICE, ("a", "b"))),
        ({"structural_tag": "{}"}, StructuredOutputs(OutputForm.STRUCTURAL_TAG, "{}")),
    ],
)
async def test_every_form_of_output_reaches_the_engine(
    outputs: dict[str, object], expected: StructuredOutputs, server: Serving
) -> None:
    """With its value."""
    sampling = params(structured_outputs=outputs)
    await server.inference.GenerateUnary(pb.GenerateUnaryRequest(text=PROMPT, sampling_params=sampling))
    assert server.engine.requests[-1].params.structured_outputs == expected


async def test_each_of_several_sequences_has_an_index_and_one_end(server: Serving) -> None:
    """The usage counts all of them and comes once, at the very end."""
    sampling = params(n=3, max_tokens=4)
    chunks = [c async for c in server.inference.Generate(pb.GenerateRequest(text=PROMPT, sampling_params=sampling))]
    unary = await server.inference.GenerateUnary(pb.GenerateUnaryRequest(text=PROMPT, sampling_params=sampling))
    assert [sequence.index for sequence in unary.sequences] == [0, 1, 2]
    for sequence in unary.sequences:
        own = [chunk for chunk in chunks if chunk.index == sequence.index]
        assert "".join(chunk.text for chunk in own) == sequence.text == TEXT[:4]
        assert [chunk.HasField("finish") for chunk in own] == [False, False, False, True]
    assert [chunk.HasField("usage") for chunk in chunks] == [False] * 11 + [True]
    assert chunks[-1].usage == unary.usage
    assert unary.usage.completion_tokens == 12


async def test_log_probabilities_of_the_prompt_come_once_and_first(server: Serving) -> None:
    """One entry for each token of the prompt after the first."""
    sampling = params(prompt_logprobs=1, n=2)
    request = pb.GenerateRequest(token_ids={"ids": [65, 66, 67]}, sampling_params=sampling)
    first, *others = [chunk async for chunk in server.inference.Generate(request)]
    unary = await server.inference.GenerateUnary(
        pb.GenerateUnaryRequest(token_ids={"ids": [65, 66, 67]}, sampling_params=sampling)
    )
    assert [position.chosen.token for position in first.prompt_logprobs] == ["B", "C"]
    assert first.prompt_logprobs == unary.prompt_logprobs
    assert not any(chunk.prompt_logprobs for chunk in others)


async def test_request_options_reach_the_engine_with_the_caller_and_the_trace(server: Serving) -> None:
    """Of the metadata, traceparent and tracestate are the trace."""
    server.engine.info = replace(server.engine.info, priorities=True)
    metadata = (
        ("x-request-id", "mine"),
        ("x-caller-id", "team-a"),
        ("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
        ("tracestate", "vendor=1"),
        ("authorization", "secret"),
    )
    options = {"priority": -3, "cache_salt": "salt", "session_id": "session"}
    expected = RequestOptions(
        priority=-3,
        cache_salt="salt",
        session_id="session",
        request_id="mine",
        caller="team-a",
        trace_headers={"traceparent": metadata[2][1], "tracestate": "vendor=1"},
    )
    await server.inference.GenerateUnary(
        pb.GenerateUnaryRequest(text=PROMPT, request_options=options), metadata=metadata
    )
    await server.inference.Generate(pb.GenerateRequest(text=PROMPT, request_options=options), metadata=metadata).read()
    assert [request.options for request in server.engine.requests[-2:]] == [expected, expected]


async def test_a_caller_without_a_name_is_known_by_its_host(server: Serving) -> None:
    """The port differs between the connections of one caller."""
    await server.inference.GenerateUnary(pb.GenerateUnaryRequest(text=PROMPT))
    assert server.engine.requests[-1].options.caller == "127.0.0.1"


async def test_the_callers_request_id_comes_back_even_twice_at_once(server: Serving) -> None:
    """Two calls with one id do not meet in the engine."""

    async def ask() -> list[pb.GenerateResponse]:
        call = server.inference.Generate(pb.GenerateRequest(text=PROMPT), metadata=(("x-request-id", "mine"),))
        return [chunk async for chunk in call]

    first, second = await asyncio.gather(ask(), ask())
    assert {chunk.request_id for chunk in first + second} == {"mine"}
    assert "".join(chunk.text for chunk in first) == "".join(chunk.text for chunk in second) == TEXT


async def test_a_call_without_a_request_id_gets_one(server: Serving) -> None:
    """It is the server's own, and differs between calls."""
    first, second = [await server.inference.GenerateUnary(pb.GenerateUnaryRequest(text=PROMPT)) for _ in range(2)]
    assert first.request_id
    assert first.request_id != second.request_id


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"prompt": "PROMPT_EMPTY"}),
        ({"text": ""}, {"text": "PROMPT_EMPTY"}),
        ({"token_ids": {"ids": []}}, {"token_ids.ids": "PROMPT_EMPTY"}),
        ({"text": "x" * 64}, {"text": "PROMPT_TOO_LONG"}),
        (
            {"text": PROMPT, "sampling_params": {"temperature": 3, "top_p": 0}},
            {"sampling_params.temperature": "OUT_OF_RANGE", "sampling_params.top_p": "OUT_OF_RANGE"},
        ),
        (
            {"text": PROMPT, "sampling_params": {"max_tokens": 64}},
            {"sampling_params.max_tokens": "MAX_TOKENS_TOO_LARGE"},
        ),
        ({"token_ids": {"ids": [1, 0x110000]}}, {"token_ids.ids[1]": "TOKEN_OUT_OF_VOCABULARY"}),
        (
            {
                "text": PROMPT,
                "sampling_params": {"logit_bias": {0x110000: 1}, "stop_token_ids": [0x110000]},
                "request_options": {"priority": 1},
            },
            {
                "sampling_params.stop_token_ids[0]": "TOKEN_OUT_OF_VOCABULARY",
                "sampling_params.logit_bias[1114112]": "TOKEN_OUT_OF_VOCABULARY",
                "request_options.priority": "PRIORITY_UNSUPPORTED",
            },
        ),
        (
            {"text": PROMPT, "sampling_params": {"structured_outputs": {}, "n": 65}},
            {"sampling_params.structured_outputs": "FORM_MISSING", "sampling_params.n": "OUT_OF_RANGE"},
        ),
    ],
)
async def test_bad_input_has_the_same_status_on_a_stream_and_a_unary_call(
    fields: dict[str, object], expected: dict[str, str], server: Serving
) -> None:
    """INVALID_ARGUMENT naming every wrong field."""
    with pytest.raises(grpc.aio.AioRpcError) as unary:
        await server.inference.GenerateUnary(pb.GenerateUnaryRequest(**fields))
    with pytest.raises(grpc.aio.AioRpcError) as stream:
        await server.inference.Generate(pb.GenerateRequest(**fields)).read()
    assert unary.value.code() == stream.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert violations(stream.value) == expected
    assert unary.value.details() == stream.value.details()
    assert violations(unary.value) == expected


async def test_an_unknown_model_is_not_found_and_the_loaded_ones_are_named(server: Serving) -> None:
    """The same on both kinds of call."""
    with pytest.raises(grpc.aio.AioRpcError) as unary:
        await server.inference.GenerateUnary(pb.GenerateUnaryRequest(model="nope", text=PROMPT))
    with pytest.raises(grpc.aio.AioRpcError) as stream:
        await server.inference.Generate(pb.GenerateRequest(model="nope", text=PROMPT)).read()
    for error in (unary.value, stream.value):
        assert error.code() == grpc.StatusCode.NOT_FOUND
        assert error_info(error).reason == "MODEL_NOT_FOUND"
        assert "tiny" in error.details()


async def test_an_empty_model_name_means_the_only_model(server: Serving) -> None:
    """With two it is ambiguous, and the error names them."""
    assert (await server.inference.GenerateUnary(pb.GenerateUnaryRequest(text=PROMPT))).sequences
    await server.load("other")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await server.inference.GenerateUnary(pb.GenerateUnaryRequest(text=PROMPT))
    assert violations(caught.value) == {"model": "MODEL_AMBIGUOUS"}
    assert "other, tiny" in caught.value.details()


async def test_text_and_conversations_are_tokenized_and_ids_turn_back_into_text(server: Serving) -> None:
    """Special tokens are added to text unless it says no, and left out of the text when it says so."""
    tokenized = await server.inference.Tokenize(pb.TokenizeRequest(text="grüß"))
    plain = await server.inference.Tokenize(pb.TokenizeRequest(text="grüß", add_special_tokens=False))
    assert tokenized.token_ids == [1, *plain.token_ids]
    assert tokenized.max_model_len == 64
    conversation = pb.Conversation(messages=[user("hi")])
    chat = await server.inference.Tokenize(pb.TokenizeRequest(conversation=conversation))
    whole = await server.inference.Detokenize(pb.DetokenizeRequest(token_ids=tokenized.token_ids))
    skipping = pb.DetokenizeRequest(token_ids=tokenized.token_ids, skip_special_tokens=True)
    assert (await server.inference.Detokenize(skipping)).text == "grüß"
    assert whole.text == "\x01grüß"
    assert (await server.inference.Detokenize(pb.DetokenizeRequest(token_ids=chat.token_ids))).text == "<user>hi"


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.TokenizeRequest(), "input"),
        (pb.TokenizeRequest(conversation=pb.Conversation()), "conversation.messages"),
    ],
)
async def test_tokenize_without_input_is_refused(request_: pb.TokenizeRequest, field: str, server: Serving) -> None:
    """An empty text is fine, but no text at all is a mistake."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await server.inference.Tokenize(request_)
    assert violations(caught.value) == {field: "PROMPT_EMPTY"}
    assert (await server.inference.Tokenize(pb.TokenizeRequest(text=""))).token_ids == [1]


async def test_detokenize_refuses_an_id_outside_the_vocabulary(server: Serving) -> None:
    """It names the first one."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await server.inference.Detokenize(pb.DetokenizeRequest(token_ids=[65, 0x110000]))
    assert violations(caught.value) == {"token_ids[1]": "TOKEN_OUT_OF_VOCABULARY"}


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_cancelled_call_frees_its_place_in_the_engine_at_once(streamed: bool, server: Serving) -> None:
    """While the engine is still at work on it."""
    server.engine.gate.clear()
    if streamed:
        call = server.inference.Generate(pb.GenerateRequest(text=PROMPT))
        await call.read()
    else:
        call = server.inference.GenerateUnary(pb.GenerateUnaryRequest(text=PROMPT))
        await asyncio.wait_for(server.engine.busy.wait(), TIMEOUT_S)
    assert server.engine.num_running == 1
    call.cancel()
    await asyncio.wait_for(server.engine.idle.wait(), TIMEOUT_S)
    assert server.engine.num_running == 0


async def test_the_deadline_of_the_call_is_the_deadline_of_the_work(server: Serving) -> None:
    """The engine is rid of the request when the caller's time is over."""
    server.engine.gate.clear()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in server.inference.Generate(pb.GenerateRequest(text=PROMPT), timeout=0.3):
            pass
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.wait_for(server.engine.idle.wait(), TIMEOUT_S)
    assert server.engine.num_running == 0
