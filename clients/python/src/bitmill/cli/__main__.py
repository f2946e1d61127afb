"""`python -m bitmill.cli` is `bitmill`."""

from bitmill.cli import app

app(prog_name="bitmill")
