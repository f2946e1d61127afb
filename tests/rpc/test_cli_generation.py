"""`bitmill generate`, `chat`, `embed`, `score` and `abort` against a real server: what they send and print."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bitmill.inference.v1 import inference_service_pb2 as inference_pb
from bitmill.inference.v1.generation_pb2 import Finish, FinishReason, RequestOptions, SamplingParams
from bitmill.inference.v1.structured_outputs_pb2 import Choices, StructuredOutputs
from bitmill.inference.v1.tool_pb2 import Tool, ToolCallDelta, ToolChoiceMode
from bitmill_common import errors
from support.cli import bitmill
from support.fake_services import FakeServer, Hang


class TestGeneration:
    CHUNKS = (
        inference_pb.GenerateResponse(text="Once ü"),
        inference_pb.GenerateResponse(text="pon\n", finish=Finish(reason=FinishReason.FINISH_REASON_STOP)),
    )

    def test_generate_prints_the_text(self, server: FakeServer) -> None:
        server.on("Generate", self.CHUNKS)
        result = bitmill(
            server, "generate", "Hi", "--max-tokens", "8", "--temperature", "0", "--stop", "a", "--stop", "b"
        )
        assert (result.exit_code, result.stdout, result.stderr) == (0, "Once üpon\n\n", "")
        request = server.only_call("Generate").request
        params = request.sampling_params
        assert (request.text, params.max_tokens, params.stop) == ("Hi", 8, ["a", "b"])
        assert params.HasField("temperature")
        assert not params.HasField("ignore_eos")

    def test_generate_reads_standard_input(self, server: FakeServer) -> None:
        server.on("Generate", self.CHUNKS)
        bitmill(server, "generate", "-", stdin="from a pipe")
        assert server.only_call("Generate").request.text == "from a pipe"

    def test_generate_prints_a_chunk_before_the_next_one_comes(self, server: FakeServer) -> None:
        hang = Hang()
        server.on("Generate", [self.CHUNKS[0], hang, self.CHUNKS[1]])
        command = [sys.executable, "-m", "bitmill.cli", "generate", "Hi", "--inference", server.address]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as run:
            assert run.stdout is not None
            assert run.stdout.read(7).decode() == "Once ü"
            hang.release.set()
            assert run.communicate(timeout=60)[0].decode() == "pon\n\n"

    def test_json_prints_one_chunk_a_line(self, server: FakeServer) -> None:
        server.on("Generate", self.CHUNKS)
        chunks = [json.loads(line) for line in bitmill(server, "generate", "Hi", "--json").stdout.splitlines()]
        assert [chunk["text"] for chunk in chunks] == ["Once ü", "pon\n"]

    def test_chat_sends_the_system_message_first(self, server: FakeServer) -> None:
        server.on("Chat", [inference_pb.ChatResponse(content="Hello.")])
        result = bitmill(server, "chat", "Hi", "--system", "be brief", "--model", "m", "--top-k", "5")
        assert result.stdout == "Hello.\n"
        request = server.only_call("Chat").request
        assert [(message.role, message.content) for message in request.messages] == [
            ("system", "be brief"),
            ("user", "Hi"),
        ]
        assert (request.model, request.sampling_params.top_k) == ("m", 5)

    def test_chat_without_a_terminal_reads_the_message(self, server: FakeServer) -> None:
        server.on("Chat", [inference_pb.ChatResponse(content="Hello.")])
        bitmill(server, "chat", stdin="from a pipe")
        assert server.only_call("Chat").request.messages[0].content == "from a pipe"

    def test_an_error_in_the_middle_leaves_what_came_and_exits_with_1(self, server: FakeServer) -> None:
        server.on("Generate", [self.CHUNKS[0], errors.InternalError("ENGINE_DEAD", "the engine died")])
        result = bitmill(server, "generate", "Hi")
        assert (result.exit_code, result.stdout) == (1, "Once ü")
        assert "ENGINE_DEAD" in result.stderr

    def test_every_option_reaches_the_server(self, server: FakeServer, tmp_path: Path) -> None:
        server.on("Generate", self.CHUNKS)
        schema = tmp_path / "schema.json"
        schema.write_text('{"type": "string"}')
        flags = "--n 1 --logit-bias 5=-100 --logit-bias 7=1.5 --prompt-logprobs 0 --bad-word x --stop-token-id 3"
        more = "--allowed-token-id 1 --allowed-token-id 2 --truncate-prompt-tokens 9 --thinking-token-budget 4"
        yet = "--no-skip-special-tokens --no-detokenize --stream-interval 2 --logprob-token-id 6"
        queue = "--adapter a --priority -3 --cache-salt s --session-id c --request-id r1"
        options = " ".join([flags, more, yet, queue]).split()
        result = bitmill(server, "generate", "Hi", "--json-schema", str(schema), *options)
        assert result.exit_code == 0, result.output
        call = server.only_call("Generate")
        assert call.request.sampling_params == SamplingParams(
            n=1, logit_bias={5: -100, 7: 1.5}, prompt_logprobs=0, bad_words=["x"], stop_token_ids=[3],
            allowed_token_ids=[1, 2], truncate_prompt_tokens=9, thinking_token_budget=4, skip_special_tokens=False,
            detokenize=False, stream_interval=2, logprob_token_ids=[6],
            structured_outputs=StructuredOutputs(json_schema='{"type": "string"}'),
        )  # fmt: skip
        assert call.request.request_options == RequestOptions(adapter="a", priority=-3, cache_salt="s", session_id="c")
        assert call.metadata["x-request-id"] == "r1"

    @pytest.mark.parametrize(
        ("arguments", "form"),
        [
            (["--json-object"], StructuredOutputs(json_object=True)),
            (["--regex", "a+"], StructuredOutputs(regex="a+")),
            (["--choice", "yes", "--choice", "no"], StructuredOutputs(choice=Choices(texts=["yes", "no"]))),
        ],
    )
    def test_forms_of_output(self, server: FakeServer, arguments: list[str], form: StructuredOutputs) -> None:
        server.on("Generate", self.CHUNKS)
        bitmill(server, "generate", "Hi", *arguments)
        assert server.only_call("Generate").request.sampling_params.structured_outputs == form

    def test_several_sequences_are_printed_each_in_one_piece(self, server: FakeServer) -> None:
        stop = Finish(reason=FinishReason.FINISH_REASON_STOP)
        server.on(
            "Generate",
            [
                inference_pb.GenerateResponse(index=0, text="a"),
                inference_pb.GenerateResponse(index=1, text="b"),
                inference_pb.GenerateResponse(index=1, text="d", finish=stop),
                inference_pb.GenerateResponse(index=0, text="c", finish=stop),
            ],
        )
        assert bitmill(server, "generate", "Hi", "--n", "2").stdout == "[1] bd\n[0] ac\n"


class TestChat:
    STOP = Finish(reason=FinishReason.FINISH_REASON_STOP)

    def test_tools_and_the_templates_values_reach_the_server(self, server: FakeServer, tmp_path: Path) -> None:
        server.on("Chat", [inference_pb.ChatResponse(content="ok", finish=self.STOP)])
        tools = tmp_path / "tools.json"
        tools.write_text(json.dumps([{"type": "function", "function": {"name": "f", "parameters": {}}}]))
        result = bitmill(
            server, "chat", "Hi", "--tools", str(tools), "--tool-choice", "required", "--no-parallel-tool-calls",
            "--chat-template-kwargs", '{"enable_thinking": false}',
        )  # fmt: skip
        assert result.exit_code == 0, result.output
        request = server.only_call("Chat").request
        assert list(request.tools) == [Tool(name="f", parameters_json_schema="{}")]
        assert request.tool_choice.mode == ToolChoiceMode.TOOL_CHOICE_MODE_REQUIRED
        assert request.HasField("parallel_tool_calls")
        assert dict(request.chat_template_kwargs) == {"enable_thinking": False}

    def test_calls_of_tools_follow_the_content_and_reasoning_goes_to_standard_error(self, server: FakeServer) -> None:
        deltas = [
            ToolCallDelta(index=0, id="c1", name="weather", arguments_json='{"city"'),
            ToolCallDelta(index=0, arguments_json=': "Ulm"}'),
            ToolCallDelta(index=1, id="c2", name="time", arguments_json="{}"),
        ]
        server.on(
            "Chat",
            [
                inference_pb.ChatResponse(reasoning="Hm"),
                inference_pb.ChatResponse(reasoning="m."),
                inference_pb.ChatResponse(content="Let me see."),
                *(inference_pb.ChatResponse(tool_calls=[delta]) for delta in deltas),
                inference_pb.ChatResponse(finish=self.STOP),
            ],
        )
        result = bitmill(server, "chat", "Hi")
        assert result.stdout == 'Let me see.\nweather({"city": "Ulm"})\ntime({})\n'
        assert result.stderr == "Hmm.\n"

    def test_a_message_that_only_calls_a_tool_begins_with_it(self, server: FakeServer) -> None:
        delta = ToolCallDelta(index=0, id="c1", name="time", arguments_json="{}")
        server.on("Chat", [inference_pb.ChatResponse(tool_calls=[delta], finish=self.STOP)])
        assert bitmill(server, "chat", "Hi").stdout == "time({})\n"

    def test_several_messages_are_printed_each_in_one_piece(self, server: FakeServer) -> None:
        chunks = [inference_pb.ChatResponse(index=i, content=f"m{i}", finish=self.STOP) for i in (1, 0)]
        server.on("Chat", chunks)
        assert bitmill(server, "chat", "Hi", "--n", "2").stdout == "[1] m1\n[0] m0\n"


class TestPooling:
    def test_embed_prints_a_row_for_each_text(self, server: FakeServer) -> None:
        vectors = [inference_pb.Embedding(values=[0.6, 0.8, 0, 0, 0]), inference_pb.Embedding(values=[1, 0])]
        server.on("Embed", inference_pb.EmbedResponse(embeddings=vectors))
        result = bitmill(server, "embed", "one", "two", "--model", "m", "--dimensions", "5", "--normalize")
        _, first, second = result.stdout.splitlines()
        assert first.split() == ["one", "5", "1.000", "0.6000", "0.8000", "0.0000", "0.0000", "…"]
        assert second.split() == ["two", "2", "1.000", "1.0000", "0.0000"]
        request = server.only_call("Embed").request
        assert (request.model, request.dimensions, request.normalize) == ("m", 5, True)
        assert not request.HasField("request_options")

    def test_embed_prints_whole_vectors_as_json(self, server: FakeServer) -> None:
        server.on("Embed", inference_pb.EmbedResponse(embeddings=[inference_pb.Embedding(values=[1, 0])]))
        assert json.loads(bitmill(server, "embed", "a", "--json").stdout)["embeddings"] == [{"values": [1.0, 0.0]}]

    def test_score_prints_the_best_first(self, server: FakeServer) -> None:
        server.on("Score", inference_pb.ScoreResponse(scores=[0.25, 0.75]))
        result = bitmill(server, "score", "q", "worse", "better", "--adapter", "a")
        assert [line.split() for line in result.stdout.splitlines()[1:]] == [["0.7500", "better"], ["0.2500", "worse"]]
        request = server.only_call("Score").request
        assert (request.query, list(request.documents)) == ("q", ["worse", "better"])
        assert request.request_options.adapter == "a"

    def test_a_model_of_another_task_is_one_clear_error(self, server: FakeServer) -> None:
        server.on("Embed", errors.FailedPreconditionError("TASK_UNSUPPORTED", "m does not embed; it does: generate"))
        result = bitmill(server, "embed", "a")
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.startswith("error: FAILED_PRECONDITION TASK_UNSUPPORTED: m does not embed")


def test_abort_tells_how_many_calls_it_ended(server: FakeServer) -> None:
    server.on("Abort", inference_pb.AbortResponse(aborted_calls=1))
    assert bitmill(server, "abort", "r1", "r2").stdout == "aborted 1 call\n"
    assert list(server.only_call("Abort").request.request_ids) == ["r1", "r2"]
    assert json.loads(bitmill(server, "abort", "r1", "--json").stdout) == {"abortedCalls": 1}
