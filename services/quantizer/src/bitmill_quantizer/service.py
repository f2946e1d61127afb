"""What the quantizer does for its callers: create, plan, get, list, watch and cancel jobs."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import structlog

from bitmill_common.errors import (
    AlreadyExistsError,
    FieldViolation,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from bitmill_quantizer import paging
from bitmill_quantizer.jobs.job import Job, JobEvent, JobPosition, JobState
from bitmill_quantizer.plans import problems
from bitmill_quantizer.plans.planner import Plan, Planner
from bitmill_quantizer.ports import JobBoard
from bitmill_quantizer.recipes import specs
from bitmill_quantizer.recipes.drafts import SpecDraft
from bitmill_quantizer.recipes.specs import QuantizationSpec

MAX_REQUEST_ID_CHARACTERS = 128
WATCH_POLL_S = 0.3

Found = TypeVar("Found")

log = structlog.get_logger("bitmill.jobs")


@dataclass(frozen=True)
class JobPage:
    """One page of jobs, and the token of the next; an empty token ends the list."""

    jobs: Sequence[Job]
    next_page_token: str


class QuantizationService:
    """The use cases of jobs. All methods are coroutines; blocking work runs in threads."""

    def __init__(self, board: JobBoard, planner: Planner) -> None:
        self._board = board
        self._planner = planner
        self._stopping = asyncio.Event()

    def begin_stopping(self) -> None:
        """Ends every watch with `UnavailableError` SERVER_STOPPING, so that a drain need not wait for jobs."""
        self._stopping.set()

    async def plan(self, draft: SpecDraft) -> Plan:
        """Plans without creating anything. `UnavailableError` when the store cannot be reached."""
        return await asyncio.to_thread(self._planner.plan_draft, draft)

    async def create(self, request_id: str, draft: SpecDraft) -> Job:
        """Queues a job. The same `request_id` and spec return the same job, whatever has become of its source.

        `AlreadyExistsError` REQUEST_ID_REUSED for another spec; whatever stands in the way as `problems.raise_for`.
        """
        return await asyncio.to_thread(self._create, request_id, draft)

    def _create(self, request_id: str, draft: SpecDraft) -> Job:
        if len(request_id) > MAX_REQUEST_ID_CHARACTERS:
            text = f"has more than {MAX_REQUEST_ID_CHARACTERS} characters"
            raise InvalidArgumentError([FieldViolation("request_id", text, "TOO_LONG")])
        job_id = job_id_of(request_id)
        spec, _ = specs.complete(draft)
        if spec is not None and request_id and (existing := self._board.find(job_id)):
            return _require_same(existing, spec, request_id)
        plan = self._planner.plan_draft(draft)
        problems.raise_for(plan.problems)
        if plan.spec is None:
            raise AssertionError("a plan without problems has a spec")
        job = _require_same(self._board.submit(job_id, plan.spec), plan.spec, request_id)
        log.info("job_created", job_id=job_id, source_uri=job.spec.source_uri, scheme=job.spec.recipe.scheme.value)
        return job

    async def get(self, job_id: str) -> Job:
        """Returns a job. `NotFoundError` JOB_NOT_FOUND when there is none."""
        return _require_found(await asyncio.to_thread(self._board.find, _require_id(job_id)), job_id)

    async def list(self, page_size: int, page_token: str, states: Sequence[JobState]) -> JobPage:
        """Lists jobs, newest first. New jobs do not move the pages that follow; a job that changes its state between
        two pages of a filtered list may come in neither.
        """
        query = ",".join(sorted({state.value for state in states}))
        after = None
        if page_token:
            *times, job_id = paging.read_token(page_token, query, (int, int, str))
            created_ms, own_ms = map(paging.require_time, times)
            after = JobPosition((created_ms, own_ms, str(job_id)))
        page = await asyncio.to_thread(self._board.list, states, paging.page_size(page_size), after)
        token = paging.make_token(query, list(page.next_position.key)) if page.next_position else ""
        return JobPage(page.jobs, token)

    async def watch(self, job_id: str, after_sequence: int) -> AsyncGenerator[JobEvent, None]:
        """Yields a job's events after a sequence number, the last of which has the final state."""
        _require_id(job_id)
        while True:
            history = _require_found(await asyncio.to_thread(self._board.history, job_id, after_sequence), job_id)
            for event in history.events:
                yield event
                after_sequence = event.sequence
            if history.is_complete:
                return
            await self._pause()

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(WATCH_POLL_S):
                await self._stopping.wait()
        except TimeoutError:
            return
        raise UnavailableError("SERVER_STOPPING", "the server stops; watch again after the last sequence number")

    async def cancel(self, job_id: str) -> Job:
        """Asks a job to stop and returns it; one that is publishing or final is returned as it is."""
        await self.get(job_id)
        if await asyncio.to_thread(self._board.cancel, job_id):
            log.info("job_cancelled", job_id=job_id)
        return await self.get(job_id)


def job_id_of(request_id: str) -> str:
    """Returns the job id for a request id; a fresh one for an empty one."""
    return f"job-{hashlib.sha256(request_id.encode()).hexdigest()[:16] if request_id else secrets.token_hex(8)}"


def _require_id(job_id: str) -> str:
    if not job_id:
        raise InvalidArgumentError([FieldViolation("job_id", "is required", "REQUIRED")])
    return job_id


def _require_same(job: Job, spec: QuantizationSpec, request_id: str) -> Job:
    if job.spec != spec:
        raise AlreadyExistsError(
            "REQUEST_ID_REUSED",
            f"request_id {request_id} belongs to {job.job_id}, which has another spec",
            {"request_id": request_id, "job_id": job.job_id},
        )
    return job


def _require_found(found: Found | None, job_id: str) -> Found:
    if found is None:
        raise NotFoundError("JOB_NOT_FOUND", f"there is no job {job_id!r}", {"job_id": job_id})
    return found
