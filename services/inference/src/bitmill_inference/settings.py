"""Settings of the inference server: environment variables `BITMILL_INFERENCE_*`, or flags of the same names."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator
from pydantic_settings import SettingsConfigDict

from bitmill_common.settings import Address, DrainGrace, LocalPath, Roots, ServerSettings
from bitmill_inference.models.engine_options import EngineOptions
from bitmill_inference.models.model import MODEL_NAME, MODEL_NAME_RULE
from bitmill_inference.models.preload import check_requests
from bitmill_inference.requests.admission import DEFAULT_CALLER_LIMIT
from bitmill_inference.servicers.convert_model import preload_requests


class Settings(ServerSettings):
    """Serves language models over gRPC."""

    model_config = SettingsConfigDict(env_prefix="BITMILL_INFERENCE_", cli_prog_name="bitmill-inference")

    model_roots: Roots
    """file:// or s3:// directories, comma-separated, that artifacts and checkpoints may be loaded from. Required."""

    address: Address = Field(default="127.0.0.1:50052", min_length=1)
    """host:port to listen on; port 0 for a free one, which the log then names."""

    cache_dir: LocalPath = Path("~/.cache/bitmill/inference")
    """Where models from remote stores are kept on this host. Several servers may share it."""

    cache_max_bytes: int | None = Field(default=None, ge=1)
    """Most bytes that cache_dir may hold; what was used least recently makes room. Default: 90 % of what it holds and
    what its disk has free."""

    metrics_address: Address = ""
    """host:port of Prometheus metrics over HTTP, at /metrics; other hosts' reach as for address. Empty: none."""

    max_concurrent_requests_per_caller: int = Field(default=DEFAULT_CALLER_LIMIT, ge=1)
    """Most sequences that one caller, by x-caller-id or else its host, has running and waiting on all models."""

    drain_grace_s: DrainGrace = 30
    """Seconds that running calls get to end after SIGTERM."""

    kv_cache_memory_bytes: int | None = Field(default=None, ge=1)
    """Bytes of each model's KV cache where LoadModel does not say. Default on the CPU: 2 GiB; on a GPU what is left."""

    enforce_eager: bool | None = None
    """Skip compilation and graph capture where LoadModel does not say: a faster start, slower steps."""

    models: str = ""
    """Models to load at the start: name=URI with commas between them, or a JSON list of such texts and of objects with
    LoadModel's fields, name and uri among them. The server binds at once; health is NOT_SERVING until all serve."""

    max_num_queued_reqs: int | None = Field(default=1024, ge=1)
    """Requests of one model, running and waiting, above which a call is refused, where LoadModel does not say."""

    max_num_queued_tokens: int | None = Field(default=None, ge=1)
    """Prompt tokens that wait in one model, above which a call is refused, where LoadModel does not say. Default: no
    bound."""

    vllm_service_model: str = ""
    """Name or alias of the model that vllm.grpc.engine.VllmEngine serves here, the contract of vLLM's own gRPC server.
    Empty: no such service. Needs the extra smg."""

    @field_validator("vllm_service_model")
    @classmethod
    def _check_name(cls, value: str) -> str:
        if value and not MODEL_NAME.fullmatch(value):
            raise ValueError(f"must be {MODEL_NAME_RULE}")
        return value

    @field_validator("models")
    @classmethod
    def _check_models(cls, value: str) -> str:
        check_requests(preload_requests(value))
        return value

    @property
    def engine_defaults(self) -> EngineOptions:
        """Options of an engine where neither LoadModel nor the artifact's manifest says."""
        return EngineOptions(
            kv_cache_memory_bytes=self.kv_cache_memory_bytes,
            enforce_eager=self.enforce_eager,
            max_num_queued_reqs=self.max_num_queued_reqs,
            max_num_queued_tokens=self.max_num_queued_tokens,
        )
