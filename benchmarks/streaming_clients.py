"""The client process of one server: runs a round for each line of standard input, and writes what it measured.

    python benchmarks/streaming_clients.py {bitmill,vllm-grpc,vllm-http} ADDRESS MODEL_DIRECTORY

A line is a JSON list of two numbers, streams and tokens; the answer is a `Round` as a JSON object. Every client runs on
uvloop and parses every message; each speaks to its server in the fastest way there is in Python: grpc.aio, and aiohttp
with msgspec's JSON decoder. What a client can do before the round starts, such as tokenizing for the server that takes
token ids only, it does before.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict
from pathlib import Path

from streaming_round import Stream, prompt_of, run_round

MODEL_NAME = "bench"
MAX_STREAMS = 1024


@asynccontextmanager
async def bitmill(address: str, model: Path) -> AsyncIterator[Stream]:
    """bitmill.inference.v1.InferenceService.Generate: text in, text and token ids out."""
    import grpc

    from bitmill.inference.v1 import generation_pb2, inference_service_pb2, inference_service_pb2_grpc

    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)

        async def stream(index: int, tokens: int) -> AsyncIterator[int]:
            params = generation_pb2.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
            request = inference_service_pb2.GenerateRequest(
                model=MODEL_NAME, text=prompt_of(index), sampling_params=params
            )
            async for response in stub.Generate(request):
                _ = response.text
                yield len(response.token_ids)

        yield stream


@asynccontextmanager
async def vllm_grpc(address: str, model: Path) -> AsyncIterator[Stream]:
    """vllm.grpc.engine.VllmEngine.Generate: token ids in, token ids out."""
    import grpc
    from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids = [tokenizer.encode(prompt_of(index)).ids for index in range(MAX_STREAMS)]
    numbers = iter(range(10**9))
    async with grpc.aio.insecure_channel(address) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)

        async def stream(index: int, tokens: int) -> AsyncIterator[int]:
            request = vllm_engine_pb2.GenerateRequest(
                request_id=str(next(numbers)),
                tokenized={"input_ids": ids[index]},
                sampling_params={"temperature": 0, "max_tokens": tokens, "ignore_eos": True},
                stream=True,
            )
            async for response in stub.Generate(request):
                # The last message repeats the last chunk.
                if response.WhichOneof("response") == "chunk":
                    yield len(response.chunk.token_ids)

        yield stream


@asynccontextmanager
async def vllm_http(address: str, model: Path) -> AsyncIterator[Stream]:
    """OpenAI's /v1/completions: text in, text out as server-sent events. The token count comes with the last one."""
    import aiohttp
    import msgspec

    decode = msgspec.json.Decoder().decode
    url = f"http://{address}/v1/completions"
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def stream(index: int, tokens: int) -> AsyncIterator[int]:
            body = {
                "model": MODEL_NAME,
                "prompt": prompt_of(index),
                "temperature": 0,
                "max_tokens": tokens,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            chunks = 0
            async with session.post(url, json=body) as response:
                response.raise_for_status()
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    event = decode(line[6:])
                    if event["choices"]:
                        _ = event["choices"][0]["text"]
                        chunks += 1
                        yield 1
                    elif (count := event["usage"]["completion_tokens"]) != chunks:
                        # Several tokens can share an event; what the events before counted as one each.
                        yield count - chunks

        yield stream


CLIENTS: dict[str, Callable[[str, Path], AbstractAsyncContextManager[Stream]]] = {
    "bitmill": bitmill,
    "vllm-grpc": vllm_grpc,
    "vllm-http": vllm_http,
}


async def serve_rounds(server: str, address: str, model: Path) -> None:
    """See the module's documentation."""
    loop = asyncio.get_running_loop()
    async with CLIENTS[server](address, model) as stream:
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            streams, tokens = json.loads(line)
            print(json.dumps(asdict(await run_round(stream, streams, tokens))), flush=True)


if __name__ == "__main__":
    import uvloop

    uvloop.run(serve_rounds(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
