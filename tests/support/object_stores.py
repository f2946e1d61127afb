"""Real object stores for tests: moto's S3 server over HTTP, and an S3 server that fails as it is told."""

from __future__ import annotations

import contextlib
import http.server
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import boto3
from moto.server import ThreadedMotoServer

from bitmill_common.stores import StoreOptions

ACCESS_KEY_ID = "testing"
SECRET_ACCESS_KEY = "not-to-be-seen"


@dataclass(frozen=True)
class S3Server:
    """An S3 server. `client` is boto3's, to look at the server from another side than the code under test."""

    endpoint: str
    client: Any

    @property
    def options(self) -> StoreOptions:
        """What reaches it."""
        return s3_options(self.endpoint)

    def create_bucket(self) -> str:
        """Creates an empty bucket and returns its name."""
        bucket = f"test-{uuid.uuid4().hex}"
        self.client.create_bucket(Bucket=bucket)
        return bucket


def s3_options(endpoint: str) -> StoreOptions:
    """Options with the credentials of the tests."""
    return StoreOptions(
        s3_endpoint=endpoint,
        s3_region="us-east-1",
        s3_access_key_id=ACCESS_KEY_ID,
        s3_secret_access_key=SECRET_ACCESS_KEY,
        s3_allow_http=True,
    )


@contextlib.contextmanager
def run_s3_server() -> Iterator[S3Server]:
    """Runs moto's server on a free port."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        _, port = server.get_host_and_port()
        endpoint = f"http://127.0.0.1:{port}"
        client = boto3.client(
            "s3",
            endpoint_url=endpoint,
            region_name="us-east-1",
            aws_access_key_id=ACCESS_KEY_ID,
            aws_secret_access_key=SECRET_ACCESS_KEY,
        )
        yield S3Server(endpoint, client)
    finally:
        server.stop()


@dataclass(frozen=True)
class Request:
    """What an HTTP client asked for: its method, and its target with the query."""

    method: str
    target: str


@dataclass(frozen=True)
class Answer:
    """What an HTTP server answers."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def run_scripted_server(answer: Callable[[Request], Answer]) -> Iterator[tuple[str, list[Request]]]:
    """Runs a server that answers by `answer`; yields its endpoint and the requests that it got so far."""
    requests: list[Request] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            request = Request(self.command, self.path)
            requests.append(request)
            reply = answer(request)
            self.send_response(reply.status)
            for name, value in {"Content-Length": str(len(reply.body)), **reply.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(reply.body)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer  # noqa: N815 (names of the base class)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (name of the base class)
            """Keeps the test output clean."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", requests
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
