"""smg's servicer of vLLM's contract, on a `VllmEngine`. Importing it imports vLLM."""

from __future__ import annotations

import logging
import time
import weakref
from typing import Any

from smg_grpc_servicer.vllm.servicer import VllmEngineServicer

from bitmill_inference.vllm.engine import VllmEngine
from bitmill_inference.vllm.structured import check_patterns

# Its line for each request says what the call's own line does.
logging.getLogger("smg_grpc_servicer").setLevel(logging.WARNING)


class SmgServicer(VllmEngineServicer):
    """smg's, but for two things that it reports, the model's name and the engine's load, and for one that it refuses.

    The name would be the model's directory, which differs between the hosts that a gateway routes to. The load would
    come from vLLM's stat loggers, which bitmill does not have.
    """

    def __init__(self, engine: VllmEngine, model: str) -> None:
        super().__init__(engine.async_llm, start_time=time.time())
        self._model_name = model
        # Whoever keeps servicers by engine must not keep the engine through its servicer.
        self._engine_load = weakref.WeakMethod(engine.load)

    async def GetModelInfo(self, request: Any, context: Any) -> Any:  # noqa: N802  # the name in the proto
        """smg's answer, with the name."""
        info = await super().GetModelInfo(request, context)
        info.served_model_name = self._model_name
        return info

    @staticmethod
    def _sampling_params_from_proto(*arguments: Any, **named: Any) -> Any:
        params = VllmEngineServicer._sampling_params_from_proto(*arguments, **named)
        if params.structured_outputs is not None:
            check_patterns(params.structured_outputs)
        return params

    def _scheduler_counts(self, engine_idx: int = 0) -> tuple[int, int, float] | None:
        read_load = self._engine_load()
        # The engine's load is that of all its cores; smg has an entry for each, or none.
        if engine_idx or read_load is None:
            return None
        load = read_load()
        return load.running, load.waiting, load.kv_cache_usage
