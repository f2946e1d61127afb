"""Store URIs: parsing, checking and joining, as text alone; nothing is opened here.

`file://` paths are percent-decoded, as RFC 8089 has it. `s3://` keys are taken as they are, as AWS's own tools do.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote_to_bytes

FILE = "file"
S3 = "s3"

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
# Surrogates stand for bytes of a file name that are not UTF-8.
_UNUSABLE_CHARACTER = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_NOT_QUOTED = "/!$&'()*+,;=:@~"


@dataclass(frozen=True)
class StoreUri:
    """A directory or an object. `bucket` is empty for `file`; `segments` are the decoded parts of the path."""

    scheme: str
    bucket: str
    segments: tuple[str, ...]

    def __str__(self) -> str:
        """The canonical form, without a trailing slash."""
        path = "/".join(self.segments)
        if self.scheme == FILE:
            return "file:///" + quote(path, safe=_NOT_QUOTED)
        return f"{self.scheme}://{self.bucket}" + (f"/{path}" if path else "")

    @property
    def key(self) -> str:
        """The path inside the bucket, without slashes at its ends."""
        return "/".join(self.segments)

    @property
    def file_path(self) -> Path:
        """The path on this host, for `file` alone."""
        return Path("/", *self.segments)

    @property
    def parent(self) -> StoreUri:
        """The directory that this lies in; a root is its own parent."""
        return StoreUri(self.scheme, self.bucket, self.segments[:-1])

    def is_within(self, root: StoreUri) -> bool:
        """Whether this is `root` or below it, by its text; symbolic links are not looked at."""
        same_store = (self.scheme, self.bucket) == (root.scheme, root.bucket)
        return same_store and self.segments[: len(root.segments)] == root.segments


def parse(uri: str) -> StoreUri:
    """Parses a `file://` or `s3://` URI. `ValueError`, whose text says what is wrong, for anything else."""
    scheme, separator, rest = uri.partition("://")
    if not separator or scheme not in (FILE, S3):
        raise ValueError("must start with file:// or s3://")
    if "?" in rest or "#" in rest:
        raise ValueError("must have no query and no fragment")
    authority, _, path = rest.partition("/")
    bucket = _parse_authority(scheme, authority)
    path = path.removesuffix("/")
    segments = tuple(path.split("/")) if path else ()
    if scheme == FILE:
        segments = tuple(_decode(segment) for segment in segments)
    for segment in segments:
        _check_segment(segment)
    return StoreUri(scheme, bucket, segments)


def _parse_authority(scheme: str, authority: str) -> str:
    if scheme == FILE:
        if authority not in ("", "localhost"):
            raise ValueError("must name an absolute path on this host, as in file:///models")
        return ""
    if not _BUCKET.fullmatch(authority):
        raise ValueError("must name a bucket of 3 to 63 lower-case letters, digits, dots and hyphens")
    return authority


def _decode(segment: str) -> str:
    if _ESCAPE.search(segment):
        raise ValueError("has a % that two hexadecimal digits do not follow")
    try:
        decoded = unquote_to_bytes(segment).decode()
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8 once its percent escapes are decoded") from None
    if "/" in decoded:
        raise ValueError("must not escape a slash")
    return decoded


def _check_segment(segment: str) -> None:
    if not segment:
        raise ValueError("must have no empty path segment")
    if segment in (".", ".."):
        raise ValueError('must have no "." and no ".." in its path')
    if _UNUSABLE_CHARACTER.search(segment):
        raise ValueError("must be UTF-8 without control characters")


def check_path(path: str) -> str:
    """Returns a path that is relative and stays below its root; `ValueError`, whose text says why, for any other."""
    for segment in path.split("/"):
        _check_segment(segment)
    return path


def check_file_name(name: str) -> str:
    """Returns a name that stands for a file directly in its directory; `ValueError` for any other."""
    if "/" in name or "\\" in name:
        raise ValueError("must have no slash and no backslash")
    _check_segment(name)
    return name


def join(uri: str, path: str) -> str:
    """Returns the URI of `path` below the directory `uri`; `uri` itself for an empty path."""
    if not path:
        return uri
    base = parse(uri)
    return str(StoreUri(base.scheme, base.bucket, (*base.segments, *check_path(path).split("/"))))
