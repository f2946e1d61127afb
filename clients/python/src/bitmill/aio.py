"""The clients for asyncio: the calls of `bitmill.client`, awaited. Make a client inside a running event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

import grpc

from bitmill import errors, inference_calls, methods, model_calls, quantizer_calls
from bitmill.methods import Call, Sender, documented_by
from bitmill.quantizer.v1.quantization_job_pb2 import JobEvent, QuantizationJob
from bitmill.watching import JobWatch, succeeded

P = ParamSpec("P")
T = TypeVar("T")


class AsyncStream(Generic[T]):
    """The answers of a streaming call, as they come. Leaving its `async with` block, or `cancel`, ends the call."""

    def __init__(self, call: Any, answer: Callable[[Any], T], request_id: str) -> None:
        self._call = call
        self._responses = aiter(call)
        self._answer = answer
        self.request_id = request_id
        """The id under which the server's log has the call."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        try:
            response = await anext(self._responses)
        except grpc.RpcError as error:
            raise errors.from_rpc_error(error, self.request_id) from error
        return self._answer(response)

    def cancel(self) -> None:
        """Gives the call up; the server frees its place at once."""
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()


class AsyncClient:
    """One channel to one server; parameters as `bitmill.client.Client`."""

    def __init__(
        self,
        address: str,
        *,
        secure: grpc.ChannelCredentials | None = None,
        timeout: float | None = None,
        caller_id: str = "",
        metadata: Sequence[tuple[str, str | bytes]] = (),
        options: Sequence[tuple[str, str | int]] = (),
    ) -> None:
        self.address = methods.checked_address(address)
        self._sender = Sender(timeout, methods.checked_header("caller_id", caller_id), tuple(metadata))
        channel_options = methods.channel_options(options)
        if secure is None:
            self._channel = grpc.aio.insecure_channel(address, channel_options)
        else:
            self._channel = grpc.aio.secure_channel(address, secure, channel_options)

    async def close(self) -> None:
        """Closes the channel; calls that are still running end as cancelled."""
        await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _unary(self, call: Call[T]) -> T:
        request_id, sending = call.sending(self._sender)
        send = self._channel.unary_unary(
            call.method.path, type(call.request).SerializeToString, call.method.response.FromString
        )
        try:
            return call.answer(await send(call.request, **sending))
        except grpc.RpcError as error:
            raise errors.from_rpc_error(error, request_id) from error

    def _stream(self, call: Call[T]) -> AsyncStream[T]:
        request_id, sending = call.sending(self._sender)
        send = self._channel.unary_stream(
            call.method.path, type(call.request).SerializeToString, call.method.response.FromString
        )
        return AsyncStream(send(call.request, **sending), call.answer, request_id)

    async def _pages(self, call: Call[Sequence[T]]) -> AsyncIterator[T]:
        whole: Call[Any] = replace(call, answer=methods.whole)
        request: Any = call.request
        while True:
            page = await self._unary(whole)
            for item in call.answer(page):
                yield item
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token


def _unary(build: Callable[P, Call[T]]) -> Callable[Concatenate[AsyncClient, P], Awaitable[T]]:
    def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> Awaitable[T]:
        return self._unary(build(*args, **kwargs))

    return documented_by(build, method)


def _stream(build: Callable[P, Call[T]]) -> Callable[Concatenate[AsyncClient, P], AsyncStream[T]]:
    def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> AsyncStream[T]:
        return self._stream(build(*args, **kwargs))

    return documented_by(build, method)


def _pages(build: Callable[P, Call[Sequence[T]]]) -> Callable[Concatenate[AsyncClient, P], AsyncIterator[T]]:
    def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[T]:
        return self._pages(build(*args, **kwargs))

    return documented_by(build, method)


class AsyncQuantizerClient(AsyncClient):
    """Makes artifacts and reads them: QuantizerService and ArtifactService.

    ```
    async with AsyncQuantizerClient("127.0.0.1:50051") as quantizer:
        job = await quantizer.quantize("s3://models/smollm2", "smollm2-w4", scheme="W4A16", group_size=64)
        print((await quantizer.wait(job.job_id)).artifact_uri)
    ```
    """

    quantize = _unary(quantizer_calls.quantize)
    plan = _unary(quantizer_calls.plan)
    job = _unary(quantizer_calls.job)
    jobs = _pages(quantizer_calls.jobs)
    cancel = _unary(quantizer_calls.cancel)
    artifact = _unary(quantizer_calls.artifact)
    artifacts = _pages(quantizer_calls.artifacts)
    verify = _unary(quantizer_calls.verify)

    async def watch(
        self,
        job_id: str,
        *,
        after_sequence: int = 0,
        timeout: float | None = None,  # noqa: ASYNC109  # the deadline that the server sees too
        reconnect_timeout: float = 60.0,
        request_id: str = "",
    ) -> AsyncIterator[JobEvent]:
        """Iterates over a job's history and then over what happens, up to the event with the final state.

        A connection that is lost is made again, from the last event seen, until `reconnect_timeout` seconds have
        passed since the loss. `timeout` is the deadline of the whole watch; None: none.
        """
        watch = JobWatch(job_id, after_sequence, timeout, reconnect_timeout, request_id)
        while not watch.ended:
            lost: errors.UnavailableError | None = None
            try:
                async with self._stream(watch.call()) as events:
                    async for event in events:
                        if watch.accept(event):
                            yield event
            except errors.UnavailableError as error:
                lost = error
            if not watch.ended:
                await asyncio.sleep(watch.pause_after(lost))

    async def wait(
        self,
        job_id: str,
        *,
        timeout: float | None = None,  # noqa: ASYNC109  # the deadline that the server sees too
        check: bool = True,
        request_id: str = "",
    ) -> QuantizationJob:
        """Returns the job when it is final. With `check`, raises JobNotSucceededError when it did not succeed."""
        job = QuantizationJob()
        async for event in self.watch(job_id, timeout=timeout, request_id=request_id):
            job = event.job
        return succeeded(job) if check else job


class AsyncInferenceClient(AsyncClient):
    """Loads models and generates with them: ModelService and InferenceService.

    ```
    async with AsyncInferenceClient("127.0.0.1:50052") as inference:
        await inference.load_model("s3://artifacts/artifacts/smollm2-w4/0c…", name="smollm2")
        async for chunk in inference.generate("Once upon a time", max_tokens=64):
            print(chunk.text, end="", flush=True)
    ```
    """

    load_model = _unary(model_calls.load_model)
    unload_model = _unary(model_calls.unload_model)
    model = _unary(model_calls.model)
    models = _pages(model_calls.models)
    watch_model = _stream(model_calls.watch_model)
    set_alias = _unary(model_calls.set_alias)
    delete_alias = _unary(model_calls.delete_alias)
    load_adapter = _unary(model_calls.load_adapter)
    unload_adapter = _unary(model_calls.unload_adapter)
    sleep_model = _unary(model_calls.sleep_model)
    wake_model = _unary(model_calls.wake_model)
    load = _unary(model_calls.load)
    generate = _stream(inference_calls.generate)
    generate_unary = _unary(inference_calls.generate_unary)
    generate_text = _unary(inference_calls.generate_text)
    chat = _stream(inference_calls.chat)
    chat_unary = _unary(inference_calls.chat_unary)
    embed = _unary(inference_calls.embed)
    score = _unary(inference_calls.score)
    abort = _unary(inference_calls.abort)
    tokenize = _unary(inference_calls.tokenize)
    detokenize = _unary(inference_calls.detokenize)
