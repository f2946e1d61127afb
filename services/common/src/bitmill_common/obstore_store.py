"""The adapter for `s3://`, through obstore."""

from __future__ import annotations

import collections
import contextlib
import itertools
import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import obstore
import structlog
from obstore import exceptions
from obstore.store import S3Store

from bitmill_common import uris
from bitmill_common.errors import (
    BitmillError,
    FailedPreconditionError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
)
from bitmill_common.object_store import ObjectInfo, OnBytes
from bitmill_common.staging import staged_file

if TYPE_CHECKING:
    from obstore import ObjectMeta, WritableFile
    from obstore.store import ClientConfig, RetryConfig

PART_BYTES = 8 * 2**20
"""Size of a part: large enough that requests cost little, small enough to be sent again."""

CONCURRENCY = 6
"""Parts of one transfer under way at a time; with PART_BYTES it bounds the memory of a transfer."""

MAX_PARTS = 10_000
"""S3's limit: https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html"""

_CLIENT_OPTIONS: ClientConfig = {
    "connect_timeout": timedelta(seconds=5),
    # Of a whole request, so of a part: CONCURRENCY parts in this time are 0.8 MiB/s.
    "timeout": timedelta(minutes=1),
    "user_agent": "bitmill",
}
_RETRIES: RetryConfig = {
    "max_retries": 4,
    "retry_timeout": timedelta(minutes=2),
    "backoff": {"init_backoff": timedelta(milliseconds=200), "max_backoff": timedelta(seconds=5), "base": 2},
}

_log = structlog.get_logger()

_METADATA_SERVICE = re.compile(r"https?://[^/\s]+/latest/(?:api/token|meta-data)")
_REFUSALS = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)


@dataclass(frozen=True)
class StoreOptions:
    """How to reach the stores. What is None is taken from the standard `AWS_*` variables, as obstore reads them."""

    s3_endpoint: str | None = None
    """URL of an S3-compatible service; AWS itself by default."""
    s3_region: str | None = None
    """Region of the buckets; us-east-1 by default."""
    s3_access_key_id: str | None = None
    """Access key."""
    s3_secret_access_key: str | None = field(default=None, repr=False)
    """Secret of the access key."""
    s3_session_token: str | None = field(default=None, repr=False)
    """Token that temporary credentials come with."""
    s3_allow_http: bool = False
    """Whether the endpoint may be http://, without encryption."""
    s3_virtual_hosted_style: bool = False
    """Whether the bucket is a part of the host name, which the endpoint must then include."""
    s3_anonymous: bool = False
    """Whether to send requests unsigned, for public buckets."""

    def check(self) -> None:
        """Raises `ValueError`, naming the option, for options that cannot work together."""
        endpoint = urlsplit(self.s3_endpoint or "")
        if self.s3_endpoint is not None and (endpoint.scheme not in ("http", "https") or not endpoint.hostname):
            raise ValueError("s3_endpoint must be an http:// or https:// URL")
        if endpoint.username or endpoint.password:
            raise ValueError("s3_endpoint must hold no credentials; use s3_access_key_id and s3_secret_access_key")
        if endpoint.scheme == "http" and not self.s3_allow_http:
            raise ValueError("s3_endpoint is http://, which s3_allow_http does not allow")
        if (self.s3_access_key_id is None) != (self.s3_secret_access_key is None):
            raise ValueError("s3_access_key_id and s3_secret_access_key must be given together")


def connect_s3(bucket: str, options: StoreOptions) -> S3Store:
    """Returns obstore's client for a bucket. No request is made yet. Keep it: it holds the connections."""
    config = {
        "endpoint": options.s3_endpoint,
        "region": options.s3_region,
        "access_key_id": options.s3_access_key_id,
        "secret_access_key": options.s3_secret_access_key,
        "session_token": options.s3_session_token,
        "virtual_hosted_style_request": options.s3_virtual_hosted_style or None,
        "skip_signature": options.s3_anonymous or None,
    }
    client_options = _CLIENT_OPTIONS.copy()
    if options.s3_allow_http:
        client_options["allow_http"] = True
    given: Any = {key: value for key, value in config.items() if value is not None}
    return S3Store(bucket, client_options=client_options, retry_config=_RETRIES, **given)


class ObstoreStore:
    """An `ObjectStore` at an `s3://` URI. `client` may be shared by the stores of one bucket."""

    def __init__(self, uri: uris.StoreUri, client: S3Store) -> None:
        self.uri = str(uri)
        self._client = client
        self._prefix = uri.key

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """See `ObjectStore.list`. S3 lists in the order of the keys' UTF-8 bytes, which is that of Python's strings."""
        below = f"{self._prefix}/" if self._prefix else ""
        directory = self._directory_key(prefix)
        with self._translated(prefix):
            metas = itertools.chain.from_iterable(obstore.list(self._client, directory or None))
            for meta, following in _with_next(meta for meta in metas if meta["path"] != directory):
                # Consoles make empty objects named like directories, "a/" for "a/b"; obstore drops the slash.
                is_marker = meta["size"] == 0 and following and following["path"].startswith(meta["path"] + "/")
                if not is_marker:
                    yield ObjectInfo(meta["path"].removeprefix(below), meta["size"])

    def list_directories(self, prefix: str = "") -> Sequence[str]:
        """See `ObjectStore.list_directories`."""
        directory = self._directory_key(prefix)
        with self._translated(prefix):
            result = obstore.list_with_delimiter(self._client, directory or None)
        return sorted(path.rsplit("/", 1)[-1] for path in result["common_prefixes"])

    def head(self, path: str) -> ObjectInfo:
        """See `ObjectStore.head`."""
        return ObjectInfo(path, self._head(path)["size"])

    def read(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        """See `ObjectStore.read`."""
        size = self.head(path).size_bytes
        end = size if length is None else min(size, offset + length)
        return self._get(path, offset, end) if offset < end else b""

    def read_chunks(self, path: str) -> Generator[bytes, None, None]:
        """See `ObjectStore.read_chunks`. Parts are read ahead in parallel and each is tried again on its own."""
        meta = self._head(path)
        parts = ((start, min(start + PART_BYTES, meta["size"])) for start in range(0, meta["size"], PART_BYTES))
        pending: collections.deque[Future[bytes]] = collections.deque()
        with ThreadPoolExecutor(CONCURRENCY, thread_name_prefix="store-read") as pool:
            try:
                for start, end in parts:
                    pending.append(pool.submit(self._get, path, start, end, meta["e_tag"]))
                    if len(pending) == CONCURRENCY:
                        yield pending.popleft().result()
                while pending:
                    yield pending.popleft().result()
            finally:
                for part in pending:
                    part.cancel()

    def write(self, path: str, data: bytes) -> None:
        """See `ObjectStore.write`."""
        key = self._key(path)
        with self._translated(path, writing=True):
            obstore.put(self._client, key, data, use_multipart=False)

    def upload(self, source: Path, path: str, on_bytes: OnBytes = lambda count: None) -> None:
        """See `ObjectStore.upload`. Files of more than one part go up as a multipart upload."""
        with source.open("rb", buffering=0) as reader:
            part_bytes = max(PART_BYTES, -(-source.stat().st_size // MAX_PARTS))
            with self._writer(path, part_bytes) as writer:
                while part := reader.read(part_bytes):
                    with self._translated(path, writing=True):
                        writer.write(part)
                    on_bytes(len(part))

    @contextlib.contextmanager
    def _writer(self, path: str, part_bytes: int) -> Iterator[WritableFile]:
        """Opens an object for writing. Closing it publishes it; an exception, from wherever it comes, aborts it.

        Not `obstore.put` of an iterator: that runs the iterator inside obstore's event loop, where `on_bytes` could use
        no store.
        """
        key = self._key(path)
        with self._translated(path, writing=True):
            writer = obstore.open_writer(self._client, key, buffer_size=part_bytes, max_concurrency=CONCURRENCY)
        try:
            yield writer
        except BaseException as error:
            try:
                writer.__exit__(type(error), error, error.__traceback__)  # obstore's only way to abort
            except (exceptions.BaseError, OSError) as abort_error:
                uri = uris.join(self.uri, path)
                _log.warning("multipart_upload_not_aborted", uri=uri, cause=_cause(str(abort_error)))
            raise
        with self._translated(path, writing=True):
            writer.close()

    def download(self, path: str, target: Path, on_bytes: OnBytes = lambda count: None) -> None:
        """See `ObjectStore.download`."""
        chunks = self.read_chunks(path)
        with contextlib.closing(chunks), staged_file(target) as writer:
            for chunk in chunks:
                writer.write(chunk)
                on_bytes(len(chunk))

    def delete(self, path: str) -> None:
        """See `ObjectStore.delete`."""
        key = self._key(path)
        with self._translated(path), contextlib.suppress(FileNotFoundError):
            obstore.delete(self._client, key)

    def local_path(self, path: str = "") -> Path | None:
        """See `ObjectStore.local_path`."""
        return None

    def _directory_key(self, path: str) -> str:
        return self._key(path) if path else self._prefix

    def _key(self, path: str) -> str:
        uris.check_path(path)
        return f"{self._prefix}/{path}" if self._prefix else path

    def _head(self, path: str) -> Any:
        key = self._key(path)
        with self._translated(path):
            return obstore.head(self._client, key)

    def _get(self, path: str, start: int, end: int, e_tag: str | None = None) -> bytes:
        key = self._key(path)
        options: Any = {"range": (start, end)}
        if e_tag:
            options["if_match"] = e_tag
        with self._translated(path):
            return bytes(obstore.get(self._client, key, options=options).bytes())

    @contextlib.contextmanager
    def _translated(self, path: str, *, writing: bool = False) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise self._not_found(path, is_bucket=writing) from None
        except (exceptions.BaseError, OSError, ValueError) as error:  # OSError: from closing a writer
            raise self._translate(error, path) from None

    def _not_found(self, path: str, *, is_bucket: bool) -> NotFoundError:
        uri = uris.join(self.uri, path)
        reason, what = ("BUCKET_NOT_FOUND", "bucket for") if is_bucket else ("OBJECT_NOT_FOUND", "object")
        return NotFoundError(reason, f"there is no {what} {uri}", {"uri": uri})

    def _translate(self, error: Exception, path: str) -> BitmillError:
        """Returns bitmill's error. obstore's own goes no further: it quotes responses, which can repeat credentials."""
        uri = uris.join(self.uri, path)
        metadata = {"uri": uri}
        text = str(error)
        cause = _cause(text)
        if isinstance(error, exceptions.PreconditionError):
            return UnavailableError("OBJECT_CHANGED", f"{uri} was replaced while it was read", metadata)
        if isinstance(error, exceptions.InvalidPathError | ValueError):
            message = f"{uri} is, or lists, a name that this server cannot use"
            return FailedPreconditionError("OBJECT_NAME_UNSUPPORTED", message, metadata)
        if _METADATA_SERVICE.search(text):
            message = f"this server has no credentials for {uri}, and no cloud metadata service gives it any ({cause})"
            return PermissionDeniedError("STORE_CREDENTIALS_MISSING", message, metadata)
        status = _status(text)
        if status in (401, 403) or isinstance(error, _REFUSALS):
            message = f"the store refuses the credentials of this server for {uri} ({cause})"
            return PermissionDeniedError("STORE_ACCESS_DENIED", message, metadata)
        if status == 404:
            return self._not_found(path, is_bucket=True)
        if status is not None and status < 500 and status != 429:
            message = f"the store refuses a request for {uri} ({cause}); check endpoint, region and bucket"
            return FailedPreconditionError("STORE_REQUEST_REFUSED", message, metadata)
        return UnavailableError("STORE_UNAVAILABLE", f"the store of {uri} cannot be reached ({cause})", metadata)


def _with_next(items: Iterable[ObjectMeta]) -> Iterator[tuple[ObjectMeta, ObjectMeta | None]]:
    """Yields every item with the one after it."""
    this, following = itertools.tee(items)
    return itertools.zip_longest(this, itertools.islice(following, 1, None))


def _status(text: str) -> int | None:
    """Finds the HTTP status in the text of an obstore error, which has it nowhere else."""
    found = re.search(r"status code: (\d{3})", text)
    return int(found[1]) if found else None


def _cause(text: str) -> str:
    """Returns what of an obstore error's text is useful and safe: status and S3 code, or the system's error."""
    status = _status(text)
    if status is not None:
        code = re.search(r"<Code>(\w{1,64})</Code>", text)
        return f"HTTP {status} {code[1]}" if code else f"HTTP {status}"
    system_error = re.search(r'(?:message|error): "([^"\\]{1,100})"', text)
    kind = re.search(r"HttpError \{\s*kind: (\w{1,32})", text)
    return system_error[1] if system_error else (kind[1].lower() if kind else "unknown cause")
