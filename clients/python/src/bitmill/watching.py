"""Where a watcher of a job stands: what it has seen, and how long it goes on trying after a lost connection."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import grpc

from bitmill import errors
from bitmill.methods import WATCH_JOB, Call, checked_request_id
from bitmill.quantizer.v1.quantization_job_pb2 import JobEvent, JobState, QuantizationJob
from bitmill.quantizer.v1.quantizer_service_pb2 import WatchQuantizationJobRequest

FINAL_STATES = frozenset({JobState.JOB_STATE_SUCCEEDED, JobState.JOB_STATE_FAILED, JobState.JOB_STATE_CANCELLED})

_FIRST_PAUSE = 0.2
_LONGEST_PAUSE = 5.0


class JobWatch:
    """One job's history as far as it was seen; shared by the sync and the async client, which do the waiting.

    A connection that was lost is made again for `reconnect_timeout` seconds, counted from the loss, however long the
    job was silent before; one that never worked is an error at once. A new connection asks for the last event again:
    its answer shows that the server is back when nothing new has happened.
    """

    def __init__(
        self,
        job_id: str,
        after_sequence: int,
        timeout: float | None,
        reconnect_timeout: float,
        request_id: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job_id = job_id
        self._first_sequence = after_sequence
        self._sequence = after_sequence
        self._clock = clock
        self._deadline = math.inf if timeout is None else clock() + timeout
        self._reconnect_timeout = reconnect_timeout
        self._request_id = checked_request_id(request_id)
        self._heard = False
        self._lost_at: float | None = None
        self._pause = _FIRST_PAUSE
        self.ended = False

    def call(self) -> Call[JobEvent]:
        """Returns the call that goes on from the last event seen, with what is left of the watch's deadline."""
        self._heard = False
        after = max(self._sequence - 1, self._first_sequence)
        return Call(
            WATCH_JOB,
            WatchQuantizationJobRequest(job_id=self._job_id, after_sequence=after),
            {"timeout": self._remaining(), "request_id": self._request_id},
            lambda response: response.event,
        )

    def accept(self, event: JobEvent) -> bool:
        """Takes an event in; false for one that was seen already."""
        self._heard = True
        self._pause = _FIRST_PAUSE
        if event.sequence <= self._sequence:
            return False
        self._sequence = event.sequence
        self.ended = event.job.state in FINAL_STATES
        return True

    def pause_after(self, error: errors.UnavailableError | None) -> float:
        """Returns the seconds to wait before the next attempt; raises when it is not to be tried again.

        `error` is None for a stream that ended in order before the job did, as a server that stops may do.
        """
        error = error or errors.UnavailableError(
            errors.RpcStatus(
                grpc.StatusCode.UNAVAILABLE,
                f"the watch of job {self._job_id} ended before the job",
                request_id=self._request_id,
            )
        )
        now = self._clock()
        if self._heard:
            self._lost_at = now
        if self._lost_at is None or now > self._lost_at + self._reconnect_timeout:
            raise error
        pause = self._pause if error.retry_delay is None else error.retry_delay.total_seconds()
        self._pause = min(self._pause * 2, _LONGEST_PAUSE)
        return min(pause, _LONGEST_PAUSE, self._remaining())

    def _remaining(self) -> float:
        return max(0.0, self._deadline - self._clock())


def succeeded(job: QuantizationJob) -> QuantizationJob:
    """Returns a job that succeeded; raises `JobNotSucceededError` for another."""
    if job.state != JobState.JOB_STATE_SUCCEEDED:
        raise errors.JobNotSucceededError(job)
    return job
