"""What the phases of a job work with, and what they leave to one another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bitmill_common import uris
from bitmill_common.errors import FailedPreconditionError
from bitmill_common.object_store import ObjectStore
from bitmill_common.stores import Stores
from bitmill_quantizer.jobs.job import Progress
from bitmill_quantizer.plans.planner import Planner
from bitmill_quantizer.ports import CostHistory, Engine, JobControl, Verifier


@dataclass(frozen=True)
class Workshop:
    """Everything that the phases work with. Without a `verifier` artifacts are published unverified, and say so."""

    sources: Stores
    artifacts: Stores
    artifact_root: str
    engines: Mapping[str, Engine]
    planner: Planner
    costs: CostHistory
    verifier: Verifier | None = None

    def artifact_store(self, path: str = "") -> ObjectStore:
        """Returns the store of the artifact root, or of a path below it."""
        return self.artifacts.open(uris.join(self.artifact_root, path), "artifact_root")


def require(path: Path) -> Path:
    """Returns a path that an earlier phase left; `FailedPreconditionError` WORK_LOST when it is gone."""
    if not path.exists():
        raise FailedPreconditionError(
            "WORK_LOST", f"{path}, which an earlier phase left, is gone: create the job again", {"path": str(path)}
        )
    return path


def byte_counter(total: int, control: JobControl) -> Callable[[int], None]:
    """Returns a function that takes how many more bytes are done, and that raises when the job is to end."""
    completed = 0

    def on_bytes(count: int) -> None:
        nonlocal completed
        control.check()
        completed += count
        control.report(Progress(min(completed, total), total, "bytes"))

    return on_bytes
