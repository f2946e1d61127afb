"""vLLM's exceptions as bitmill's."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from vllm.exceptions import MaxQueuedTokensError, QueueOverflowError, VLLMClientError, VLLMValidationError
from vllm.renderers.chat_utils import ChatTemplateResolutionError
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from bitmill_common.errors import (
    FailedPreconditionError,
    FieldViolation,
    InternalError,
    InvalidArgumentError,
    UnavailableError,
)
from bitmill_inference.requests.admission import QUEUE_FULL, QUEUE_TOKENS_FULL, RETRY_AFTER
from bitmill_inference.requests.sampling import SAMPLING_FIELD, SamplingParams

_SAMPLING_NAMES = frozenset(field.name for field in dataclasses.fields(SamplingParams))


@contextlib.contextmanager
def translated(path: str) -> Iterator[None]:
    """Turns vLLM's exceptions into bitmill's. `path` is the field to blame where vLLM does not name one."""
    try:
        yield
    except VLLMValidationError as error:
        field = f"{SAMPLING_FIELD}.{error.parameter}" if error.parameter in _SAMPLING_NAMES else path
        raise InvalidArgumentError([FieldViolation(field, str(error.args[0]))]) from error
    except VLLMClientError as error:
        raise InvalidArgumentError([FieldViolation(path, str(error))]) from error
    except ChatTemplateResolutionError as error:
        raise FailedPreconditionError("CHAT_TEMPLATE_MISSING", "the model has no chat template") from error
    except QueueOverflowError as error:
        raise UnavailableError(QUEUE_FULL, error.message, retry_after=RETRY_AFTER) from error
    except MaxQueuedTokensError as error:
        raise UnavailableError(QUEUE_TOKENS_FULL, error.message, retry_after=RETRY_AFTER) from error
    except EngineDeadError as error:
        raise UnavailableError("ENGINE_DIED", "the engine of this model has died") from error
    except EngineGenerateError as error:
        raise InternalError("GENERATION_FAILED", f"vLLM could not generate: {error.__cause__!r}") from error


def core_is_dead(llm: AsyncLLM) -> bool:
    """Whether an engine has lost its engine core, or one of several."""
    core: Any = llm.engine_core
    return bool(core.resources.engine_dead)
