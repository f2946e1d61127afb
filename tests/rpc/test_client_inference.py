"""Both inference clients against a real server: what they send and what they make of the answers."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from bitmill import errors as client_errors
from bitmill import structured
from bitmill.inference.v1 import inference_service_pb2 as inference_pb
from bitmill.inference.v1 import model_service_pb2 as model_pb
from bitmill.inference.v1.generation_pb2 import (
    ChatMessage,
    Finish,
    FinishReason,
    RepetitionDetection,
    RequestOptions,
    SamplingParams,
    Usage,
)
from bitmill.inference.v1.model_pb2 import Adapter, Model, ModelLoad, ModelState
from bitmill.inference.v1.structured_outputs_pb2 import StructuredOutputs
from bitmill.inference.v1.tool_pb2 import Tool, ToolCall, ToolChoice
from bitmill_common import errors
from support.client_drivers import AsyncDriver, Driver, SyncDriver
from support.fake_services import FakeServer, Hang


class TestRequests:
    def test_a_prompt_is_text_or_token_ids(self, server: FakeServer, driver: Driver) -> None:
        server.on("Generate", [inference_pb.GenerateResponse()])
        driver.inference(server.address, lambda client: client.generate("text", max_tokens=3, stop="\n"))
        driver.inference(server.address, lambda client: client.generate([1, 2, 3]))
        text, ids = (call.request for call in server.received["Generate"])
        assert (text.text, text.sampling_params.max_tokens, text.sampling_params.stop) == ("text", 3, ["\n"])
        assert list(ids.token_ids.ids) == [1, 2, 3]
        assert not ids.HasField("sampling_params")

    def test_a_conversation_is_text_or_messages(self, server: FakeServer, driver: Driver) -> None:
        server.on("ChatUnary", inference_pb.ChatUnaryResponse())
        messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
        driver.inference(server.address, lambda client: client.chat_unary("hi"))
        driver.inference(server.address, lambda client: client.chat_unary(messages))
        alone, whole = (call.request.messages for call in server.received["ChatUnary"])
        assert [(message.role, message.content) for message in alone] == [("user", "hi")]
        assert [(message.role, message.content) for message in whole] == [("system", "be brief"), ("user", "hi")]

    def test_tokenize_and_detokenize(self, server: FakeServer, driver: Driver) -> None:
        server.on("Tokenize", inference_pb.TokenizeResponse(token_ids=[5, 6], max_model_len=2048))
        server.on("Detokenize", inference_pb.DetokenizeResponse(text="hi"))
        tokens = driver.inference(server.address, lambda client: client.tokenize("hi", add_special_tokens=False))
        assert list(tokens.token_ids) == [5, 6]
        assert server.only_call("Tokenize").request.HasField("add_special_tokens")
        assert driver.inference(server.address, lambda client: client.detokenize([5, 6])) == "hi"

    def test_a_model_is_loaded_with_engine_options(self, server: FakeServer, driver: Driver) -> None:
        server.on("LoadModel", model_pb.LoadModelResponse(model=Model(name="m", state=ModelState.MODEL_STATE_SERVING)))
        model = driver.inference(
            server.address, lambda client: client.load_model("s3://b/a", name="m", max_model_len=512)
        )
        assert model.state == ModelState.MODEL_STATE_SERVING
        assert server.only_call("LoadModel").request.engine_options.max_model_len == 512


class TestStreams:
    def test_chunks_arrive_as_they_are_sent(self, server: FakeServer, driver: Driver) -> None:
        finish = Finish(reason=FinishReason.FINISH_REASON_STOP)
        chunks = [
            inference_pb.GenerateResponse(text="Once"),
            inference_pb.GenerateResponse(text=" upon", finish=finish, usage=Usage(completion_tokens=2)),
        ]
        server.on("Generate", chunks)
        assert driver.inference(server.address, lambda client: client.generate("x")) == chunks

    def test_leaving_a_stream_cancels_the_call(self, server: FakeServer) -> None:
        hang = Hang()
        server.on("Generate", [inference_pb.GenerateResponse(text="a"), hang])

        def use(client: Any) -> str:
            with client.generate("x") as stream:
                text = str(next(stream).text)
                assert hang.reached.wait(10)
                return text

        assert SyncDriver().inference(server.address, use) == "a"
        assert hang.release.wait(10)

    def test_leaving_an_async_stream_cancels_the_call(self, server: FakeServer) -> None:
        hang = Hang()
        server.on("Chat", [inference_pb.ChatResponse(content="a"), hang])

        async def use(client: Any) -> str:
            async with client.chat("x") as stream:
                content = str((await anext(stream)).content)
                assert await asyncio.to_thread(hang.reached.wait, 10)
                return content

        assert AsyncDriver().inference(server.address, use) == "a"
        assert hang.release.wait(10)


class TestGeneration:
    def test_every_option_reaches_the_server_on_the_stream_and_in_one_piece(
        self, server: FakeServer, driver: Driver
    ) -> None:
        server.on("Generate", [inference_pb.GenerateResponse()])
        server.on("GenerateUnary", inference_pb.GenerateUnaryResponse())
        options: dict[str, Any] = {
            "n": 2,
            "logit_bias": {5: -100, 7: 1.5},
            "prompt_logprobs": 0,
            "bad_words": ["x"],
            "truncate_prompt_tokens": 8,
            "structured_outputs": structured.regex("a+"),
            "repetition_detection": RepetitionDetection(max_pattern_size=4, min_count=3),
            "adapter": "a",
            "priority": -1,
            "cache_salt": "s",
            "session_id": "c",
        }
        driver.inference(server.address, lambda client: client.generate("x", model="m", **options))
        driver.inference(server.address, lambda client: client.generate_unary("x", model="m", **options))
        for method in ("Generate", "GenerateUnary"):
            request = server.only_call(method).request
            assert (request.model, request.text) == ("m", "x")
            assert request.sampling_params == SamplingParams(
                n=2,
                logit_bias={5: -100, 7: 1.5},
                prompt_logprobs=0,
                bad_words=["x"],
                truncate_prompt_tokens=8,
                structured_outputs=StructuredOutputs(regex="a+"),
                repetition_detection=RepetitionDetection(max_pattern_size=4, min_count=3),
            )
            assert request.request_options == RequestOptions(adapter="a", priority=-1, cache_salt="s", session_id="c")

    def test_a_conversation_goes_on_with_the_answers_of_tools(self, server: FakeServer, driver: Driver) -> None:
        """The message that the model said, and what its tool answered, go back as they are."""
        asked = ChatMessage(role="assistant", tool_calls=[ToolCall(id="c1", name="weather", arguments_json="{}")])
        server.on("ChatUnary", inference_pb.ChatUnaryResponse(choices=[inference_pb.ChatChoice(message=asked)]))
        weather = {"name": "weather", "description": "now", "parameters": {"type": "object"}}
        options = {
            "tools": [weather],
            "tool_choice": "weather",
            "parallel_tool_calls": False,
            "chat_template_kwargs": {"enable_thinking": False},
            "continue_final_message": True,
        }
        said = driver.inference(server.address, lambda client: client.chat_unary("hi", **options)).choices[0].message
        answer = {"role": "tool", "tool_call_id": "c1", "content": "rain"}
        driver.inference(server.address, lambda client: client.chat_unary([said, answer]))
        first, second = (call.request for call in server.received["ChatUnary"])
        assert list(first.tools) == [
            Tool(name="weather", description="now", parameters_json_schema='{"type": "object"}')
        ]
        assert first.tool_choice == ToolChoice(function_name="weather")
        assert first.HasField("parallel_tool_calls")
        assert not first.parallel_tool_calls
        assert dict(first.chat_template_kwargs) == {"enable_thinking": False}
        assert first.continue_final_message
        assert list(second.messages) == [asked, ChatMessage(role="tool", tool_call_id="c1", content="rain")]

    def test_abort_tells_how_many_calls_it_ended(self, server: FakeServer, driver: Driver) -> None:
        server.on("Abort", inference_pb.AbortResponse(aborted_calls=2))
        assert driver.inference(server.address, lambda client: client.abort("r1")) == 2
        assert driver.inference(server.address, lambda client: client.abort(["r1", "r2"])) == 2
        one, two = (list(call.request.request_ids) for call in server.received["Abort"])
        assert (one, two) == (["r1"], ["r1", "r2"])


class TestPooling:
    def test_inputs_are_texts_or_token_ids(self, server: FakeServer, driver: Driver) -> None:
        vectors = [inference_pb.Embedding(values=[0.5, 0.25]), inference_pb.Embedding(values=[1, 0])]
        server.on("Embed", inference_pb.EmbedResponse(embeddings=vectors))
        response = driver.inference(
            server.address,
            lambda client: client.embed(
                ["text", [1, 2]], model="m", dimensions=2, normalize=False, truncate_prompt_tokens=4, adapter="a"
            ),
        )
        assert [list(embedding.values) for embedding in response.embeddings] == [[0.5, 0.25], [1, 0]]
        request = server.only_call("Embed").request
        assert [(entry.text, list(entry.token_ids.ids)) for entry in request.inputs] == [("text", []), ("", [1, 2])]
        assert (request.dimensions, request.normalize, request.truncate_prompt_tokens) == (2, False, 4)
        assert request.HasField("normalize")
        assert request.request_options == RequestOptions(adapter="a")

    def test_text_alone_is_one_input_and_one_document(self, server: FakeServer, driver: Driver) -> None:
        server.on("Embed", inference_pb.EmbedResponse())
        server.on("Score", inference_pb.ScoreResponse(scores=[0.5]))
        driver.inference(server.address, lambda client: client.embed("text"))
        assert list(driver.inference(server.address, lambda client: client.score("q", "document")).scores) == [0.5]
        assert [entry.text for entry in server.only_call("Embed").request.inputs] == ["text"]
        request = server.only_call("Score").request
        assert (request.query, list(request.documents)) == ("q", ["document"])
        assert not request.HasField("request_options")

    def test_a_refusal_is_told_and_not_sent_again(self, server: FakeServer, driver: Driver) -> None:
        server.on("Embed", errors.UnavailableError("QUEUE_FULL", "full", retry_after=timedelta(0)))
        with pytest.raises(client_errors.UnavailableError):
            driver.inference(server.address, lambda client: client.embed("text"))
        assert len(server.received["Embed"]) == 1


class TestModels:
    def test_a_hot_swap_is_one_call(self, server: FakeServer, driver: Driver) -> None:
        server.on("LoadModel", model_pb.LoadModelResponse(model=Model(name="m-2", aliases=["m"])))
        model = driver.inference(
            server.address,
            lambda client: client.load_model(
                Path("/models/m"),
                name="m-2",
                aliases="m",
                unload_replaced=True,
                batch_timeout=timedelta(seconds=0.05),
                hf_overrides={"sliding_window": 4096},
            ),
        )
        assert list(model.aliases) == ["m"]
        request = server.only_call("LoadModel").request
        assert (request.uri, list(request.aliases), request.unload_replaced) == ("file:///models/m", ["m"], True)
        assert request.engine_options.batch_timeout.ToTimedelta() == timedelta(milliseconds=50)
        assert dict(request.engine_options.hf_overrides) == {"sliding_window": 4096}

    def test_aliases_are_set_and_deleted(self, server: FakeServer, driver: Driver) -> None:
        server.on("SetAlias", model_pb.SetAliasResponse(model=Model(name="m", aliases=["a"])))
        server.on("DeleteAlias", model_pb.DeleteAliasResponse())
        assert driver.inference(server.address, lambda client: client.set_alias("a", "m")).name == "m"
        assert driver.inference(server.address, lambda client: client.delete_alias("a")) is None
        assert server.only_call("SetAlias").request == model_pb.SetAliasRequest(alias="a", name="m")
        assert server.only_call("DeleteAlias").request.alias == "a"

    def test_adapters_are_loaded_and_unloaded(self, server: FakeServer, driver: Driver) -> None:
        server.on("LoadAdapter", model_pb.LoadAdapterResponse(adapter=Adapter(name="a", rank=8)))
        server.on("UnloadAdapter", model_pb.UnloadAdapterResponse())
        adapter = driver.inference(
            server.address,
            lambda client: client.load_adapter("s3://b/a", model="m", name="a", digest="sha256:0"),
        )
        driver.inference(server.address, lambda client: client.unload_adapter("a", model="m"))
        assert adapter.rank == 8
        assert server.only_call("LoadAdapter").request == model_pb.LoadAdapterRequest(
            model="m", name="a", uri="s3://b/a", digest="sha256:0"
        )
        assert server.only_call("UnloadAdapter").request == model_pb.UnloadAdapterRequest(model="m", name="a")

    def test_a_model_sleeps_and_wakes(self, server: FakeServer, driver: Driver) -> None:
        sleeping = Model(name="m", state=ModelState.MODEL_STATE_SLEEPING)
        server.on("SleepModel", model_pb.SleepModelResponse(model=sleeping))
        server.on("WakeModel", model_pb.WakeModelResponse(model=Model(name="m", state=ModelState.MODEL_STATE_SERVING)))
        slept = driver.inference(server.address, lambda client: client.sleep_model("m"))
        woken = driver.inference(server.address, lambda client: client.wake_model("m"))
        assert (slept.state, woken.state) == (ModelState.MODEL_STATE_SLEEPING, ModelState.MODEL_STATE_SERVING)

    def test_the_load_is_that_of_all_models_or_one(self, server: FakeServer, driver: Driver) -> None:
        report = model_pb.GetLoadResponse(loads=[ModelLoad(model="m", running_requests=3)])
        server.on("GetLoad", report)
        assert driver.inference(server.address, lambda client: client.load()) == report
        driver.inference(server.address, lambda client: client.load("m"))
        assert [call.request.model for call in server.received["GetLoad"]] == ["", "m"]

    def test_a_model_is_watched_until_unloaded(self, server: FakeServer, driver: Driver) -> None:
        states = [ModelState.MODEL_STATE_LOADING, ModelState.MODEL_STATE_UNLOADED]
        server.on("WatchModel", [model_pb.WatchModelResponse(model=Model(name="m", state=state)) for state in states])
        models = driver.inference(server.address, lambda client: client.watch_model("m"))
        assert [model.state for model in models] == states
