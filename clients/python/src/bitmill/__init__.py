"""bitmill: typed clients, the command line, and the generated stubs of both services.

`QuantizerClient` and `InferenceClient` are synchronous; `AsyncQuantizerClient` and `AsyncInferenceClient` are for
asyncio. `bitmill.structured` makes forms of output, `bitmill.conversation` messages. Errors are in `bitmill.errors`;
the protobuf messages in `bitmill.{artifact,quantizer,inference}.v1`.
"""

from bitmill.aio import AsyncInferenceClient, AsyncQuantizerClient
from bitmill.client import InferenceClient, QuantizerClient
from bitmill.errors import BitmillError, BitmillRpcError, JobNotSucceededError

__all__ = [
    "AsyncInferenceClient",
    "AsyncQuantizerClient",
    "BitmillError",
    "BitmillRpcError",
    "InferenceClient",
    "JobNotSucceededError",
    "QuantizerClient",
]
