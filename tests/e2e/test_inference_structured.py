"""Forms that the real engine makes its output have."""

from __future__ import annotations

import json
import re
from typing import Any

import grpc
import pytest

from bitmill.inference.v1 import generation_pb2
from bitmill.inference.v1 import inference_service_pb2 as pb
from support.inference_process import InferenceProcess
from support.inference_serving import violations

TIMEOUT_S = 60
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "counts": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "counts"],
    "additionalProperties": False,
}
# On which xgrammar's parser of patterns in schemas overflows its stack.
LONG_PATTERN = "a" + "*" * 60_000
CHOICES = ["red", 'gr"een\\', "blue\nsky", "日本"]


def generate(server: InferenceProcess, outputs: dict[str, Any], **sampling: Any) -> pb.GeneratedSequence:
    """A sequence with the form, which the stream makes as well."""
    params = {"temperature": 1, "seed": 5, "max_tokens": 200, "structured_outputs": outputs} | sampling
    request = {"model": "tiny", "text": "A generator is", "sampling_params": params}
    answer = server.inference.GenerateUnary(pb.GenerateUnaryRequest(**request), timeout=TIMEOUT_S)
    chunks = list(server.inference.Generate(pb.GenerateRequest(**request), timeout=TIMEOUT_S))
    (sequence,) = answer.sequences
    assert "".join(chunk.text for chunk in chunks) == sequence.text
    assert sequence.finish == chunks[-1].finish == generation_pb2.Finish(reason=generation_pb2.FINISH_REASON_STOP)
    return sequence


@pytest.mark.parametrize("seed", range(3))
def test_random_weights_write_json_that_follows_the_schema(seed: int, inference_server: InferenceProcess) -> None:
    """Only the mask makes them; without white space between the parts when told."""
    outputs = {"json_schema": json.dumps(SCHEMA), "disable_any_whitespace": True}
    text = generate(inference_server, outputs, seed=seed).text
    value = json.loads(text)
    assert sorted(value) == ["counts", "name"]
    assert len(value["name"]) <= 8
    assert all(isinstance(count, int) and 0 <= count <= 99 for count in value["counts"])
    assert text.startswith('{"name":"')
    assert re.search(r'","counts":\[(\d+(,\d+)*)?\]}$', text)


def test_white_space_is_free_otherwise(inference_server: InferenceProcess) -> None:
    """As JSON has it."""
    space = inference_server.inference.Tokenize(pb.TokenizeRequest(model="tiny", text="\n", add_special_tokens=False))
    with_bias = {"logit_bias": {space.token_ids[0]: 3}, "max_tokens": 500}
    outputs = {"json_schema": json.dumps({"type": "array", "items": {"type": "boolean"}, "maxItems": 2})}
    text = generate(inference_server, outputs, **with_bias).text
    assert "\n" in text
    assert isinstance(json.loads(text), list)


@pytest.mark.parametrize("compact", [False, True])
def test_a_json_object_is_one(compact: bool, inference_server: InferenceProcess) -> None:
    """Braces and quotes are made likely, so that it ends."""
    tokenize = inference_server.inference.Tokenize
    likely = [tokenize(pb.TokenizeRequest(model="tiny", text=text, add_special_tokens=False)) for text in '"}:,1']
    bias = {tokens.token_ids[0]: 6 for tokens in likely}
    outputs = {"json_object": True, "disable_any_whitespace": compact}
    text = generate(inference_server, outputs, logit_bias=bias).text
    assert isinstance(json.loads(text), dict)
    if compact:
        outside = re.sub(r'"([^"\\]|\\.)*"', '""', text)
        assert not re.search(r"\s", outside)


@pytest.mark.parametrize(
    ("outputs", "pattern"),
    [
        ({"regex": r"\d{3}-[a-f]{2}"}, r"\d{3}-[a-f]{2}"),
        ({"regex": "(ä|日){3}"}, "(ä|日){3}"),
        ({"grammar": 'root ::= "yes" | "no" | "no, " root'}, "(no, )*(yes|no)"),
        ({"grammar": 'start: "yes" | "no"'}, "yes|no"),
        ({"choice": {"texts": CHOICES}}, "|".join(map(re.escape, CHOICES))),
        (
            {
                "structural_tag": json.dumps(
                    {
                        "type": "structural_tag",
                        "format": {
                            "type": "tag",
                            "begin": "<n>",
                            "content": {"type": "json_schema", "json_schema": {"type": "integer", "maximum": 9}},
                            "end": "</n>",
                        },
                    }
                )
            },
            r"<n>\s*-?\d+\s*</n>",
        ),
    ],
)
def test_the_whole_output_has_the_form(
    outputs: dict[str, Any], pattern: str, inference_server: InferenceProcess
) -> None:
    """Whatever kind of form it is."""
    assert re.fullmatch(pattern, generate(inference_server, outputs).text)


def test_every_one_of_several_sequences_has_the_form(inference_server: InferenceProcess) -> None:
    """Each may be another text."""
    params = {"temperature": 1, "n": 6, "seed": 1, "structured_outputs": {"choice": {"texts": CHOICES}}}
    request = pb.GenerateUnaryRequest(model="tiny", text="a", sampling_params=params)
    texts = {each.text for each in inference_server.inference.GenerateUnary(request, timeout=TIMEOUT_S).sequences}
    assert texts <= set(CHOICES)
    assert len(texts) > 1


@pytest.mark.parametrize(
    ("outputs", "field", "words"),
    [
        ({"json_schema": "{"}, "json_schema", "Expecting property name"),
        ({"json_schema": "[]"}, "json_schema", "must be a JSON object"),
        ({"json_schema": '{"type": "nonsense"}'}, "json_schema", 'Unsupported type "nonsense"'),
        ({"json_schema": '{"type": "nonsense"}', "disable_any_whitespace": True}, "json_schema", "Unsupported type"),
        ({"json_schema": '{"$ref": "#/nope"}'}, "json_schema", "Cannot find field nope"),
        ({"json_schema": '{"type": "string", "pattern": "("}'}, "json_schema", "parenthesis is not closed"),
        ({"json_schema": json.dumps({"pattern": LONG_PATTERN})}, "json_schema", "a pattern has 60001 characters"),
        ({"json_schema": json.dumps({"patternProperties": {LONG_PATTERN: {}}})}, "json_schema", "at most 4096"),
        ({"structural_tag": json.dumps({"format": {"pattern": LONG_PATTERN}})}, "structural_tag", "at most 4096"),
        ({"json_schema": '{"type": "integer", "multipleOf": 3}'}, "json_schema", "not supported by xgrammar"),
        ({"json_schema": '{"items":' * 80 + "{}" + "}" * 80}, "json_schema", "nested too deeply"),
        ({"regex": "("}, "regex", "parenthesis is not closed"),
        ({"regex": "(?=a)b"}, "regex", "Lookahead is not supported"),
        ({"regex": "a\0b"}, "regex", "NUL"),
        ({"grammar": "root ::= foo"}, "grammar", 'Rule "foo" is not defined'),
        ({"grammar": "hello"}, "grammar", "expected ':' after rule name"),
        ({"structural_tag": "{}"}, "structural_tag", "must have a format field"),
    ],
)
def test_a_form_that_cannot_be_compiled_is_refused_with_the_compilers_words(
    outputs: dict[str, Any], field: str, words: str, inference_server: InferenceProcess
) -> None:
    """On both calls, before anything runs."""
    params = {"structured_outputs": outputs}
    unary = pb.GenerateUnaryRequest(model="tiny", text="a", sampling_params=params)
    stream = pb.GenerateRequest(model="tiny", text="a", sampling_params=params)
    for call in (
        lambda: inference_server.inference.GenerateUnary(unary, timeout=TIMEOUT_S),
        lambda: next(inference_server.inference.Generate(stream, timeout=TIMEOUT_S)),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call()
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert violations(caught.value) == {f"sampling_params.structured_outputs.{field}": "FORM_INVALID"}
        assert words in caught.value.details()
        assert ".cc:" not in caught.value.details()


def test_a_form_that_no_text_has_ends_its_own_call_and_nothing_else(inference_server: InferenceProcess) -> None:
    """The compiler lets it pass, and the engine finds no token that goes on."""
    request = pb.GenerateUnaryRequest(
        model="tiny", text="a", sampling_params={"structured_outputs": {"grammar": "root ::= root"}}
    )
    with pytest.raises(grpc.RpcError) as caught:
        inference_server.inference.GenerateUnary(request, timeout=TIMEOUT_S)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert violations(caught.value) == {"sampling_params.structured_outputs.grammar": "FORM_INVALID"}
    assert re.fullmatch(r"\d", generate(inference_server, {"regex": r"\d"}).text)
