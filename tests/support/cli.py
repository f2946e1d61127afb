"""Runs the command line in this process."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from bitmill.cli import app
from support.fake_services import FakeServer


def bitmill(server: FakeServer, *arguments: str, stdin: str | None = None) -> Result:
    """Runs one command against the server, which plays both services."""
    addresses = {"BITMILL_QUANTIZER": server.address, "BITMILL_INFERENCE": server.address}
    return CliRunner().invoke(app, list(arguments), env=addresses, input=stdin)
