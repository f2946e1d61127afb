"""Embed and Score on the real engine: a Llama turned into an embedding model, and a BERT that scores pairs."""

from __future__ import annotations

import json
import math
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import struct_pb2

from bitmill.inference.v1 import generation_pb2, model_service_pb2
from bitmill.inference.v1 import inference_service_pb2 as pb
from support.inference_process import InferenceProcess
from support.inference_serving import error_info, violations

TIMEOUT_S = 120
PLAIN = Path(__file__).parents[1] / "support/plain_pooling.py"
TEXTS = ["A generator is a function.", "hello", "The module defines the following functions and classes."]
QUERY = "What is a generator?"
DIMENSIONS = 64


@pytest.fixture(scope="module")
def embedder(inference_server: InferenceProcess, tiny_checkpoints: Path) -> Iterator[InferenceProcess]:
    """The server with a further model "embedder", whose vectors may be cut to 8 or 16 values."""
    overrides = struct_pb2.Struct()
    overrides.update({"is_matryoshka": True, "matryoshka_dimensions": [8, 16, DIMENSIONS]})
    options = {"runner": "pooling", "convert": "embed", "hf_overrides": overrides}
    inference_server.load("embedder", tiny_checkpoints / "tied", **options)
    yield inference_server
    inference_server.unload("embedder")


@pytest.fixture(scope="module")
def scorer(inference_server: InferenceProcess, tiny_checkpoints: Path) -> Iterator[InferenceProcess]:
    """The server with a further model "scorer"."""
    inference_server.load("scorer", tiny_checkpoints / "cross-encoder")
    yield inference_server
    inference_server.unload("scorer")


def text_input(text: str) -> pb.PoolingInput:
    return pb.PoolingInput(text=text)


def ids_input(ids: Sequence[int]) -> pb.PoolingInput:
    return pb.PoolingInput(token_ids=generation_pb2.TokenIds(ids=ids))


def embed(server: InferenceProcess, inputs: Sequence[pb.PoolingInput], **fields: Any) -> pb.EmbedResponse:
    return server.inference.Embed(pb.EmbedRequest(model="embedder", inputs=inputs, **fields), timeout=TIMEOUT_S)


def score(server: InferenceProcess, model: str, documents: Sequence[str], **fields: Any) -> pb.ScoreResponse:
    request = pb.ScoreRequest(model=model, query=QUERY, documents=documents, **fields)
    return server.inference.Score(request, timeout=TIMEOUT_S)


def vectors_of(response: pb.EmbedResponse) -> list[list[float]]:
    return [list(embedding.values) for embedding in response.embeddings]


def ids_of(server: InferenceProcess, text: str, model: str = "embedder") -> list[int]:
    return list(server.inference.Tokenize(pb.TokenizeRequest(model=model, text=text)).token_ids)


def cosine(left: Sequence[float], right: Sequence[float]) -> float:
    product = sum(a * b for a, b in zip(left, right, strict=True))
    return product / (math.hypot(*left) * math.hypot(*right))


def plain(python: Path, *arguments: object) -> Any:
    run = subprocess.run([python, PLAIN, *map(str, arguments)], capture_output=True, check=True, timeout=TIMEOUT_S)
    return json.loads(run.stdout)


def until_running(server: InferenceProcess, model: str, *, running: bool) -> None:
    """Returns once requests of the model run, or none does."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        (load,) = server.models.GetLoad(model_service_pb2.GetLoadRequest(model=model)).loads
        if bool(load.running_requests + load.waiting_requests) is running:
            return
        assert time.monotonic() < deadline, load


def refusal(call: Any, request: Any) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        call(request, timeout=TIMEOUT_S)
    return caught.value


def test_vectors_are_those_of_the_plain_model(
    embedder: InferenceProcess, engine_python: Path, tiny_checkpoints: Path
) -> None:
    """The last token's hidden state, of length 1 unless told otherwise; text is its token ids."""
    ids = [ids_of(embedder, text) for text in TEXTS]
    expected = plain(engine_python, "vectors", tiny_checkpoints / "tied", json.dumps(ids))
    response = embed(embedder, [text_input(text) for text in TEXTS])
    raw = vectors_of(embed(embedder, [ids_input(row) for row in ids], normalize=False))
    assert response.usage == generation_pb2.Usage(prompt_tokens=sum(map(len, ids)))
    for vector, unscaled, reference in zip(vectors_of(response), raw, expected, strict=True):
        assert len(vector) == DIMENSIONS
        assert math.hypot(*vector) == pytest.approx(1, abs=1e-3)
        # The engine computes in bfloat16.
        assert cosine(vector, reference) > 0.999
        assert math.hypot(*unscaled) == pytest.approx(math.hypot(*reference), rel=0.01)
        assert cosine(unscaled, vector) == pytest.approx(1, abs=1e-5)


def test_many_inputs_come_back_in_order(embedder: InferenceProcess) -> None:
    """As many as are allowed, many times what fits in one step."""
    inputs = [ids_input([index % 700 + 3, 5, 6]) for index in range(2048)]
    vectors = vectors_of(embed(embedder, inputs))
    assert len(vectors) == len(inputs)
    for index in (0, 699, 1000, 2047):
        (alone,) = vectors_of(embed(embedder, [inputs[index]]))
        assert cosine(vectors[index], alone) > 0.9999
    assert cosine(vectors[0], vectors[1]) < 0.9999


def test_vectors_are_cut_where_the_model_allows(embedder: InferenceProcess) -> None:
    """The first values, of length 1 again."""
    (whole,) = vectors_of(embed(embedder, [text_input(TEXTS[0])]))
    (cut,) = vectors_of(embed(embedder, [text_input(TEXTS[0])], dimensions=8))
    assert len(cut) == 8
    assert math.hypot(*cut) == pytest.approx(1, abs=1e-3)
    assert cosine(cut, whole[:8]) > 0.999
    error = refusal(embedder.inference.Embed, pb.EmbedRequest(model="embedder", inputs=[text_input("x")], dimensions=9))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert violations(error) == {"dimensions": "DIMENSIONS_UNSUPPORTED"}
    assert "8, 16, 64" in error.details()


def test_inputs_may_be_cut_to_their_end(embedder: InferenceProcess) -> None:
    """To the last tokens, which also lets an input in that is too long."""
    ids = ids_of(embedder, TEXTS[2])
    cut = embed(embedder, [text_input(TEXTS[2]), text_input("word " * 4000 + TEXTS[2])], truncate_prompt_tokens=5)
    (end,) = vectors_of(embed(embedder, [ids_input(ids[-5:])]))
    for vector in vectors_of(cut):
        assert cosine(vector, end) > 0.9999
    assert cut.usage.prompt_tokens == 10


@pytest.mark.parametrize(
    ("last", "field", "reason"),
    [
        (ids_input([768]), "inputs[3].token_ids.ids[0]", "TOKEN_OUT_OF_VOCABULARY"),
        (text_input("word " * 400), "inputs[3].text", "PROMPT_TOO_LONG"),
        (text_input("word " * 100_000), "inputs[3].text", "PROMPT_TOO_LONG"),
        (ids_input([5] * 513), "inputs[3].token_ids.ids", "PROMPT_TOO_LONG"),
    ],
)
def test_an_input_that_the_model_cannot_take_is_named(
    last: pb.PoolingInput, field: str, reason: str, embedder: InferenceProcess
) -> None:
    """The call fails as a whole, and leaves nothing behind."""
    request = pb.EmbedRequest(model="embedder", inputs=[*[text_input("x")] * 3, last])
    error = refusal(embedder.inference.Embed, request)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert violations(error) == {field: reason}
    until_running(embedder, "embedder", running=False)


def test_a_caller_who_leaves_frees_the_places(embedder: InferenceProcess) -> None:
    """All of them, whether they run or wait."""
    inputs = [ids_input([index % 700 + 3] * 400) for index in range(2048)]
    call = embedder.inference.Embed.future(pb.EmbedRequest(model="embedder", inputs=inputs))
    until_running(embedder, "embedder", running=True)
    call.cancel()
    until_running(embedder, "embedder", running=False)


def test_an_embedding_model_scores_by_the_cosine(embedder: InferenceProcess) -> None:
    """Of the query's vector with each document's."""
    query, *documents = vectors_of(embed(embedder, [text_input(text) for text in (QUERY, *TEXTS)]))
    response = score(embedder, "embedder", TEXTS)
    expected = [cosine(query, document) for document in documents]
    assert list(response.scores) == pytest.approx(expected, abs=1e-3)
    assert response.usage.prompt_tokens == sum(len(ids_of(embedder, text)) for text in (QUERY, *TEXTS))


def test_pairs_score_as_in_the_plain_model(
    scorer: InferenceProcess, engine_python: Path, tiny_checkpoints: Path
) -> None:
    """Query and document in one text, each with its own segment."""
    expected = plain(engine_python, "scores", tiny_checkpoints / "cross-encoder", QUERY, json.dumps(TEXTS))
    response = score(scorer, "scorer", TEXTS)
    assert list(response.scores) == pytest.approx(expected, abs=2e-3)
    lengths = [len(ids_of(scorer, text, "scorer")) for text in TEXTS]
    # A pair has one token fewer than its texts have: the document's first.
    assert response.usage.prompt_tokens == sum(lengths) + len(TEXTS) * (len(ids_of(scorer, QUERY, "scorer")) - 1)
    assert score(scorer, "scorer", TEXTS, truncate_prompt_tokens=5).usage.prompt_tokens == 5 * len(TEXTS)


def test_a_pair_that_is_too_long_is_named(scorer: InferenceProcess) -> None:
    """By its document, as the query is the same for all."""
    request = pb.ScoreRequest(model="scorer", query=QUERY, documents=["x", "x", "x", "word " * 400])
    error = refusal(scorer.inference.Score, request)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert violations(error) == {"documents[3]": "PROMPT_TOO_LONG"}


def test_a_model_says_which_tasks_it_does(embedder: InferenceProcess, scorer: InferenceProcess) -> None:
    """FAILED_PRECONDITION with their names for every other; its tokenizer works whatever they are."""
    inference = embedder.inference
    messages = [generation_pb2.ChatMessage(role="user", content="hi")]
    inputs = [text_input("hi")]
    for model, call, request in (
        ("tiny", inference.Embed, pb.EmbedRequest(model="tiny", inputs=inputs)),
        ("tiny", inference.Score, pb.ScoreRequest(model="tiny", query="q", documents=["d"])),
        ("embedder", inference.GenerateUnary, pb.GenerateUnaryRequest(model="embedder", text="hi")),
        ("embedder", inference.ChatUnary, pb.ChatUnaryRequest(model="embedder", messages=messages)),
        ("scorer", inference.Embed, pb.EmbedRequest(model="scorer", inputs=inputs)),
    ):
        error = refusal(call, request)
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert error_info(error).reason == "TASK_UNSUPPORTED"
        tasks = embedder.get(model).supported_tasks
        assert error_info(error).metadata["supported_tasks"] == ", ".join(tasks)
    assert set(embedder.get("embedder").supported_tasks) >= {"embed", "score"}
    assert set(embedder.get("scorer").supported_tasks) >= {"classify", "score"}
    conversation = pb.Conversation(messages=messages)
    assert inference.Tokenize(pb.TokenizeRequest(model="embedder", conversation=conversation)).token_ids
