"""What callers see of real vLLM through the inference service, on a tiny random model."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import grpc
import pytest

from bitmill.inference.v1 import generation_pb2, inference_service_pb2_grpc
from bitmill.inference.v1 import inference_service_pb2 as pb
from support.inference_process import SERVICE, InferenceProcess
from support.inference_serving import error_info, violations

PROMPT = "The assignment statement binds"
GREEDY = {"temperature": 0, "ignore_eos": True}
SAMPLED = {"temperature": 1.5, "seed": 7, "ignore_eos": True}
BUF = Path(__file__).parents[2] / ".venv/bin/buf"


def request(model: str = "tiny", text: str = PROMPT, **sampling: Any) -> dict[str, Any]:
    return {"model": model, "text": text, "sampling_params": generation_pb2.SamplingParams(**sampling)}


def unary(server: InferenceProcess, **fields: Any) -> tuple[pb.GeneratedSequence, generation_pb2.Usage]:
    response = server.inference.GenerateUnary(pb.GenerateUnaryRequest(**request(**fields)))
    (sequence,) = response.sequences
    return sequence, response.usage


def stream(server: InferenceProcess, **fields: Any) -> list[pb.GenerateResponse]:
    return list(server.inference.Generate(pb.GenerateRequest(**request(**fields))))


def text_of(chunks: list[pb.GenerateResponse]) -> str:
    return "".join(chunk.text for chunk in chunks)


@pytest.mark.parametrize("seed", range(4))
def test_the_chunks_make_the_unary_answer_byte_for_byte(seed: int, inference_server: InferenceProcess) -> None:
    """Sampled noise of a byte-level vocabulary: characters span tokens, and some bytes are none at all."""
    sampling = SAMPLED | {"seed": seed, "max_tokens": 100, "logprobs": 3}
    chunks = stream(inference_server, **sampling)
    sequence, usage = unary(inference_server, **sampling)
    assert text_of(chunks) == sequence.text
    assert [token_id for chunk in chunks for token_id in chunk.token_ids] == sequence.token_ids
    assert len(sequence.token_ids) == usage.completion_tokens == 100
    assert [len(chunk.logprobs) for chunk in chunks] == [len(chunk.token_ids) for chunk in chunks]
    assert chunks[-1].finish == sequence.finish == generation_pb2.Finish(reason=generation_pb2.FINISH_REASON_LENGTH)
    assert not any(chunk.HasField("finish") or chunk.HasField("usage") for chunk in chunks[:-1])
    assert len({chunk.request_id for chunk in chunks}) == 1


def test_chat_goes_through_the_models_template(inference_server: InferenceProcess) -> None:
    """The prompt is what Tokenize makes of the conversation, and stream and unary agree."""
    messages = [generation_pb2.ChatMessage(role="user", content="What is a tuple?")]
    sampling = generation_pb2.SamplingParams(**GREEDY, max_tokens=20)
    chunks = list(inference_server.inference.Chat(pb.ChatRequest(messages=messages, sampling_params=sampling)))
    answer = inference_server.inference.ChatUnary(pb.ChatUnaryRequest(messages=messages, sampling_params=sampling))
    (choice,) = answer.choices
    assert "".join(chunk.content for chunk in chunks) == choice.message.content
    assert [token_id for chunk in chunks for token_id in chunk.token_ids] == choice.token_ids
    conversation = pb.Conversation(messages=messages)
    tokenized = inference_server.inference.Tokenize(pb.TokenizeRequest(conversation=conversation))
    assert answer.usage.prompt_tokens == chunks[-1].usage.prompt_tokens == len(tokenized.token_ids)
    rendered = inference_server.inference.Detokenize(pb.DetokenizeRequest(token_ids=tokenized.token_ids))
    assert rendered.text == "<|im_start|>user\nWhat is a tuple?<|im_end|>\n<|im_start|>assistant\n"
    prompt = generation_pb2.TokenIds(ids=tokenized.token_ids)
    same = inference_server.inference.GenerateUnary(pb.GenerateUnaryRequest(token_ids=prompt, sampling_params=sampling))
    assert same.sequences[0].text == choice.message.content


def test_log_probabilities_are_those_of_the_chosen_and_the_likeliest_tokens(
    inference_server: InferenceProcess,
) -> None:
    """Greedy choice is the likeliest token; 0 reports the chosen one alone; unset reports none."""
    sequence, _ = unary(inference_server, **GREEDY, max_tokens=5, logprobs=3)
    for token_id, position in zip(sequence.token_ids, sequence.logprobs, strict=True):
        assert position.chosen.token_id == token_id
        assert position.chosen.rank == 1
        assert [entry.rank for entry in position.top] == [1, 2, 3]
        assert position.top[0] == position.chosen
        values = [entry.logprob for entry in position.top]
        assert values == sorted(values, reverse=True)
        assert values[0] < 0
    alone, _ = unary(inference_server, **GREEDY, max_tokens=5, logprobs=0)
    assert [position.chosen.token_id for position in alone.logprobs] == alone.token_ids == sequence.token_ids
    assert not any(position.top for position in alone.logprobs)
    none, _ = unary(inference_server, **GREEDY, max_tokens=5)
    assert not none.logprobs


def test_a_stop_string_ends_the_text_and_no_beginning_of_it_is_streamed(inference_server: InferenceProcess) -> None:
    """It spans tokens; the match is reported, and kept in the text only on request."""
    whole, _ = unary(inference_server, **SAMPLED, max_tokens=60)
    middle = len(whole.text) // 2
    stop = whole.text[middle : middle + 6]
    before = whole.text[: whole.text.index(stop)]
    chunks = stream(inference_server, **SAMPLED, max_tokens=60, stop=[stop, "never in the text"])
    assert text_of(chunks) == before
    assert chunks[-1].finish.reason == generation_pb2.FINISH_REASON_STOP
    assert chunks[-1].finish.stop_string == stop
    sequence, _ = unary(inference_server, **SAMPLED, max_tokens=60, stop=[stop])
    assert (sequence.text, sequence.finish.stop_string) == (before, stop)
    kept = {"max_tokens": 60, "stop": [stop], "include_stop_str_in_output": True}
    assert text_of(stream(inference_server, **SAMPLED, **kept)) == before + stop


def test_a_stop_token_is_reported_by_its_id(inference_server: InferenceProcess) -> None:
    """It is the last of the token ids."""
    whole, _ = unary(inference_server, **SAMPLED, max_tokens=40)
    stop = whole.token_ids[20]
    expected = whole.token_ids[: list(whole.token_ids).index(stop) + 1]
    sequence, _ = unary(inference_server, **SAMPLED, max_tokens=40, stop_token_ids=[stop])
    assert sequence.token_ids == expected
    assert sequence.finish.reason == generation_pb2.FINISH_REASON_STOP
    assert sequence.finish.WhichOneof("stop_match") == "stop_token_id"
    assert sequence.finish.stop_token_id == stop


def test_without_max_tokens_the_context_is_filled(inference_server: InferenceProcess) -> None:
    """To its last token, which ends the sequence for its length."""
    max_model_len = inference_server.get("tiny").max_model_len
    sequence, usage = unary(inference_server, **GREEDY)
    assert usage.prompt_tokens + usage.completion_tokens == max_model_len
    assert sequence.finish.reason == generation_pb2.FINISH_REASON_LENGTH


def test_a_prompt_seen_before_comes_from_the_cache(inference_server: InferenceProcess) -> None:
    """Usage counts its cached tokens, in whole blocks."""
    text = "Every cached block holds the same text. " * 30
    _, first = unary(inference_server, text=text, **GREEDY, max_tokens=1)
    _, second = unary(inference_server, text=text, **GREEDY, max_tokens=1)
    assert first.prompt_tokens == second.prompt_tokens
    assert first.cached_tokens == 0 < second.cached_tokens < second.prompt_tokens


def test_text_survives_tokenizing_and_back(inference_server: InferenceProcess) -> None:
    """Characters of several bytes too; special tokens are left out on request."""
    text = "naïve 日本語 🌍"
    tokenized = inference_server.inference.Tokenize(pb.TokenizeRequest(text=text))
    back = inference_server.inference.Detokenize(pb.DetokenizeRequest(token_ids=tokenized.token_ids))
    assert back.text == text
    special = inference_server.inference.Tokenize(pb.TokenizeRequest(text="<|im_end|>a"))
    skipping = pb.DetokenizeRequest(token_ids=special.token_ids, skip_special_tokens=True)
    assert inference_server.inference.Detokenize(skipping).text == "a"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"text": "word " * 600}, {"text": "PROMPT_TOO_LONG"}),
        ({"text": "x" * 10_000_000}, {"text": "PROMPT_TOO_LONG"}),
        (
            {"text": "x" * 10_000_000, "sampling_params": {"truncate_prompt_tokens": 513}},
            {"text": "PROMPT_TOO_LONG"},
        ),
        ({"token_ids": {"ids": [1] * 512}}, {"token_ids.ids": "PROMPT_TOO_LONG"}),
        ({"token_ids": {"ids": [1, 768]}}, {"token_ids.ids[1]": "TOKEN_OUT_OF_VOCABULARY"}),
        ({"text": "a", "sampling_params": {"max_tokens": 512}}, {"sampling_params.max_tokens": "MAX_TOKENS_TOO_LARGE"}),
        (
            {"text": "a", "sampling_params": {"stop_token_ids": [768]}},
            {"sampling_params.stop_token_ids[0]": "TOKEN_OUT_OF_VOCABULARY"},
        ),
        ({"text": ""}, {"text": "PROMPT_EMPTY"}),
    ],
)
def test_what_the_model_cannot_take_is_refused_alike_on_both_kinds_of_call(
    fields: dict[str, Any], expected: dict[str, str], inference_server: InferenceProcess
) -> None:
    """INVALID_ARGUMENT with the field; the engine goes on as if nothing had come."""
    with pytest.raises(grpc.RpcError) as unary_error:
        inference_server.inference.GenerateUnary(pb.GenerateUnaryRequest(model="tiny", **fields))
    with pytest.raises(grpc.RpcError) as stream_error:
        next(inference_server.inference.Generate(pb.GenerateRequest(model="tiny", **fields)))
    for caught in (unary_error.value, stream_error.value):
        assert caught.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert violations(caught) == expected
    assert unary_error.value.details() == stream_error.value.details()
    assert unary(inference_server, **GREEDY, max_tokens=1)[1].completion_tokens == 1


@pytest.mark.parametrize("message", [{"role": "x" * 10_000_000}, {"role": "user", "content": "x" * 10_000_000}])
def test_a_conversation_that_cannot_fit_is_refused_before_it_is_tokenized(
    message: dict[str, str], inference_server: InferenceProcess
) -> None:
    """By its characters, wherever they are."""
    with pytest.raises(grpc.RpcError) as caught:
        inference_server.inference.ChatUnary(pb.ChatUnaryRequest(model="tiny", messages=[message]))
    assert violations(caught.value) == {"messages": "PROMPT_TOO_LONG"}
    assert "characters" in caught.value.details()


def test_an_unknown_model_is_not_found(inference_server: InferenceProcess) -> None:
    """The loaded ones are named."""
    with pytest.raises(grpc.RpcError) as caught:
        stream(inference_server, model="nope")
    assert (caught.value.code(), error_info(caught.value).reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
    assert "tiny" in caught.value.details()


async def test_many_streams_at_once_each_get_their_own_answer(inference_server: InferenceProcess) -> None:
    """Twice as many as fit in one step, half of them under one request id; some callers leave midway."""
    async with grpc.aio.insecure_channel(inference_server.address) as channel:
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)

        async def ask(index: int) -> str:
            metadata = (("x-request-id", "the same" if index % 2 else f"id-{index}"),)
            fields = request(text=f"Number {index} is", **GREEDY, max_tokens=50)
            call = stub.Generate(pb.GenerateRequest(**fields), metadata=metadata)
            text = ""
            async for chunk in call:
                text += chunk.text
                if index % 4 == 0:
                    call.cancel()
                    return "left"
            return text

        answers = await asyncio.gather(*(ask(index) for index in range(32)))
    for index, answer in enumerate(answers):
        sequence, _ = unary(inference_server, text=f"Number {index} is", **GREEDY, max_tokens=50)
        assert answer == ("left" if index % 4 == 0 else sequence.text)


def test_a_deadline_ends_the_call(inference_server: InferenceProcess) -> None:
    """The rest of the work is given up, and the next call is served."""
    fields = request(**GREEDY)
    with pytest.raises(grpc.RpcError) as caught:
        list(inference_server.inference.Generate(pb.GenerateRequest(**fields), timeout=0.2))
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert unary(inference_server, **GREEDY, max_tokens=1)[1].completion_tokens == 1


def test_buf_curl_lists_the_methods_and_streams_an_answer(inference_server: InferenceProcess) -> None:
    """By reflection alone, without the protos."""
    curl = [BUF, "curl", "--protocol", "grpc", "--http2-prior-knowledge"]
    url = f"http://{inference_server.address}"
    methods = subprocess.run([*curl, "--list-methods", url], check=True, capture_output=True, text=True, timeout=60)
    assert f"{SERVICE}/Generate" in methods.stdout.split()
    body = json.dumps({"text": PROMPT, "samplingParams": {"temperature": 0, "maxTokens": 5, "ignoreEos": True}})
    answer = subprocess.run(
        [*curl, "-d", body, f"{url}/{SERVICE}/Generate"], check=True, capture_output=True, text=True, timeout=60
    )
    chunks = _json_documents(answer.stdout)
    sequence, _ = unary(inference_server, **GREEDY, max_tokens=5)
    assert "".join(chunk.get("text", "") for chunk in chunks) == sequence.text
    assert chunks[-1]["finish"] == {"reason": "FINISH_REASON_LENGTH"}


def test_the_log_is_json_and_carries_the_request_id(inference_server: InferenceProcess) -> None:
    """One line for each call, with its status."""
    fields = request(**GREEDY, max_tokens=1)
    metadata = (("x-request-id", "find-me"),)
    inference_server.inference.GenerateUnary(pb.GenerateUnaryRequest(**fields), metadata=metadata)
    lines = [json.loads(line) for line in inference_server.wait_for_lines("find-me", 1)]
    assert [(line["event"], line["code"]) for line in lines] == [("call_finished", "OK")]


def _json_documents(text: str) -> list[dict[str, Any]]:
    decoder, documents, position = json.JSONDecoder(), [], 0
    while position < len(text.rstrip()):
        document, position = decoder.raw_decode(text, position)
        documents.append(document)
        position += len(text[position:]) - len(text[position:].lstrip())
    return documents
