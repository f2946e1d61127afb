"""`bitmill artifacts report` against a real server: what it asks for, writes and exits with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bitmill.artifact.v1 import artifact_service_pb2 as artifact_pb
from bitmill_common import errors
from support.cli import bitmill
from support.fake_services import FakeServer
from support.report_artifacts import measured_artifact, sibling

ARTIFACT = measured_artifact()


@pytest.fixture
def filled(server: FakeServer) -> FakeServer:
    """A server with one artifact that is asked for, and a sibling on the second page of the list."""
    pages = [
        artifact_pb.ListArtifactsResponse(artifacts=[ARTIFACT], next_page_token="2"),
        artifact_pb.ListArtifactsResponse(artifacts=[sibling(1, 90_000_000, 0.3)]),
    ]
    server.on("ListArtifacts", *pages)
    server.on("GetArtifact", artifact_pb.GetArtifactResponse(artifact=ARTIFACT))
    return server


def test_a_page_is_written_with_the_siblings_of_every_page_of_the_list(filled: FakeServer, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    result = bitmill(filled, "artifacts", "report", ARTIFACT.uri, "--output", str(path))
    assert (result.exit_code, result.stdout) == (0, f"{path}\n"), result.output
    assert filled.only_call("GetArtifact").request.uri == ARTIFACT.uri
    page = path.read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert "0.03125 nats" in page
    assert "smol-1" in page


def test_the_page_lies_in_the_working_directory_by_default(
    filled: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And programs are told where."""
    monkeypatch.chdir(tmp_path)
    result = bitmill(filled, "artifacts", "report", ARTIFACT.uri, "--json")
    assert json.loads(result.stdout) == {"path": str(tmp_path / "report.html")}
    assert (tmp_path / "report.html").stat().st_size > 10_000


def test_a_dash_writes_the_page_to_standard_output(filled: FakeServer) -> None:
    result = bitmill(filled, "artifacts", "report", ARTIFACT.uri, "-o", "-")
    assert result.stdout.startswith("<!doctype html>")
    assert result.stdout.endswith("</html>\n")


def test_several_artifacts_share_a_page_and_paths_are_uris(filled: FakeServer, tmp_path: Path) -> None:
    """One given twice is told of once."""
    model = tmp_path / "model"
    result = bitmill(filled, "artifacts", "report", str(model), ARTIFACT.uri, str(model), "-o", "-")
    assert [call.request.uri for call in filled.received["GetArtifact"]] == [model.as_uri(), ARTIFACT.uri]
    assert result.stdout.count("<article>") == 2


def test_an_artifact_that_is_not_there_leaves_no_page(server: FakeServer, tmp_path: Path) -> None:
    server.on("GetArtifact", errors.NotFoundError("ARTIFACT_NOT_FOUND", "no manifest lies at s3://bucket/x"))
    result = bitmill(server, "artifacts", "report", "s3://bucket/x", "-o", str(tmp_path / "page.html"))
    assert result.exit_code == 1
    assert "no manifest lies at" in result.stderr
    assert not (tmp_path / "page.html").exists()


def test_a_file_that_cannot_be_written_is_named(filled: FakeServer, tmp_path: Path) -> None:
    path = tmp_path / "missing" / "page.html"
    result = bitmill(filled, "artifacts", "report", ARTIFACT.uri, "-o", str(path))
    assert result.exit_code == 1
    assert result.stderr == f"error: cannot write {path}: No such file or directory\n"
