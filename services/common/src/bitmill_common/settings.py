"""What the settings of both servers share, and how a server reads them: variables, or flags of the same names."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated, Literal, NoReturn, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, CliApp, NoDecode, SettingsConfigDict

from bitmill_common import uris
from bitmill_common.stores import StoreOptions

_MAX_PORT = 2**16 - 1
_DAY_S = 86_400


def _split(value: object) -> object:
    return tuple(item for item in value.split(",") if item) if isinstance(value, str) else value


def _check_root(value: str) -> str:
    try:
        uris.parse(value)
    except ValueError as error:
        raise ValueError(f"{value!r} {error}") from None
    return value


def _check_address(value: str) -> str:
    host, _, port = value.rpartition(":")
    if value and not (host and port.isascii() and port.isdigit() and int(port) <= _MAX_PORT):
        raise ValueError("must be host:port")
    return value


def _expand(value: Path) -> Path:
    try:
        return value.expanduser().absolute()
    except RuntimeError as error:  # of a user that there is not
        raise ValueError(str(error)) from None


Root = Annotated[str, AfterValidator(_check_root)]
"""A file:// or s3:// directory."""

Roots = Annotated[tuple[Root, ...], NoDecode, BeforeValidator(_split), Field(min_length=1)]
"""file:// or s3:// directories; one text with commas between them in a variable or a flag."""

Address = Annotated[str, AfterValidator(_check_address)]
"""host:port, or nothing."""

LocalPath = Annotated[Path, AfterValidator(_expand)]
"""A path on this host; "~" is the user's home."""

DrainGrace = Annotated[float, Field(ge=0, le=_DAY_S)]
"""Seconds that running calls get to end: at most a day."""


class ServerSettings(BaseSettings):
    """What every server of bitmill can be told. A server adds `env_prefix` and `cli_prog_name` to the configuration."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, cli_kebab_case=True, cli_implicit_flags=True
    )

    insecure: bool = False
    """Allow an address that other hosts reach, in plain text."""

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least severe log lines to write."""

    s3_endpoint: str | None = None
    """URL of an S3-compatible service. Credentials and whatever else is unset come from the AWS_* variables."""

    s3_region: str | None = None
    """Region of the buckets."""

    s3_allow_http: bool = False
    """Allow an s3_endpoint without encryption."""

    @property
    def store_options(self) -> StoreOptions:
        """How to reach the stores."""
        return StoreOptions(s3_endpoint=self.s3_endpoint, s3_region=self.s3_region, s3_allow_http=self.s3_allow_http)


S = TypeVar("S", bound=ServerSettings)


def read_settings(kind: type[S]) -> S:
    """Returns the settings of this process; exits with status 2, naming the variable, when one cannot be used."""
    try:
        return CliApp.run(kind)
    except ValidationError as error:
        prefix = str(kind.model_config.get("env_prefix", ""))
        exit_for_settings(kind, "; ".join(_describe(prefix, problem) for problem in error.errors()))


def exit_for_settings(kind: type[ServerSettings], problem: str) -> NoReturn:
    """Says on standard error what is wrong, with fields by their variables' names, and exits with status 2."""
    prefix = str(kind.model_config.get("env_prefix", ""))
    for field in kind.model_fields:
        if "_" in field:  # the others are words of the language too
            problem = re.sub(rf"\b{field}\b", f"{prefix}{field.upper()}", problem)
    print(f"{kind.model_config.get('cli_prog_name')}: {problem}", file=sys.stderr)  # noqa: T201
    sys.exit(2)


def _describe(prefix: str, problem: ErrorDetails) -> str:
    name = "_".join(str(part) for part in problem["loc"]).upper()
    given = "" if problem["type"] == "missing" else f", got {problem.get('input')!r}"
    return f"{prefix}{name}: {problem['msg']}{given}"
