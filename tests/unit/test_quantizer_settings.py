"""Settings from the environment and from flags."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from bitmill_common.settings import exit_for_settings
from bitmill_quantizer.settings import Settings

REQUIRED = {"source_roots": "file:///models", "artifact_root": "file:///artifacts"}


def test_the_environment_sets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists are comma-separated."""
    monkeypatch.setenv("BITMILL_QUANTIZER_SOURCE_ROOTS", "file:///a,s3://bucket/b")
    monkeypatch.setenv("BITMILL_QUANTIZER_ARTIFACT_ROOT", "s3://bucket/artifacts")
    monkeypatch.setenv("BITMILL_QUANTIZER_WORK_DIR", "/var/lib/bitmill")
    settings = Settings()
    assert settings.source_roots == ("file:///a", "s3://bucket/b")
    assert settings.address == "127.0.0.1:50051"
    assert settings.resolved_database_url == "sqlite:////var/lib/bitmill/jobs.sqlite"


@pytest.mark.parametrize(
    "wrong",
    [
        {"source_roots": ""},
        {"concurrency": 0},
        {"worker_id": "a/b"},
        {"worker_id": "ok\n"},
        {"database_url": "mysql://host/jobs"},
        {"log_level": "loud"},
        {"drain_grace_s": -1},
        {"drain_grace_s": math.inf},
        {"work_dir": "~no-such-user/work"},
        {"llmcompressor_python": "~no-such-user/python"},
        {"artifact_root": "/artifacts"},
        {"address": "localhost"},
    ],
)
def test_a_wrong_value_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Settings(**(REQUIRED | wrong))


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ([], "BITMILL_QUANTIZER_SOURCE_ROOTS"),
        (["--source-roots=ftp://x", "--artifact-root=file:///a"], "ftp://x"),
        (["--source-roots=file:///s", "--artifact-root=file:///a", "--concurrency=none"], "QUANTIZER_CONCURRENCY"),
    ],
)
def test_a_server_with_a_wrong_setting_ends_at_once_and_names_it(tmp_path: Path, flags: list[str], named: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "bitmill_quantizer", *flags], capture_output=True, text=True, cwd=tmp_path, env={}
    )
    assert ended.returncode == 2
    assert named in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_fault_between_two_settings_names_their_variables(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        exit_for_settings(Settings, "s3_endpoint is http://, which s3_allow_http does not allow")
    assert end.value.code == 2
    assert capsys.readouterr().err == (
        "bitmill-quantizer: BITMILL_QUANTIZER_S3_ENDPOINT is http://, which BITMILL_QUANTIZER_S3_ALLOW_HTTP does not "
        "allow\n"
    )
