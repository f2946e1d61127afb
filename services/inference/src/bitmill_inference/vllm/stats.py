"""What a vLLM engine does at the moment, at the least cost for the steps that it reports."""

from __future__ import annotations

from typing import Any

from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.stats import SchedulerStats

from bitmill_inference.ports import EngineLoad


class VllmStats:
    """Reads what each step of the engine core brings: the tokens, and the scheduler's numbers after it.

    The engine core sends the latter only to an engine that logs stats. vLLM would then also account for every token of
    every request in this process, on the event loop that streams them; that half is turned off here, so this must be
    made before the engine's output handler starts. Counting where the outputs arrive also covers the requests of
    others who use the engine.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        self._num_unfinished = llm.output_processor.get_num_unfinished_requests
        self._last: dict[int, SchedulerStats] = {}
        self._prompt_tokens = 0
        self._generation_tokens = 0
        llm.log_stats = llm.output_processor.log_stats = llm.output_processor.lora_states.log_stats = False
        llm.logger_manager = None
        core: Any = llm.engine_core
        self._get_output = core.get_output_async
        core.get_output_async = self._get_observed_output

    def load(self, entering: int) -> EngineLoad:
        """Returns the load. With data parallelism, the sums of the engine cores and the mean use of their caches.

        Running and waiting together are the requests that this process has not finished, which of them run is what the
        last step said, and `entering` that vLLM does not know yet.
        """
        unfinished = self._num_unfinished()
        last = self._last.values()
        running = min(sum(stats.num_running_reqs for stats in last), unfinished)
        return EngineLoad(
            running=running,
            waiting=unfinished - running + entering,
            kv_cache_usage=sum(stats.kv_cache_usage for stats in last) / max(len(last), 1),
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
        )

    async def _get_observed_output(self) -> EngineCoreOutputs:
        outputs: EngineCoreOutputs = await self._get_output()
        tokens = 0
        for output in outputs.outputs:
            tokens += len(output.new_token_ids)
            # Comes with a request's first output.
            if output.prefill_stats is not None:
                self._prompt_tokens += output.prefill_stats.num_prompt_tokens
        self._generation_tokens += tokens
        if outputs.scheduler_stats is not None:
            self._last[outputs.engine_index] = outputs.scheduler_stats
        return outputs
