"""The dry run: everything that can be known about a job before it runs, and everything that stands in its way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bitmill_common.artifact import DeviceSupport
from bitmill_common.checkpoint import Checkpoint, inspect_checkpoint
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
from bitmill_quantizer import layers, preflight, specs
from bitmill_quantizer.ports import Engine, Host
from bitmill_quantizer.preflight import Estimate, Problem
from bitmill_quantizer.schemes import devices_for
from bitmill_quantizer.specs import QuantizationSpec, SpecDraft

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


@dataclass(frozen=True)
class Planner:
    """Plans against the stores, the engine and the machine that jobs will really use."""

    sources: Stores
    artifacts: ObjectStore
    engine: Engine
    host: Host
    work_dir: Path

    def plan_draft(self, draft: SpecDraft) -> Plan:
        """Plans what a caller asked for, however wrong it is. `UnavailableError` when the store cannot be reached."""
        spec, violations = specs.complete(draft)
        return self._plan(spec, draft.source_uri, draft.calibration_uri, violations)

    def plan(self, spec: QuantizationSpec) -> Plan:
        """Plans a valid spec."""
        return self._plan(spec, spec.source_uri, spec.calibration.uri, [])

    def _plan(
        self, spec: QuantizationSpec | None, source_uri: str, calibration_uri: str, violations: list[FieldViolation]
    ) -> Plan:
        problems = [_problem_of(violation) for violation in violations]
        problems += _problems_of(self.engine.require_installed)
        source: ObjectStore | None = None
        checkpoint: Checkpoint | None = None

        def open_source() -> None:
            nonlocal source, checkpoint
            source = self.sources.open(source_uri, "spec.source_uri")
            checkpoint = inspect_checkpoint(source)

        wrong_fields = {violation.field for violation in violations}
        if "spec.source_uri" not in wrong_fields:
            problems += _problems_of(open_source, "spec.source_uri")
        if calibration_uri and "spec.calibration.uri" not in wrong_fields:
            problems += _problems_of(lambda: self._require_calibration(calibration_uri), "spec.calibration.uri")
        if checkpoint is None or source is None:
            return Plan(tuple(problems), spec)
        problems += preflight.checkpoint_problems(checkpoint)
        if spec is None:
            return Plan(tuple(problems), spec, checkpoint)
        problems += preflight.recipe_problems(checkpoint, spec.recipe, spec.calibration)
        return self._with_resources(problems, spec, source, checkpoint)

    def _with_resources(
        self, problems: list[Problem], spec: QuantizationSpec, source: ObjectStore, checkpoint: Checkpoint
    ) -> Plan:
        estimate = preflight.estimate(checkpoint, spec.recipe, spec.calibration)
        copy_bytes = 0 if source.local_path() else checkpoint.size_bytes
        disk_bytes = copy_bytes + estimate.artifact_size_bytes
        problems += self._resource_problems(estimate, disk_bytes)
        targets = layers.target_layers(checkpoint, spec.recipe.ignore)
        devices = devices_for(spec.recipe, targets.values())
        return Plan(tuple(problems), spec, checkpoint, estimate, disk_bytes, devices)

    def _require_calibration(self, uri: str) -> None:
        store, name = self.sources.open_file(uri, "spec.calibration.uri")
        try:
            store.head(name)
        except NotFoundError as error:
            raise NotFoundError("CALIBRATION_NOT_FOUND", f"there is no {uri}", {"uri": uri}) from error

    def _resource_problems(self, estimate: Estimate, disk_bytes: int) -> Iterator[Problem]:
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
        memory = self.host.memory_bytes()
        if memory < estimate.host_memory_bytes:
            yield Problem(
                "",
                "NOT_ENOUGH_MEMORY",
                f"the job needs about {estimate.host_memory_bytes} bytes of memory and the server has {memory} in all",
                ResourceExhaustedError,
                {"needed_bytes": str(estimate.host_memory_bytes), "memory_bytes": str(memory)},
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
