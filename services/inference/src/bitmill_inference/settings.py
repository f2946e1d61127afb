"""Settings of the inference server: environment variables `BITMILL_INFERENCE_*`, or flags of the same names."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict


class Settings(BaseSettings):
    """Serves language models over gRPC."""

    model_config = SettingsConfigDict(
        env_prefix="BITMILL_INFERENCE_",
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        cli_prog_name="bitmill-inference",
        cli_kebab_case=True,
        cli_implicit_flags=True,
    )

    model_roots: Annotated[tuple[str, ...], NoDecode] = Field(min_length=1)
    """file:// or s3:// directories, comma-separated, that artifacts and checkpoints may be loaded from. Required."""

    address: str = "127.0.0.1:50052"
    """host:port to listen on; port 0 for a free one, which the log then names."""

    insecure: bool = False
    """Allow an address that other hosts reach, in plain text."""

    cache_dir: Path = Path("~/.cache/bitmill/inference")
    """Where models from remote stores are kept on this host."""

    drain_grace_s: float = Field(default=30, ge=0)
    """Seconds that running calls get to end after SIGTERM."""

    kv_cache_memory_bytes: int | None = Field(default=None, ge=1)
    """Bytes of each model's KV cache where LoadModel does not say. Default on the CPU: 2 GiB; on a GPU what is left."""

    enforce_eager: bool | None = None
    """Skip compilation and graph capture where LoadModel does not say: a faster start, slower steps."""

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least severe log lines to write."""

    s3_endpoint: str | None = None
    """URL of an S3-compatible service. Credentials and whatever else is unset come from the AWS_* variables."""

    s3_region: str | None = None
    """Region of the buckets."""

    s3_allow_http: bool = False
    """Allow an s3_endpoint without encryption."""

    @field_validator("model_roots", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return tuple(root for root in value.split(",") if root) if isinstance(value, str) else value

    @field_validator("cache_dir")
    @classmethod
    def _expand(cls, value: Path) -> Path:
        return value.expanduser().absolute()
