"""The synchronous clients. `bitmill.aio` has the same calls for asyncio.

Every call has a deadline, carries an x-request-id and raises the errors of `bitmill.errors`. Answers are the protobuf
messages of the contract. A client may be shared by threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

import grpc

from bitmill import errors, inference_calls, methods, model_calls, quantizer_calls
from bitmill.methods import Call, Sender, documented_by
from bitmill.quantizer.v1.quantization_job_pb2 import JobEvent, QuantizationJob
from bitmill.watching import JobWatch, succeeded

P = ParamSpec("P")
T = TypeVar("T")


class Stream(Generic[T]):
    """The answers of a streaming call, as they come. Leaving its `with` block, or `cancel`, ends the call."""

    def __init__(self, call: Any, answer: Callable[[Any], T], request_id: str) -> None:
        self._call = call
        self._answer = answer
        self.request_id = request_id
        """The id under which the server's log has the call."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        try:
            response = next(self._call)
        except grpc.RpcError as error:
            raise errors.from_rpc_error(error, self.request_id) from error
        return self._answer(response)

    def cancel(self) -> None:
        """Gives the call up; the server frees its place at once."""
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()


class Client:
    """One channel to one server; what both clients share.

    `secure` are channel credentials for TLS (`grpc.ssl_channel_credentials(...)`); without, the channel is plain text.
    `timeout` in seconds replaces the default deadline of every call but the watches. `caller_id` says who calls, for
    the bound that a server may set on each caller. `metadata` goes with every call; `options` are gRPC channel options
    that add to and win over this package's own.
    """

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
            self._channel = grpc.insecure_channel(address, channel_options)
        else:
            self._channel = grpc.secure_channel(address, secure, channel_options)

    def close(self) -> None:
        """Closes the channel; calls that are still running end as cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _unary(self, call: Call[T]) -> T:
        request_id, sending = call.sending(self._sender)
        send = self._channel.unary_unary(
            call.method.path, type(call.request).SerializeToString, call.method.response.FromString
        )
        try:
            return call.answer(send(call.request, **sending))
        except grpc.RpcError as error:
            raise errors.from_rpc_error(error, request_id) from error

    def _stream(self, call: Call[T]) -> Stream[T]:
        request_id, sending = call.sending(self._sender)
        send = self._channel.unary_stream(
            call.method.path, type(call.request).SerializeToString, call.method.response.FromString
        )
        return Stream(send(call.request, **sending), call.answer, request_id)

    def _pages(self, call: Call[Sequence[T]]) -> Iterator[T]:
        whole: Call[Any] = replace(call, answer=methods.whole)
        request: Any = call.request
        while True:
            page = self._unary(whole)
            yield from call.answer(page)
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token


def _unary(build: Callable[P, Call[T]]) -> Callable[Concatenate[Client, P], T]:
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._unary(build(*args, **kwargs))

    return documented_by(build, method)


def _stream(build: Callable[P, Call[T]]) -> Callable[Concatenate[Client, P], Stream[T]]:
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> Stream[T]:
        return self._stream(build(*args, **kwargs))

    return documented_by(build, method)


def _pages(build: Callable[P, Call[Sequence[T]]]) -> Callable[Concatenate[Client, P], Iterator[T]]:
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        return self._pages(build(*args, **kwargs))

    return documented_by(build, method)


class QuantizerClient(Client):
    """Makes artifacts and reads them: QuantizerService and ArtifactService.

    ```
    with QuantizerClient("127.0.0.1:50051") as quantizer:
        job = quantizer.quantize("s3://models/smollm2", "smollm2-w4", scheme="W4A16", group_size=64)
        print(quantizer.wait(job.job_id).artifact_uri)
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

    def watch(
        self,
        job_id: str,
        *,
        after_sequence: int = 0,
        timeout: float | None = None,
        reconnect_timeout: float = 60.0,
        request_id: str = "",
    ) -> Iterator[JobEvent]:
        """Iterates over a job's history and then over what happens, up to the event with the final state.

        A connection that is lost is made again, from the last event seen, until `reconnect_timeout` seconds have
        passed since the loss. `timeout` is the deadline of the whole watch; None: none.
        """
        watch = JobWatch(job_id, after_sequence, timeout, reconnect_timeout, request_id)
        while not watch.ended:
            lost: errors.UnavailableError | None = None
            try:
                with self._stream(watch.call()) as events:
                    for event in events:
                        if watch.accept(event):
                            yield event
            except errors.UnavailableError as error:
                lost = error
            if not watch.ended:
                time.sleep(watch.pause_after(lost))

    def wait(
        self, job_id: str, *, timeout: float | None = None, check: bool = True, request_id: str = ""
    ) -> QuantizationJob:
        """Returns the job when it is final. With `check`, raises JobNotSucceededError when it did not succeed."""
        job = QuantizationJob()
        for event in self.watch(job_id, timeout=timeout, request_id=request_id):
            job = event.job
        return succeeded(job) if check else job


class InferenceClient(Client):
    """Loads models and generates with them: ModelService and InferenceService.

    ```
    with InferenceClient("127.0.0.1:50052") as inference:
        inference.load_model("s3://artifacts/artifacts/smollm2-w4/0c…", name="smollm2")
        for chunk in inference.generate("Once upon a time", max_tokens=64):
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
