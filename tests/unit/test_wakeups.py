"""The event loop of a server is woken once for a burst of gRPC's events."""

from __future__ import annotations

import socket
import subprocess
import sys

from bitmill_common.wakeups import drained_wakeups

SERVER_SCRIPT = """
import asyncio, gc
from bitmill_common.server import GrpcServer
from bitmill_common.wakeups import DrainedSocket

async def main():
    server = GrpcServer([])
    print(sum(isinstance(found, DrainedSocket) for found in gc.get_objects()))

asyncio.run(main())
"""


def test_a_read_takes_all_that_is_there() -> None:
    """However many bytes were written, and only on the end that is read."""
    with drained_wakeups():
        read, write = socket.socketpair()
    with read, write:
        write.sendall(b"abc")
        assert read.recv(1) == b"abc"
        read.sendall(b"abc")
        assert write.recv(1) == b"a"


def test_other_pairs_are_as_ever() -> None:
    """The change ends with the call that it is made for."""
    with drained_wakeups():
        pass
    read, write = socket.socketpair()
    with read, write:
        write.sendall(b"abc")
        assert read.recv(1) == b"a"


def test_a_server_has_it() -> None:
    """grpc.aio, which a server is the first to use in its process, took the pair."""
    answer = subprocess.run([sys.executable, "-c", SERVER_SCRIPT], check=True, capture_output=True, timeout=60)
    assert answer.stdout.strip() == b"1"
