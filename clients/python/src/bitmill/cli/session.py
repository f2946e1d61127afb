"""One run of the command line: the global options, the clients, and how failures end it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import typer
from typer.core import TyperGroup

from bitmill import errors
from bitmill.cli import output
from bitmill.client import InferenceClient, QuantizerClient

FAILED = 1
USAGE = 2
INTERRUPTED = 130

# Global options, and whether each takes a value.
_GLOBAL_OPTIONS = {"--json": False, "--quantizer": True, "--inference": True, "--timeout": True, "--caller-id": True}


@dataclass(frozen=True)
class Session:
    """The global options of a run."""

    quantizer_address: str
    inference_address: str
    timeout: float | None
    caller_id: str
    json: bool

    @contextmanager
    def quantizer(self) -> Iterator[QuantizerClient]:
        """A client of the quantizer; an error inside ends the run with one message and exit code 1."""
        with (
            _failing("quantizer", self.quantizer_address),
            QuantizerClient(self.quantizer_address, timeout=self.timeout, caller_id=self.caller_id) as client,
        ):
            yield client

    @contextmanager
    def inference(self) -> Iterator[InferenceClient]:
        """A client of the inference service; an error inside ends the run with one message and exit code 1."""
        with (
            _failing("inference", self.inference_address),
            InferenceClient(self.inference_address, timeout=self.timeout, caller_id=self.caller_id) as client,
        ):
            yield client


@contextmanager
def _failing(service: str, address: str) -> Iterator[None]:
    try:
        yield
    except errors.BitmillRpcError as error:
        output.complain(describe(error), *_hints(error, service, address))
        raise typer.Exit(FAILED) from error
    except errors.RequestValueError as error:
        output.complain(str(error))
        raise typer.Exit(USAGE) from error
    except errors.JobNotSucceededError as error:
        output.complain(str(error), *(f"{key}={value}" for key, value in sorted(error.job.error.metadata.items())))
        raise typer.Exit(FAILED) from error


def describe(error: errors.BitmillRpcError) -> str:
    """Returns an error for people: one line for each wrong field instead of one long line for all."""
    if len(error.field_violations) < 2:
        return str(error)
    lines = [f"{error.code.name} {error.reason}: {len(error.field_violations)} fields are wrong"]
    lines += [f"  {violation.field}: {violation.description}" for violation in error.field_violations]
    if error.request_id:
        lines.append(f"  request id {error.request_id}")
    return "\n".join(lines)


def _hints(error: errors.BitmillRpcError, service: str, address: str) -> Iterator[str]:
    if error.reason:
        return  # A bitmill server said it, and says what would be right.
    choose = f"--{service} or BITMILL_{service.upper()}"
    if error.code is grpc.StatusCode.UNAVAILABLE:
        yield f"is the {service} service running at {address}? Another address: {choose}"
    elif error.code is grpc.StatusCode.UNIMPLEMENTED:
        yield f"{address} does not serve this call; is it the {service} service? Another address: {choose}"
    elif error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
        yield "--timeout SECONDS waits longer"


class RootGroup(TyperGroup):
    """The root command. Its options may stand after a subcommand too: `bitmill jobs list --json`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Moves the global options to the front, up to a `--`."""
        return super().parse_args(ctx, hoisted(args))

    def invoke(self, ctx: Any) -> Any:
        """Runs the command; output that cannot be written ends the run with one message and exit code 1."""
        try:
            return super().invoke(ctx)
        except output.OutputError as error:
            output.complain(str(error))
            raise typer.Exit(FAILED) from error


def hoisted(args: list[str]) -> list[str]:
    """Returns the arguments with the global options first. Those after `--` stay where they are."""
    front: list[str] = []
    rest: list[str] = []
    remaining = list(args)
    while remaining:
        argument = remaining.pop(0)
        if argument == "--":
            rest += [argument, *remaining]
            break
        if _GLOBAL_OPTIONS.get(argument) and remaining:
            front += [argument, remaining.pop(0)]
        elif argument.partition("=")[0] in _GLOBAL_OPTIONS and ("=" in argument or not _GLOBAL_OPTIONS[argument]):
            front.append(argument)
        else:
            rest.append(argument)
    return front + rest


def session_of(context: typer.Context) -> Session:
    """Returns the run's session."""
    session: Session = context.obj
    return session


def quiet_grpc() -> None:
    """Keeps the C core's own log lines off the terminal; the status of a call says all that is of use."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
