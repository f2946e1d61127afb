"""Adapters in vLLM: known to every engine core, and named by each request that uses one."""

from __future__ import annotations

import contextlib

from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from bitmill_common.errors import FailedPreconditionError, InternalError, UnavailableError
from bitmill_inference.ports import LocalAdapter
from bitmill_inference.vllm.answers import answered
from bitmill_inference.vllm.errors import core_is_dead

# How an engine core's client wraps what a call in the core raised: vllm/v1/engine/core.py.
_FAILED = "Call to add_lora method failed: "


def lora_request(adapter: LocalAdapter | None) -> LoRARequest | None:
    """What a request with this adapter says to vLLM."""
    if adapter is None:
        return None
    # vLLM tells adapters in a batch apart by their names, and a name may come back with other files.
    return LoRARequest(f"{adapter.name}-{adapter.adapter_id}", adapter.adapter_id, str(adapter.directory))


async def add_adapter(llm: AsyncLLM, adapter: LocalAdapter) -> None:
    """See `Engine.add_adapter`."""
    try:
        await answered(llm.add_lora(lora_request(adapter)), lambda: core_is_dead(llm))
    except UnavailableError:
        raise
    except EngineDeadError as error:
        raise UnavailableError("ENGINE_DIED", "the engine of this model has died") from error
    # The engine core's client knows no other class for what the core's libraries raise.
    except Exception as error:
        with contextlib.suppress(Exception):
            # One that was refused half-way would be there all the same, and fail the first step that uses it.
            await answered(llm.remove_lora(adapter.adapter_id), lambda: core_is_dead(llm))
        reason = str(error).removeprefix(_FAILED)
        message = f"vLLM does not take the adapter {adapter.name!r}: {reason}"
        raise FailedPreconditionError("ADAPTER_REFUSED", message, {"reason": reason}) from error


async def remove_adapter(llm: AsyncLLM, adapter: LocalAdapter) -> None:
    """See `Engine.remove_adapter`."""
    try:
        # False for one that the engine has forgotten because others were used more recently.
        await answered(llm.remove_lora(adapter.adapter_id), lambda: core_is_dead(llm))
    except UnavailableError:
        raise
    except EngineDeadError as error:
        raise UnavailableError("ENGINE_DIED", "the engine of this model has died") from error
    except Exception as error:
        raise InternalError("ADAPTER_NOT_REMOVED", f"vLLM could not remove the adapter: {error}") from error
