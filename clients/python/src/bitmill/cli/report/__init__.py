"""`bitmill artifacts report`: one HTML page about artifacts that needs nothing but itself."""

from bitmill.cli.report.page import render

__all__ = ["render"]
