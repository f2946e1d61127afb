"""How long a job will take: a reference measurement, corrected by the jobs that this server has finished. Pure.

A phase's time is taken for the sum of a fixed part and of parts in proportion to parameters, to parameters times
tokens, and to bytes. What a server's own jobs took beside that is how much slower or faster it is than the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from urllib.parse import urlsplit

from bitmill_common.artifact import Device
from bitmill_common.recipes import Algorithm, Recipe
from bitmill_quantizer.jobs.job import JobPhase
from bitmill_quantizer.recipes.schemes import needs_calibration, treatments_of
from bitmill_quantizer.recipes.specs import QuantizationSpec

_ADAPTIVE, _AWQ, _GPTQ, _CALIBRATE, _RTN = "ADAPTIVE", "AWQ", "GPTQ", "CALIBRATE", "RTN"

MAX_SECONDS = 315_576_000_000
"""What google.protobuf.Duration holds."""

RECENT_JOBS = 5
"""How many of the last finished jobs of a kind are looked at."""


@dataclass(frozen=True)
class DurationEstimate:
    """Expected time from start to end in seconds, and for people what it is based on."""

    seconds: float
    basis: str


@dataclass(frozen=True)
class PhaseWork:
    """What a phase has to do. Work of one `kind` takes time in proportion to its numbers.

    `parameters` of the model, and `tokens` that all of them see; `num_bytes` that are read or written.
    """

    phase: JobPhase
    kind: str
    parameters: int = 0
    tokens: int = 0
    num_bytes: int = 0


@dataclass(frozen=True)
class FinishedWork:
    """What a phase of a finished job had to do, and how long it took."""

    job_id: str
    work: PhaseWork
    duration_s: float


@dataclass(frozen=True)
class Rates:
    """Seconds: of every run, for each parameter, for each parameter and token, and for each byte."""

    start_s: float = 0.0
    parameter_s: float = 0.0
    parameter_token_s: float = 0.0
    byte_s: float = 0.0

    def seconds(self, work: PhaseWork) -> float:
        """Returns the time for some work."""
        per_parameter = self.parameter_s + self.parameter_token_s * work.tokens
        return self.start_s + per_parameter * work.parameters + self.byte_s * work.num_bytes


@dataclass(frozen=True)
class Reference:
    """Rates by phase and kind, measured on `machine`."""

    machine: str
    rates: Mapping[tuple[JobPhase, str], Rates]


_PROPORTIONAL = Rates(parameter_s=1.0, parameter_token_s=1.0, byte_s=1.0)

Recall = Callable[[JobPhase, str, int], Sequence[FinishedWork]]
"""Returns the last finished work of a phase and a kind, the newest first: at most so many."""


def method_of(recipe: Recipe) -> str:
    """Returns what takes the time when a recipe is carried out: the slowest of all that it does."""
    algorithms = {treatment.algorithm for treatment in treatments_of(recipe)}
    if recipe.adaptive is not None:
        return _ADAPTIVE
    for algorithm, method in ((Algorithm.AWQ, _AWQ), (Algorithm.GPTQ, _GPTQ)):
        if algorithm in algorithms:
            return method
    return _CALIBRATE if needs_calibration(recipe) else _RTN


def works_of(
    spec: QuantizationSpec,
    device: Device,
    artifact_root: str,
    *,
    parameters: int,
    source_bytes: int,
    artifact_bytes: int,
) -> tuple[PhaseWork, ...]:
    """Returns the work of each phase that takes noticeable time. `device`: the kind that engines work on."""
    recipe, calibration = spec.recipe, spec.calibration
    place = f"{spec.engine} on {device.value}"
    tokens = calibration.num_samples * calibration.max_sequence_length if needs_calibration(recipe) else 0
    return (
        PhaseWork(JobPhase.FETCH, urlsplit(spec.source_uri).scheme, num_bytes=source_bytes),
        PhaseWork(JobPhase.QUANTIZE, f"{method_of(recipe)} by {place}", parameters, tokens),
        PhaseWork(JobPhase.EVALUATE, place, parameters, spec.evaluation_tokens),
        PhaseWork(JobPhase.SAVE, "", num_bytes=artifact_bytes),
        PhaseWork(JobPhase.VERIFY, device.value, num_bytes=artifact_bytes),
        PhaseWork(JobPhase.UPLOAD, urlsplit(artifact_root).scheme, num_bytes=artifact_bytes),
    )


def estimate_duration(works: Sequence[PhaseWork], reference: Reference, recall: Recall) -> DurationEstimate | None:
    """Estimates what some work will take, from finished jobs where there are any and else from the reference.

    None when neither tells of QUANTIZE. Another phase that neither tells of is left out, and the basis says so.
    """
    total, left_out = 0.0, []
    basis = f"a reference measurement on {reference.machine}, scaled by parameters, tokens and bytes"
    for work in works:
        rates = reference.rates.get((work.phase, work.kind))
        finished = recall(work.phase, work.kind, RECENT_JOBS)
        if rates is None and not finished:
            if work.phase is JobPhase.QUANTIZE:
                return None
            left_out.append(work.phase.value)
            continue
        if finished and work.phase is JobPhase.QUANTIZE:
            jobs = "1 job" if len(finished) == 1 else f"{len(finished)} jobs"
            basis = f"{jobs} of this kind that this server finished, the last {finished[0].job_id}"
        total += _seconds(work, rates or _PROPORTIONAL, finished)
    total = min(total, MAX_SECONDS)
    return DurationEstimate(total, f"{basis}; without {', '.join(left_out)}" if left_out else basis)


def _seconds(work: PhaseWork, rates: Rates, finished: Sequence[FinishedWork]) -> float:
    """Scales finished work by what the rates say of it and of this one."""
    expected = rates.seconds(work)
    ratios = [each.duration_s / rates.seconds(each.work) for each in finished if rates.seconds(each.work) > 0]
    return expected * median(ratios) if ratios else expected
