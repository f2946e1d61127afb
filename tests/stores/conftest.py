"""The stores that the store tests run on: a directory, and moto's S3 server over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bitmill_common.object_store import ObjectStore
from bitmill_common.stores import Stores
from support.object_stores import S3Server, run_s3_server


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    with run_s3_server() as server:
        yield server


@pytest.fixture(params=["file", "s3"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Stores:
    """Stores whose only root is an empty directory or bucket."""
    if request.param == "file":
        root = tmp_path / "store root"
        root.mkdir()
        return Stores([root.as_uri()])
    server: S3Server = request.getfixturevalue("s3_server")
    return Stores([f"s3://{server.create_bucket()}"], server.options)


@pytest.fixture
def root(stores: Stores) -> ObjectStore:
    """The store at the root itself."""
    return stores.open(str(stores.roots[0]), "uri")


@pytest.fixture
def store(root: ObjectStore, stores: Stores) -> ObjectStore:
    """A store at a directory below the root."""
    return stores.open(f"{root.uri}/models/one", "uri")
