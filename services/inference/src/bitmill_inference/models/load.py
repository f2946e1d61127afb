"""How busy the models are, for balancers and metrics."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from bitmill_inference.models.model import ModelLoad
from bitmill_inference.models.model_entry import ModelUse
from bitmill_inference.models.models import Models
from bitmill_inference.ports import Engine, EngineLoad

WINDOW_S = 10.0
SAMPLE_INTERVAL_S = 1.0


class TokenRates:
    """Tokens per second over the last WINDOW_S seconds, from the counters of one engine and times in seconds."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int, int]] = deque()

    def sample(self, now: float, prompt_tokens: int, generation_tokens: int) -> None:
        """Notes the counters; to be called every SAMPLE_INTERVAL_S from the engine's start."""
        if not self._samples:
            # Whatever the engine has done was done since the sample before, which did not know it yet.
            self._samples.append((now - SAMPLE_INTERVAL_S, 0, 0))
        self._samples.append((now, prompt_tokens, generation_tokens))
        self._forget(now)

    def rates(self, now: float, prompt_tokens: int, generation_tokens: int) -> tuple[float, float]:
        """Returns prompt tokens and generated tokens per second; zeros before the first sample."""
        self._forget(now)
        if not self._samples:
            return 0.0, 0.0
        start, prompt_before, generation_before = self._samples[0]
        seconds = max(now - start, SAMPLE_INTERVAL_S)
        return (prompt_tokens - prompt_before) / seconds, (generation_tokens - generation_before) / seconds

    def _forget(self, now: float) -> None:
        while self._samples and self._samples[0][0] < now - WINDOW_S:
            self._samples.popleft()


@dataclass(frozen=True)
class ModelNumbers:
    """The load of a model, what its engine has counted since it started, and its refused calls by reason."""

    load: ModelLoad
    engine: EngineLoad
    refused: Mapping[str, int] = field(default_factory=dict)


_IDLE = EngineLoad(running=0, waiting=0, kv_cache_usage=0.0, prompt_tokens=0, generation_tokens=0)


class LoadReport:
    """What each model does at the moment. `clock` returns seconds."""

    def __init__(self, models: Models, clock: Callable[[], float] = time.monotonic) -> None:
        self._models = models
        self._clock = clock
        self._rates: WeakKeyDictionary[Engine, TokenRates] = WeakKeyDictionary()

    async def run(self) -> None:
        """Samples the token counters for as long as the server runs."""
        while True:
            self.sample()
            await asyncio.sleep(SAMPLE_INTERVAL_S)

    def sample(self) -> None:
        """Notes the token counters of every engine."""
        now = self._clock()
        for use in self._models.in_use():
            if use.engine is not None:
                load = use.engine.load()
                rates = self._rates.setdefault(use.engine, TokenRates())
                rates.sample(now, load.prompt_tokens, load.generation_tokens)

    def loads(self, model: str = "") -> list[ModelLoad]:
        """Returns the loads by model; of one model, by name or alias, when it is given. Raises `NotFoundError`."""
        return [numbers.load for numbers in self.numbers(model)]

    def numbers(self, model: str = "") -> list[ModelNumbers]:
        """As `loads`, with the counters."""
        return [self._numbers(use) for use in self._models.in_use(model)]

    def _numbers(self, use: ModelUse) -> ModelNumbers:
        engine = _IDLE if use.engine is None else use.engine.load()
        rates = TokenRates() if use.engine is None else self._rates.get(use.engine, TokenRates())
        per_second = rates.rates(self._clock(), engine.prompt_tokens, engine.generation_tokens)
        info = None if use.engine is None else use.engine.info
        load = ModelLoad(
            model=use.model.name,
            state=use.model.state,
            running_requests=engine.running,
            waiting_requests=engine.waiting + use.admission.window.num_held_sequences,
            kv_cache_usage=engine.kv_cache_usage,
            prompt_tokens_per_second=per_second[0],
            generation_tokens_per_second=per_second[1],
            refused_calls=use.admission.refused.total(),
            max_num_seqs=info.max_num_seqs if info else 0,
            max_num_queued_reqs=info.max_num_queued_reqs if info else 0,
        )
        return ModelNumbers(load, engine, dict(use.admission.refused))
