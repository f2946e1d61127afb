"""`bitmill models adapters` and `bitmill models alias`: what models have beside themselves."""

from __future__ import annotations

from typing import Annotated

import typer

from bitmill.cli import output
from bitmill.cli.generate import ModelName
from bitmill.cli.session import session_of
from bitmill.inference.v1.model_pb2 import Adapter
from bitmill.requests import to_uri

adapters = typer.Typer(help="LoRA adapters of a model.", no_args_is_help=True)
aliases = typer.Typer(help="Further names of models.", no_args_is_help=True)

Alias = Annotated[str, typer.Argument(metavar="ALIAS")]


@adapters.command()
def load(
    context: typer.Context,
    uri: Annotated[str, typer.Argument(metavar="URI", help="A PEFT adapter's directory: a URI, or a local path.")],
    model: ModelName = "",
    name: Annotated[str, typer.Option(help="The name that requests will use. Default: the directory's.")] = "",
    digest: Annotated[str, typer.Option(help="Digest that its files must have, sha256:…")] = "",
) -> None:
    """Load an adapter into a model."""
    session = session_of(context)
    with session.inference() as client:
        adapter = client.load_adapter(to_uri(uri), model=model, name=name, digest=digest)
    output.emit(adapter) if session.json else output.facts(_facts(adapter))


@adapters.command()
def unload(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The adapter.")],
    model: ModelName = "",
) -> None:
    """Let the running calls with an adapter end, and unload it."""
    with session_of(context).inference() as client:
        client.unload_adapter(name, model=model)


@aliases.command("set")
def set_alias(
    context: typer.Context,
    alias: Alias,
    name: Annotated[str, typer.Argument(metavar="MODEL", help="The model that it will name.")],
) -> None:
    """Make an alias of a serving model, or move it there. Running calls stay where they are."""
    session = session_of(context)
    with session.inference() as client:
        model = client.set_alias(alias, name)
    if session.json:
        output.emit(model)
    else:
        output.facts([("model", model.name), ("aliases", ", ".join(model.aliases))])


@aliases.command("delete")
def delete_alias(context: typer.Context, alias: Alias) -> None:
    """Remove an alias."""
    with session_of(context).inference() as client:
        client.delete_alias(alias)


def _facts(adapter: Adapter) -> list[tuple[str, str]]:
    return [
        ("adapter", adapter.name),
        ("uri", adapter.uri),
        ("digest", adapter.digest),
        ("rank", str(adapter.rank)),
        ("loaded", output.time(adapter.load_time)),
    ]
