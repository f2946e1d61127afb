"""What an engine tells of GPTQ's work: progress by decoder layer, and the row of each layer. Pure; no torch."""

from __future__ import annotations

import math
import re
import threading
from typing import Any

from bitmill_engine_kit.plan import AS_IT_IS, Plan
from bitmill_engine_kit.protocol import EngineError, EventWriter

_LAYER = re.compile(r"(?P<layer>.*\blayers\.\d+)\..+")


class RoundingReport:
    """Collects what became of each layer of a plan, and tells of each decoder layer that is done. Any thread may add.

    Use: `start()`, then `add` for each layer that is rounded, then `modules()`.
    """

    def __init__(self, plan: Plan, dampening_frac: float, events: EventWriter) -> None:
        self._plan = plan
        self._dampening_frac = dampening_frac
        self._events = events
        self._lock = threading.Lock()
        self._losses: dict[str, float] = {}
        self._dampings: dict[str, float] = {}
        self._waiting: dict[str, set[str]] = {}
        for name, layer in plan.items():
            waiting = self._waiting.setdefault(_decoder_layer(name), set())
            if layer.treatment != AS_IT_IS:
                waiting.add(name)
        self._total = len(self._waiting)
        self._waiting = {layer: names for layer, names in self._waiting.items() if names}

    def start(self) -> None:
        """Tell that the work begins; decoder layers of which nothing is rounded are done."""
        self._events.progress("quantize", self._total - len(self._waiting), self._total, "layers")

    def add(self, name: str, loss: float, damping: float) -> None:
        """Take a layer's loss, the squared error of its output per calibration sample, and the damping it needed.

        Raises EngineError NON_FINITE_WEIGHTS for a loss that is no number.
        """
        if not math.isfinite(loss):
            raise EngineError("NON_FINITE_WEIGHTS", f"{name} was rounded to what is no number", tensor=name)
        with self._lock:
            self._losses[name] = loss
            self._dampings[name] = damping
            decoder_layer = _decoder_layer(name)
            waiting = self._waiting[decoder_layer]
            waiting.remove(name)
            if waiting:
                return
            del self._waiting[decoder_layer]
            losses = [loss for other, loss in self._losses.items() if _decoder_layer(other) == decoder_layer]
            completed = self._total - len(self._waiting)
            mean = sum(losses) / len(losses)
            self._events.progress("quantize", completed, self._total, "layers", loss=mean)

    def modules(self) -> list[dict[str, Any]]:
        """The field `modules` of the result event. Raises EngineError ENGINE_ERROR when the library left layers out."""
        if self._waiting:
            left = sorted(name for names in self._waiting.values() for name in names)
            raise EngineError("ENGINE_ERROR", f"the library did not round {', '.join(left[:5])}", missing=len(left))
        return [self._row(name) for name in self._plan]

    def _row(self, name: str) -> dict[str, Any]:
        layer, damping = self._plan[name], self._dampings.get(name)
        grown = damping is not None and damping > self._dampening_frac
        remark = layer.remark or ("its Hessian inverted with more damping only" if grown else "")
        return {
            "name": name,
            "scheme": layer.treatment.scheme,
            "group_size": layer.treatment.group_size,
            "loss": self._losses.get(name),
            "dampening_frac": damping if grown else None,
            "remark": remark,
        }


def _decoder_layer(name: str) -> str:
    match = _LAYER.fullmatch(name)
    return match["layer"] if match else name
