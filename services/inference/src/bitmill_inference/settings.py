"""Settings of the inference server: environment variables `BITMILL_INFERENCE_*`, or flags of the same names."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator
from pydantic_settings import SettingsConfigDict

from bitmill_common.settings import Roots, ServerSettings


class Settings(ServerSettings):
    """Serves language models over gRPC."""

    model_config = SettingsConfigDict(env_prefix="BITMILL_INFERENCE_", cli_prog_name="bitmill-inference")

    model_roots: Roots
    """file:// or s3:// directories, comma-separated, that artifacts and checkpoints may be loaded from. Required."""

    address: str = "127.0.0.1:50052"
    """host:port to listen on; port 0 for a free one, which the log then names."""

    cache_dir: Path = Path("~/.cache/bitmill/inference")
    """Where models from remote stores are kept on this host."""

    drain_grace_s: float = Field(default=30, ge=0)
    """Seconds that running calls get to end after SIGTERM."""

    kv_cache_memory_bytes: int | None = Field(default=None, ge=1)
    """Bytes of each model's KV cache where LoadModel does not say. Default on the CPU: 2 GiB; on a GPU what is left."""

    enforce_eager: bool | None = None
    """Skip compilation and graph capture where LoadModel does not say: a faster start, slower steps."""

    @field_validator("cache_dir")
    @classmethod
    def _expand(cls, value: Path) -> Path:
        return value.expanduser().absolute()
