"""Settings of the inference server from the environment and from flags."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError
from pydantic_settings import CliApp

from bitmill_inference import __main__
from bitmill_inference.settings import Settings


def parse(*arguments: str) -> Settings:
    return CliApp.run(Settings, cli_args=list(arguments))


def test_flags_overrule_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every field is both a variable and a flag."""
    monkeypatch.setenv("BITMILL_INFERENCE_MODEL_ROOTS", "file:///models,s3://bucket/models")
    monkeypatch.setenv("BITMILL_INFERENCE_LOG_LEVEL", "ERROR")
    settings = parse("--log-level", "DEBUG", "--insecure", "--address", "0.0.0.0:1")
    assert settings.model_roots == ("file:///models", "s3://bucket/models")
    assert (settings.log_level, settings.insecure, settings.address) == ("DEBUG", True, "0.0.0.0:1")


def test_roots_may_be_a_list_in_one_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comma-separated, as in the variable."""
    monkeypatch.delenv("BITMILL_INFERENCE_MODEL_ROOTS", raising=False)
    assert parse("--model-roots", "file:///a,file:///b").model_roots == ("file:///a", "file:///b")


def test_the_cache_is_an_absolute_path_below_home_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tilde means the user's home, whatever the shell did."""
    monkeypatch.setenv("HOME", "/home/someone")
    assert parse("--model-roots", "file:///a").cache_dir == Path("/home/someone/.cache/bitmill/inference")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("BITMILL_INFERENCE_DRAIN_GRACE_S", "-1"),
        ("BITMILL_INFERENCE_LOG_LEVEL", "LOUD"),
        ("BITMILL_INFERENCE_KV_CACHE_MEMORY_BYTES", "2GB"),
        ("BITMILL_INFERENCE_CACHE_MAX_BYTES", "0"),
        ("BITMILL_INFERENCE_MODEL_ROOTS", ""),
        ("BITMILL_INFERENCE_MODELS", "no-uri"),
        ("BITMILL_INFERENCE_MODELS", '[{"name": "a"}]'),
        ("BITMILL_INFERENCE_MAX_NUM_QUEUED_REQS", "0"),
        ("BITMILL_INFERENCE_VLLM_SERVICE_MODEL", "No Name"),
        ("BITMILL_INFERENCE_DRAIN_GRACE_S", "inf"),
        ("BITMILL_INFERENCE_DRAIN_GRACE_S", "nan"),
        ("BITMILL_INFERENCE_CACHE_DIR", "~no-such-user/cache"),
        ("BITMILL_INFERENCE_MODEL_ROOTS", "file:///models,/models"),
        ("BITMILL_INFERENCE_ADDRESS", ""),
        ("BITMILL_INFERENCE_ADDRESS", "localhost"),
        ("BITMILL_INFERENCE_ADDRESS", "127.0.0.1:65536"),
        ("BITMILL_INFERENCE_METRICS_ADDRESS", "localhost:http"),
        ("BITMILL_INFERENCE_MODELS", "No-Name=file:///models/a"),
        ("BITMILL_INFERENCE_MODELS", "a=/models/a"),
        ("BITMILL_INFERENCE_MODELS", '[{"name": "a", "uri": "file:///a", "engine_options": {"max_num_seqs": 0}}]'),
        ("BITMILL_INFERENCE_MODELS", '[{"name": "a", "uri": "file:///a", "aliases": ["b"]}, "b=file:///b"]'),
        ("BITMILL_INFERENCE_MODELS", '[{"name": "a", "uri": "file:///a", "aliases": ["a"]}]'),
    ],
)
def test_a_bad_value_ends_the_start_and_names_the_variable(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, one line on standard error, nothing started."""
    monkeypatch.setenv("BITMILL_INFERENCE_MODEL_ROOTS", "file:///models")
    monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["bitmill-inference"])
    with pytest.raises(SystemExit) as caught:
        __main__.main()
    assert caught.value.code == 2
    assert name in capsys.readouterr().err


def test_a_root_that_is_no_store_uri_ends_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As any other bad value does."""
    monkeypatch.setattr("sys.argv", ["bitmill-inference", "--model-roots", "/models"])
    with pytest.raises(SystemExit) as caught:
        __main__.main()
    assert caught.value.code == 2
    assert "/models" in capsys.readouterr().err


def test_the_vllm_service_without_its_extra_ends_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The environment of the tests has no smg-grpc-servicer."""
    monkeypatch.setattr("sys.argv", ["bitmill-inference", "--model-roots", "file:///a", "--vllm-service-model", "m"])
    with pytest.raises(SystemExit) as caught:
        __main__.main()
    assert caught.value.code == 2
    assert "BITMILL_INFERENCE_VLLM_SERVICE_MODEL needs bitmill-inference's extra smg" in capsys.readouterr().err


def test_settings_do_not_change_once_they_are_read() -> None:
    """The class is frozen."""
    settings = parse("--model-roots", "file:///a")
    with pytest.raises(ValidationError):
        settings.address = "127.0.0.1:1"
