"""How long a watch goes on trying after it lost its connection."""

from __future__ import annotations

import grpc
import pytest

from bitmill import errors
from bitmill.quantizer.v1.quantization_job_pb2 import JobEvent
from bitmill.watching import JobWatch

LOST = errors.UnavailableError(errors.RpcStatus(grpc.StatusCode.UNAVAILABLE, "gone", request_id="r"))


class Clock:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(clock: Clock) -> JobWatch:
    """A watch that has seen one event and gives up after a minute."""
    watch = JobWatch("j", 0, None, 60, "", clock)
    watch.call()
    assert watch.accept(JobEvent(sequence=1))
    return watch


def test_the_time_to_reconnect_counts_from_the_loss_and_not_from_the_last_event(watch: JobWatch, clock: Clock) -> None:
    """A layer of a large model may take longer than the time to reconnect."""
    clock.now = 1000
    watch.pause_after(LOST)
    clock.now = 1059
    watch.call()
    watch.pause_after(LOST)
    clock.now = 1061
    watch.call()
    with pytest.raises(errors.UnavailableError):
        watch.pause_after(LOST)


def test_a_repeated_event_shows_that_the_server_is_back(watch: JobWatch, clock: Clock) -> None:
    watch.pause_after(LOST)
    clock.now = 50
    watch.call()
    assert not watch.accept(JobEvent(sequence=1))
    clock.now = 200
    assert watch.pause_after(LOST) > 0


def test_a_first_connection_that_fails_is_an_error_at_once(clock: Clock) -> None:
    watch = JobWatch("j", 0, None, 60, "", clock)
    watch.call()
    with pytest.raises(errors.UnavailableError):
        watch.pause_after(LOST)
