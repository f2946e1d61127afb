"""URIs are read one way, refused when they could mean another, and written as they are read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitmill_common import uris

segments = st.text(st.characters(exclude_characters="/", exclude_categories=["Cc", "Cs"]), min_size=1).filter(
    lambda segment: segment not in (".", "..")
)


@given(st.lists(segments))
def test_any_file_path_survives_its_uri(path: list[str]) -> None:
    uri = uris.StoreUri("file", "", tuple(path))
    assert uris.parse(str(uri)) == uri
    assert uris.parse(uri.file_path.as_uri()) == uri


@given(segments, segments)
def test_joining_adds_a_path_as_it_is(first: str, second: str) -> None:
    joined = uris.join("file:///models", f"{first}/{second}")
    assert uris.parse(joined).file_path == Path("/models", first, second)


@pytest.mark.parametrize(
    ("uri", "canonical"),
    [
        ("file:///models/a", "file:///models/a"),
        ("file:///models/a/", "file:///models/a"),
        ("file://localhost/models", "file:///models"),
        ("file:///my%20models/%C3%BC%23", "file:///my%20models/%C3%BC%23"),
        ("file:///%6Dodels", "file:///models"),
        ("file:///", "file:///"),
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/", "s3://bucket"),
        ("s3://my.bucket-1/a b/%20/ü", "s3://my.bucket-1/a b/%20/ü"),
    ],
)
def test_a_uri_has_one_canonical_form(uri: str, canonical: str) -> None:
    """File paths are percent-decoded; S3 keys are taken literally, as AWS's own tools take them."""
    assert str(uris.parse(uri)) == canonical


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("", "file:// or s3://"),
        ("/models/a", "file:// or s3://"),
        ("models", "file:// or s3://"),
        ("file:/models", "file:// or s3://"),
        ("http://host/a", "file:// or s3://"),
        ("hf://org/name", "file:// or s3://"),
        ("FILE:///models", "file:// or s3://"),
        ("file://host/models", "absolute path"),
        ("file://models", "absolute path"),
        ("file:///a?b", "query"),
        ("file:///a#b", "fragment"),
        ("s3://bucket/a?versionId=1", "query"),
        ("file:///a/../b", '".."'),
        ("file:///a/%2e%2e/b", '".."'),
        ("file:///a/./b", '".."'),
        ("s3://bucket/..", '".."'),
        ("file:///a%2Fb", "slash"),
        ("file:///a%00b", "control"),
        ("file:///a\nb", "control"),
        ("s3://bucket/a\tb", "control"),
        ("file:///a%zz", "%"),
        ("file:///a%", "%"),
        ("file:///%ff", "UTF-8"),
        ("s3://bucket/\udcff", "UTF-8"),
        ("file:///a//b", "empty"),
        ("s3://bucket//a", "empty"),
        ("s3://", "bucket"),
        ("s3:///a", "bucket"),
        ("s3://B/a", "bucket"),
        ("s3://user:secret@bucket/a", "bucket"),
        ("s3://bucket:80/a", "bucket"),
    ],
)
def test_a_uri_that_is_none_is_refused_and_said_why(uri: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        uris.parse(uri)


@pytest.mark.parametrize(
    ("uri", "root", "within"),
    [
        ("file:///models/a", "file:///models", True),
        ("file:///models", "file:///models", True),
        ("file:///models-2", "file:///models", False),
        ("file:///anything", "file:///", True),
        ("s3://bucket/a/b", "s3://bucket/a", True),
        ("s3://bucket/ab", "s3://bucket/a", False),
        ("s3://bucket-2/a", "s3://bucket", False),
        ("s3://bucket/models", "file:///bucket", False),
    ],
)
def test_being_within_a_root_goes_by_whole_names(uri: str, root: str, within: bool) -> None:
    assert uris.parse(uri).is_within(uris.parse(root)) is within
