"""The dry run: everything that can be known about a job before it runs, and everything that stands in its way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from bitmill_common.artifact import Device, DeviceSupport
from bitmill_common.checkpoint import Checkpoint
from bitmill_common.errors import (
    BitmillError,
    FailedPreconditionError,
    FieldViolation,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    ResourceExhaustedError,
)
from bitmill_common.object_store import ObjectStore
from bitmill_common.stores import Stores
from bitmill_quantizer.jobs.job import JobPhase
from bitmill_quantizer.plans import engine_checks, estimates, preflight
from bitmill_quantizer.plans.durations import DurationEstimate, estimate_duration, works_of
from bitmill_quantizer.plans.estimates import Estimate, SchemeSize
from bitmill_quantizer.plans.layers import linear_layers, row_name
from bitmill_quantizer.plans.problems import Problem
from bitmill_quantizer.plans.reference_rates import REFERENCES
from bitmill_quantizer.plans.smoothing import smoothing_problems
from bitmill_quantizer.plans.sources import open_source
from bitmill_quantizer.plans.treatments import treat
from bitmill_quantizer.ports import CostHistory, Engine, Host, Verifier
from bitmill_quantizer.recipes import specs
from bitmill_quantizer.recipes.drafts import SpecDraft
from bitmill_quantizer.recipes.engines import DEFAULT_ENGINE
from bitmill_quantizer.recipes.specs import QuantizationSpec

# What a caller can put right; anything else (a store that cannot be reached) is no finding but a failed call.
_REFUSALS = (NotFoundError, PermissionDeniedError, FailedPreconditionError)


@dataclass(frozen=True)
class Plan:
    """What is known. What a problem kept from being known is None. Sizes in bytes."""

    problems: tuple[Problem, ...]
    spec: QuantizationSpec | None = None
    checkpoint: Checkpoint | None = None
    estimate: Estimate | None = None
    disk_bytes: int = 0
    devices: tuple[DeviceSupport, ...] = ()
    scheme_sizes: tuple[SchemeSize, ...] = ()
    skipped_modules: tuple[str, ...] = ()
    duration: DurationEstimate | None = None


@dataclass(frozen=True)
class Planner:
    """Plans against the stores, the engines by name and the machine that jobs will really use."""

    sources: Stores
    artifacts: ObjectStore
    engines: Mapping[str, Engine]
    host: Host
    work_dir: Path
    costs: CostHistory
    verifier: Verifier | None = None

    @property
    def device(self) -> Device:
        """The kind of device that engines work on here."""
        return Device.CUDA if self.host.has_cuda() else Device.CPU

    def plan_draft(self, draft: SpecDraft) -> Plan:
        """Plans what a caller asked for, however wrong it is. `UnavailableError` when the store cannot be reached."""
        spec, violations = specs.complete(draft)
        engine = draft.engine or DEFAULT_ENGINE
        # As jobs will have it: a slash at the end does not make a directory of what ends as a GGUF file does.
        source_uri = spec.source_uri if spec else draft.source_uri
        return self._plan(spec, engine, source_uri, draft.calibration.uri, violations)

    def plan(self, spec: QuantizationSpec) -> Plan:
        """Plans a valid spec."""
        return self._plan(spec, spec.engine, spec.source_uri, spec.calibration.uri, [])

    def _plan(
        self,
        spec: QuantizationSpec | None,
        engine: str,
        source_uri: str,
        calibration_uri: str,
        violations: list[FieldViolation],
    ) -> Plan:
        problems = [_problem_of(violation) for violation in violations]
        if engine in self.engines:
            problems += _problems_of(self.engines[engine].require_installed)
            problems += engine_checks.device_problems(engine, self.host)
        if self.verifier is not None:
            problems += _problems_of(self.verifier.require_installed)
        source: ObjectStore | None = None
        checkpoint: Checkpoint | None = None

        def inspect() -> None:
            nonlocal source, checkpoint
            opened = open_source(self.sources, source_uri, "spec.source_uri")
            source, checkpoint = opened.store, opened.inspect()

        wrong_fields = {violation.field for violation in violations}
        if "spec.source_uri" not in wrong_fields:
            problems += _problems_of(inspect, "spec.source_uri")
        if calibration_uri and "spec.calibration.uri" not in wrong_fields:
            problems += _problems_of(lambda: self._require_calibration(calibration_uri), "spec.calibration.uri")
        if checkpoint is None or source is None:
            return Plan(tuple(problems), spec)
        layers = linear_layers(checkpoint)
        problems += preflight.checkpoint_problems(checkpoint, layers)
        if engine in self.engines:
            problems += engine_checks.checkpoint_problems(engine, checkpoint)
        sizes = estimates.scheme_sizes(checkpoint, layers)
        slow = list(preflight.pattern_problems(layers, spec.recipe)) if spec else []
        if spec is None or slow:
            return Plan((*problems, *slow), spec, checkpoint, scheme_sizes=sizes)
        treated = treat(layers, spec.recipe)
        problems += treated.problems
        problems += smoothing_problems(checkpoint, treated, spec.recipe)
        problems += preflight.budget_problems(checkpoint, layers, treated, spec.recipe)
        problems += preflight.length_problems(checkpoint, spec.calibration)
        device_memory = self.host.device_memory_bytes()
        estimate = estimates.estimate(checkpoint, layers, treated, spec.recipe, spec.calibration, device_memory)
        disk_bytes = estimate.artifact_size_bytes + (0 if source.local_path() else checkpoint.size_bytes)
        problems += self._space_problems(estimate, disk_bytes)
        problems += _memory_problems("memory", self.host.memory_bytes(), estimate.host_memory_bytes)
        if device_memory:
            problems += _memory_problems("GPU memory", device_memory, estimate.device_memory_bytes)
        return Plan(
            problems=tuple(problems),
            spec=spec,
            checkpoint=checkpoint,
            estimate=estimate,
            disk_bytes=disk_bytes,
            devices=estimates.served_on(checkpoint, spec.recipe, treated),
            scheme_sizes=sizes,
            skipped_modules=tuple(dict.fromkeys(map(row_name, treated.skipped))),
            duration=self._duration(spec, checkpoint, estimate),
        )

    def _duration(self, spec: QuantizationSpec, checkpoint: Checkpoint, estimate: Estimate) -> DurationEstimate | None:
        works = works_of(
            spec,
            self.device,
            self.artifacts.uri,
            parameters=checkpoint.num_parameters,
            source_bytes=checkpoint.size_bytes,
            artifact_bytes=estimate.artifact_size_bytes,
        )
        if self.verifier is None:
            works = tuple(work for work in works if work.phase is not JobPhase.VERIFY)
        return estimate_duration(works, REFERENCES[self.device], self.costs.recent)

    def _require_calibration(self, uri: str) -> None:
        store, name = self.sources.open_file(uri, "spec.calibration.uri")
        try:
            store.head(name)
        except NotFoundError as error:
            raise NotFoundError("CALIBRATION_NOT_FOUND", f"there is no {uri}", {"uri": uri}) from error

    def _space_problems(self, estimate: Estimate, disk_bytes: int) -> Iterator[Problem]:
        needs = [(self.work_dir, disk_bytes)]
        artifact_root = self.artifacts.local_path()
        if artifact_root is not None:
            needs.append((artifact_root, estimate.artifact_size_bytes))
        for directory, needed in needs:
            free = self.host.free_disk_bytes(directory)
            if free < needed:
                yield Problem(
                    "",
                    "NO_SPACE",
                    f"the job needs about {needed} bytes of disk and the server has {free} free",
                    ResourceExhaustedError,
                    {"needed_bytes": str(needed), "free_bytes": str(free)},
                )
                break


def _memory_problems(what: str, there: int, needed: int) -> Iterator[Problem]:
    if there < needed:
        yield Problem(
            "",
            "NOT_ENOUGH_MEMORY",
            f"the job needs about {needed} bytes of {what} and the server has {there} in all",
            ResourceExhaustedError,
            {"needed_bytes": str(needed), "memory_bytes": str(there)},
        )


def _problem_of(violation: FieldViolation) -> Problem:
    return Problem(violation.field, violation.reason, violation.description, InvalidArgumentError)


def _problems_of(call: Callable[[], None], field: str = "") -> list[Problem]:
    try:
        call()
    except InvalidArgumentError as error:
        return [_problem_of(violation) for violation in error.violations]
    except _REFUSALS as error:
        return [_refusal(error, field)]
    return []


def _refusal(error: BitmillError, field: str) -> Problem:
    return Problem(field, error.reason, error.message, type(error), error.metadata)
