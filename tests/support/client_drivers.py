"""Runs one piece of test code with the synchronous or the asynchronous client, so that both pass one suite."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from bitmill import AsyncInferenceClient, AsyncQuantizerClient, InferenceClient, QuantizerClient


class SyncDriver:
    """Calls the synchronous clients."""

    def quantizer(self, address: str, use: Callable[[Any], Any], **options: Any) -> Any:
        return self._run(QuantizerClient, address, use, options)

    def inference(self, address: str, use: Callable[[Any], Any], **options: Any) -> Any:
        return self._run(InferenceClient, address, use, options)

    def _run(self, kind: Callable[..., Any], address: str, use: Callable[[Any], Any], options: dict[str, Any]) -> Any:
        with kind(address, **options) as client:
            result = use(client)
            return list(result) if isinstance(result, Iterator) or hasattr(result, "__next__") else result


class AsyncDriver:
    """Calls the asynchronous clients in an event loop of their own."""

    def quantizer(self, address: str, use: Callable[[Any], Any], **options: Any) -> Any:
        return asyncio.run(self._run(AsyncQuantizerClient, address, use, options))

    def inference(self, address: str, use: Callable[[Any], Any], **options: Any) -> Any:
        return asyncio.run(self._run(AsyncInferenceClient, address, use, options))

    async def _run(
        self, kind: Callable[..., Any], address: str, use: Callable[[Any], Any], options: dict[str, Any]
    ) -> Any:
        async with kind(address, **options) as client:
            result = use(client)
            if inspect.isawaitable(result):
                return await result
            if isinstance(result, AsyncIterator):
                return [item async for item in result]
            return result


Driver = SyncDriver | AsyncDriver
