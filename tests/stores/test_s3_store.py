"""What is particular to `s3://`: multipart uploads, credentials, servers that refuse or fail."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from bitmill_common.errors import (
    BitmillError,
    FailedPreconditionError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
)
from bitmill_common.object_store import ObjectInfo, ObjectStore
from bitmill_common.stores import StoreOptions, Stores
from support.object_stores import (
    ACCESS_KEY_ID,
    SECRET_ACCESS_KEY,
    Answer,
    Request,
    S3Server,
    run_scripted_server,
    s3_options,
)

MIB = 2**20
STARTED = b"<InitiateMultipartUploadResult><UploadId>the-upload</UploadId></InitiateMultipartUploadResult>"


@pytest.fixture
def large_file(tmp_path: Path) -> Path:
    path = tmp_path / "large.bin"
    path.write_bytes(b"x" * (20 * MIB))
    return path


@pytest.fixture
def bucket(s3_server: S3Server) -> str:
    return s3_server.create_bucket()


def open_store(bucket: str, options: StoreOptions) -> ObjectStore:
    return Stores([f"s3://{bucket}"], options).open(f"s3://{bucket}/models", "uri")


def every_call(store: ObjectStore, tmp_path: Path) -> list[Callable[[], object]]:
    source = tmp_path / "source.bin"
    source.write_bytes(b"x" * (9 * MIB))
    return [
        lambda: list(store.list()),
        lambda: store.list_directories(),
        lambda: store.head("object"),
        lambda: store.read("object"),
        lambda: list(store.read_chunks("object")),
        lambda: store.write("object", b"content"),
        lambda: store.upload(source, "object"),
        lambda: store.download("object", tmp_path / "target"),
        lambda: store.delete("object"),
    ]


def uploads(server: S3Server, bucket: str) -> object:
    return server.client.list_multipart_uploads(Bucket=bucket).get("Uploads")


def test_a_large_file_is_a_multipart_upload(s3_server: S3Server, bucket: str, large_file: Path) -> None:
    """S3 marks the ETag of an object with the number of its parts."""
    store = open_store(bucket, s3_server.options)
    during: list[object] = []
    store.upload(large_file, "large", lambda count: during.append(uploads(s3_server, bucket)))
    assert during[0], "the upload is under way while parts arrive"
    assert uploads(s3_server, bucket) is None
    assert s3_server.client.head_object(Bucket=bucket, Key="models/large")["ETag"].endswith('-3"')


@pytest.mark.parametrize("failing_call", [1, 2, 3])
def test_an_upload_given_up_is_aborted(s3_server: S3Server, bucket: str, large_file: Path, failing_call: int) -> None:
    """Nothing is left that the bucket's owner would pay for."""
    calls: list[int] = []

    def on_bytes(count: int) -> None:
        calls.append(count)
        if len(calls) == failing_call:
            raise RuntimeError("given up")

    with pytest.raises(RuntimeError, match="given up"):
        open_store(bucket, s3_server.options).upload(large_file, "large", on_bytes)
    assert uploads(s3_server, bucket) is None
    assert "Contents" not in s3_server.client.list_objects_v2(Bucket=bucket)


def test_an_upload_whose_part_is_refused_is_aborted(large_file: Path) -> None:
    """A part that fails for good ends the upload with an abort, and without a completion."""

    def answer(request: Request) -> Answer:
        if request.method == "POST":
            return Answer(200, STARTED)
        if request.method == "PUT":
            return Answer(400, b"<Error><Code>BadDigest</Code></Error>")
        return Answer(204)

    with run_scripted_server(answer) as (endpoint, requests):
        with pytest.raises(FailedPreconditionError) as raised:
            open_store("bucket", s3_options(endpoint)).upload(large_file, "large")
        methods = [request.method for request in requests]
    assert "BadDigest" in raised.value.message
    assert Request("DELETE", "/bucket/models/large?uploadId=the-upload") in requests
    assert methods.count("POST") == 1, "it was started and never completed"


def test_an_upload_that_cannot_be_completed_is_aborted(large_file: Path) -> None:
    def answer(request: Request) -> Answer:
        if request.method == "PUT":
            return Answer(200, headers={"ETag": '"x"'})
        if request.target.endswith("?uploads="):
            return Answer(200, STARTED)
        return Answer(204) if request.method == "DELETE" else Answer(400)

    with run_scripted_server(answer) as (endpoint, requests):
        with pytest.raises(FailedPreconditionError):
            open_store("bucket", s3_options(endpoint)).upload(large_file, "large")
        assert requests[-1] == Request("DELETE", "/bucket/models/large?uploadId=the-upload")


def test_the_first_error_of_an_upload_is_kept_when_the_abort_fails_too(large_file: Path) -> None:
    def answer(request: Request) -> Answer:
        return Answer(200, STARTED, {"ETag": '"x"'}) if request.method in ("POST", "PUT") else Answer(403)

    def give_up(count: int) -> None:
        raise RuntimeError("given up")

    with run_scripted_server(answer) as (endpoint, requests), pytest.raises(RuntimeError, match="given up"):
        open_store("bucket", s3_options(endpoint)).upload(large_file, "large", give_up)
    assert requests[-1].method == "DELETE"


def test_on_bytes_may_use_the_store(s3_server: S3Server, bucket: str, large_file: Path) -> None:
    """A callback that reads a store is not called from inside the client's event loop."""
    store = open_store(bucket, s3_server.options)
    store.write("other", b"content")
    seen: list[bytes] = []
    store.upload(large_file, "large", lambda count: seen.append(store.read("other")))
    assert set(seen) == {b"content"}


def test_folder_markers_of_consoles_are_not_objects(s3_server: S3Server, bucket: str) -> None:
    """The empty objects "models/" and "models/sub/" stand for directories, and no file can be called like one."""
    for key in ("models/", "models/sub/", "models/sub/file", "models/subfile"):
        s3_server.client.put_object(Bucket=bucket, Key=key, Body=b"")
    store = open_store(bucket, s3_server.options)
    assert list(store.list()) == [ObjectInfo("sub/file", 0), ObjectInfo("subfile", 0)]


def test_an_object_replaced_while_it_is_read_is_no_mixture(s3_server: S3Server, bucket: str, large_file: Path) -> None:
    store = open_store(bucket, s3_server.options)
    large_file.write_bytes(b"x" * (80 * MIB))
    store.upload(large_file, "large")
    chunks = store.read_chunks("large")
    next(chunks)
    store.write("large", b"short")
    with pytest.raises(UnavailableError) as raised:
        list(chunks)
    assert raised.value.reason == "OBJECT_CHANGED"


def test_a_missing_bucket_is_not_found(s3_server: S3Server, tmp_path: Path) -> None:
    store = open_store("no-such-bucket", s3_server.options)
    for call in every_call(store, tmp_path)[:-1]:  # there is nothing to delete in it
        with pytest.raises(NotFoundError) as raised:
            call()
        assert raised.value.metadata["uri"].startswith("s3://no-such-bucket/models")


@pytest.mark.parametrize("status", [401, 403])
def test_refused_credentials_are_permission_denied_and_not_repeated(tmp_path: Path, status: int) -> None:
    """S3 answers a wrong signature with the key id and all that was signed; none of it reaches the error."""
    body = (
        f"<Error><Code>SignatureDoesNotMatch</Code><AWSAccessKeyId>{ACCESS_KEY_ID}</AWSAccessKeyId>"
        f"<StringToSign>what was signed with {SECRET_ACCESS_KEY}</StringToSign></Error>"
    ).encode()
    with run_scripted_server(lambda request: Answer(status, body)) as (endpoint, _):
        store = open_store("bucket", s3_options(endpoint))
        for call in every_call(store, tmp_path):
            with pytest.raises(PermissionDeniedError) as raised:
                call()
            assert raised.value.metadata["uri"].startswith("s3://bucket/models")
            shown = repr(raised.value) + str(raised.value.metadata) + repr(raised.value.__cause__)
            assert SECRET_ACCESS_KEY not in shown
            assert "what was signed" not in shown
            assert not (tmp_path / "target").exists()


def test_a_request_that_the_server_refuses_is_not_worth_a_retry(tmp_path: Path) -> None:
    """A wrong region, for one: the caller hears S3's own code."""
    body = b"<Error><Code>AuthorizationHeaderMalformed</Code></Error>"
    with run_scripted_server(lambda request: Answer(400, body)) as (endpoint, requests):
        store = open_store("bucket", s3_options(endpoint))
        with pytest.raises(FailedPreconditionError) as raised:
            list(store.list())
        assert len(requests) == 1
    assert raised.value.reason == "STORE_REQUEST_REFUSED"
    assert "AuthorizationHeaderMalformed" in raised.value.message


def test_a_server_that_fails_is_tried_again() -> None:
    def answer(request: Request) -> Answer:
        return Answer(503) if len(requests) < 3 else Answer(200, headers={"ETag": '"x"'})

    with run_scripted_server(answer) as (endpoint, requests):
        open_store("bucket", s3_options(endpoint)).write("object", b"content")
        assert len(requests) == 3


def test_a_server_that_keeps_failing_is_unavailable() -> None:
    with run_scripted_server(lambda request: Answer(503)) as (endpoint, requests):
        with pytest.raises(UnavailableError) as raised:
            open_store("bucket", s3_options(endpoint)).read("object")
        assert 1 < len(requests) < 10
    assert "HTTP 503" in raised.value.message


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:{free_port}", "http://store.invalid"])
def test_an_endpoint_that_is_not_there_is_unavailable(tmp_path: Path, endpoint: str) -> None:
    """After a bounded number of tries; the error names the URI and what the system said, and no secret."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        options = s3_options(endpoint.format(free_port=free.getsockname()[1]))
        for call in every_call(open_store("bucket", options), tmp_path)[4:7]:
            with pytest.raises(UnavailableError) as raised:
                call()
            assert raised.value.reason == "STORE_UNAVAILABLE"
            assert raised.value.metadata["uri"].startswith("s3://bucket/models")
            assert SECRET_ACCESS_KEY not in raised.value.message


def test_missing_credentials_are_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without keys the client asks the cloud's metadata service, here one that gives none."""
    with run_scripted_server(lambda request: Answer(404)) as (endpoint, _):
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", endpoint)
        store = open_store("bucket", StoreOptions(s3_endpoint=endpoint, s3_allow_http=True))
        with pytest.raises(PermissionDeniedError) as raised:
            store.read("object")
    assert raised.value.reason == "STORE_CREDENTIALS_MISSING"


def test_public_buckets_need_no_credentials() -> None:
    with run_scripted_server(lambda request: Answer(200, headers={"ETag": '"x"'})) as (endpoint, requests):
        options = StoreOptions(s3_endpoint=endpoint, s3_allow_http=True, s3_anonymous=True)
        assert list(open_store("bucket", options).read_chunks("object")) == []
    assert [request.method for request in requests] == ["HEAD"]


@pytest.mark.parametrize("reply", [Answer(200, b"not xml"), Answer(302), Answer(418), Answer(206, b"x")], ids=repr)
def test_an_answer_that_is_no_s3_is_one_error_of_ours(reply: Answer) -> None:
    """A proxy's page, a redirect, a range that is not the one asked for."""
    with run_scripted_server(lambda request: reply) as (endpoint, _):
        store = open_store("bucket", s3_options(endpoint))
        with pytest.raises(BitmillError) as raised:
            list(store.list())
        assert raised.value.metadata["uri"] == "s3://bucket/models"
