"""The command line `bitmill`: quantize checkpoints, read artifacts, load models, generate."""

from __future__ import annotations

from typing import Annotated

import typer

from bitmill.cli import artifacts, jobs, models, recipes
from bitmill.cli.generate import chat, generate
from bitmill.cli.pooling import abort, embed, score
from bitmill.cli.quantize import quantize
from bitmill.cli.session import RootGroup, Session, quiet_grpc

app = typer.Typer(
    cls=RootGroup, no_args_is_help=True, pretty_exceptions_enable=False, context_settings={"max_content_width": 120}
)


@app.callback()
def root(
    context: typer.Context,
    quantizer: Annotated[
        str, typer.Option(envvar="BITMILL_QUANTIZER", metavar="HOST:PORT", help="Address of the quantizer.")
    ] = "127.0.0.1:50051",
    inference: Annotated[
        str, typer.Option(envvar="BITMILL_INFERENCE", metavar="HOST:PORT", help="Address of the inference service.")
    ] = "127.0.0.1:50052",
    timeout: Annotated[
        float | None,
        typer.Option(min=0.001, metavar="SECONDS", help="Deadline of each call. Following a job has none."),
    ] = None,
    caller_id: Annotated[
        str, typer.Option(envvar="BITMILL_CALLER_ID", metavar="ID", help="Who calls, for the server's bounds and logs.")
    ] = "",
    json: Annotated[bool, typer.Option("--json", help="Print protobuf JSON, one object a line, for programs.")] = False,
) -> None:
    """Turn checkpoints into quantized artifacts, and serve them.

    The options below may stand after the subcommand too.
    """
    quiet_grpc()
    context.obj = Session(quantizer, inference, timeout, caller_id, json)


app.command()(quantize)
app.command()(generate)
app.command()(chat)
app.command()(embed)
app.command()(score)
app.command()(abort)
app.add_typer(jobs.app, name="jobs")
app.add_typer(artifacts.app, name="artifacts")
app.add_typer(models.app, name="models")
app.add_typer(recipes.app, name="recipes")
