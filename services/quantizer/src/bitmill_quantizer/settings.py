"""Settings of the quantizer server: environment variables `BITMILL_QUANTIZER_*`, or flags of the same names."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator
from pydantic_settings import SettingsConfigDict

from bitmill_common.settings import Address, DrainGrace, LocalPath, Root, Roots, ServerSettings

_ENGINES = Path(__file__).parents[2] / "engines"


class Settings(ServerSettings):
    """Turns checkpoints into quantized artifacts, over gRPC."""

    model_config = SettingsConfigDict(env_prefix="BITMILL_QUANTIZER_", cli_prog_name="bitmill-quantizer")

    source_roots: Roots
    """file:// or s3:// directories, comma-separated, that checkpoints and calibration texts may come from. Required."""

    artifact_root: Root
    """The file:// or s3:// directory that artifacts are written below. Required."""

    address: Address = Field(default="127.0.0.1:50051", min_length=1)
    """host:port to listen on; port 0 for a free one, which the log then names."""

    work_dir: LocalPath = Path("~/.cache/bitmill/quantizer")
    """Where jobs keep their files while they run, and the database unless database_url names one. For one server."""

    database_url: str = ""
    """postgresql://… of the job database. Default: SQLite in work_dir."""

    worker_id: str = Field(default="worker-0", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Name of this server among those that share a database. A server takes up what the last one of its name left."""

    concurrency: int = Field(default=1, ge=1, le=64)
    """Jobs that run at once."""

    llmcompressor_python: LocalPath = _ENGINES / "llmcompressor/.venv/bin/python"
    """Interpreter of the environment with the engine llmcompressor. Default: the one of `make setup`."""

    gptqmodel_python: LocalPath = _ENGINES / "gptqmodel/.venv/bin/python"
    """Interpreter of the environment with the engine gptqmodel. Default: the one of `make setup-engine-gptqmodel`."""

    auto_gptq_python: LocalPath = _ENGINES / "auto_gptq/.venv/bin/python"
    """Interpreter of the environment with the engine auto_gptq. Default: the one of `make setup-engine-auto_gptq`."""

    verifier_python: LocalPath | Literal[""] = Path(__file__).parents[3] / "inference/.venv/bin/python"
    """Interpreter of the environment with bitmill-inference, which loads each result before it is published.
    Default: the one of `make setup`. Empty: artifacts are published unverified, and say so."""

    drain_grace_s: DrainGrace = 10
    """Seconds that running calls get to end after SIGTERM. Jobs are stopped, and go on at the next start."""

    @field_validator("database_url")
    @classmethod
    def _check_database(cls, value: str) -> str:
        if value and not value.startswith(("sqlite:///", "postgresql://")):
            raise ValueError("must start with sqlite:/// or postgresql://")
        return value

    @property
    def resolved_database_url(self) -> str:
        """The job database's URL."""
        return self.database_url or f"sqlite:///{self.work_dir}/jobs.sqlite"

    @property
    def engine_pythons(self) -> dict[str, Path]:
        """The interpreters by the engines' names; one that is not there is an engine that is not installed."""
        return {
            "llmcompressor": self.llmcompressor_python,
            "gptqmodel": self.gptqmodel_python,
            "auto_gptq": self.auto_gptq_python,
        }
