"""Opens the stores that this server's configuration allows, and no others."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from bitmill_common import uris
from bitmill_common.errors import FieldViolation, InvalidArgumentError, PermissionDeniedError
from bitmill_common.local_store import LocalStore, real_path
from bitmill_common.object_store import ObjectStore
from bitmill_common.obstore_store import ObstoreStore, StoreOptions, connect_s3

__all__ = ["StoreOptions", "Stores"]


class Stores:
    """Opens stores at or below `roots`, which are `file://` and `s3://` URIs of directories.

    `ValueError`, naming the root or the option, for a configuration that cannot be used.
    """

    def __init__(self, roots: Sequence[str], options: StoreOptions = StoreOptions()) -> None:  # noqa: B008 (frozen)
        options.check()
        self.roots = tuple(_parse_root(root) for root in roots)
        self._local_roots = tuple(real_path(root.file_path) for root in self.roots if root.scheme == uris.FILE)
        self._connect_s3 = functools.cache(lambda bucket: connect_s3(bucket, options))

    def open(self, uri: str, field: str) -> ObjectStore:
        """Returns the store rooted at `uri`, which need not exist yet.

        `InvalidArgumentError` with reason INVALID_URI, which names `field` of the request, for a URI that is malformed;
        `PermissionDeniedError` URI_OUTSIDE_ROOTS for one that no root contains, symbolic links followed.
        """
        parsed = _parse_field(uri, field)
        self._check_within_roots(parsed)
        return self._open(parsed)

    def open_file(self, uri: str, field: str) -> tuple[ObjectStore, str]:
        """Returns the store of the directory that the file `uri` lies in, and its name there. Errors as of `open`."""
        parsed = _parse_field(uri, field)
        self._check_within_roots(parsed)
        if not parsed.segments:
            raise _invalid(field, "must name a file")
        return self._open(parsed.parent), parsed.segments[-1]

    def _open(self, parsed: uris.StoreUri) -> ObjectStore:
        if parsed.scheme == uris.FILE:
            return LocalStore(parsed, self._local_roots)
        return ObstoreStore(parsed, self._connect_s3(parsed.bucket))

    def _check_within_roots(self, parsed: uris.StoreUri) -> None:
        within = any(parsed.is_within(root) for root in self.roots)
        if within and parsed.scheme == uris.FILE:
            resolved = real_path(parsed.file_path)
            within = any(resolved.is_relative_to(root) for root in self._local_roots)
        if not within:
            roots = ", ".join(str(root) for root in self.roots)
            raise PermissionDeniedError(
                "URI_OUTSIDE_ROOTS",
                f"{parsed} is outside the roots that this server allows",
                {"uri": str(parsed), "roots": roots},
            )


def _parse_root(root: str) -> uris.StoreUri:
    try:
        return uris.parse(root)
    except ValueError as error:
        raise ValueError(f"store root {root!r} {error}") from None


def _parse_field(uri: str, field: str) -> uris.StoreUri:
    try:
        return uris.parse(uri)
    except ValueError as error:
        raise _invalid(field, str(error)) from None


def _invalid(field: str, description: str) -> InvalidArgumentError:
    return InvalidArgumentError([FieldViolation(field, description, "INVALID_URI")])
