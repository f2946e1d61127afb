"""`bitmill models top`: what the engines do at the moment."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer
from rich.live import Live

from bitmill.cli import output
from bitmill.cli.session import INTERRUPTED, Session, session_of
from bitmill.client import InferenceClient
from bitmill.inference.v1.model_pb2 import ModelLoad, ModelState

_COLUMNS = ("MODEL", "STATE", "RUNNING", "WAITING", "KV CACHE", "PROMPT TOK/S", "OUTPUT TOK/S", "REFUSED")


def top(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="[MODEL]", help="Only this one, by name or alias.")] = "",
    watch: Annotated[
        float | None, typer.Option(min=0.1, metavar="SECONDS", help="Again every so many seconds, until Ctrl-C.")
    ] = None,
) -> None:
    """Show what each model's engine does: running of most at once, waiting of most allowed, KV cache, speed."""
    session = session_of(context)
    with session.inference() as client:
        if watch is None:
            _print(session, client, model)
            return
        try:
            _watch(session, client, model, watch)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None


def _watch(session: Session, client: InferenceClient, model: str, pause: float) -> None:
    if session.json or not sys.stdout.isatty():
        while True:
            _print(session, client, model)
            time.sleep(pause)
    with Live(console=output.console(), auto_refresh=False) as live:
        while True:
            live.update(output.grid(_COLUMNS, map(_row, client.load(model).loads)), refresh=True)
            time.sleep(pause)


def _print(session: Session, client: InferenceClient, model: str) -> None:
    report = client.load(model)
    output.emit(report) if session.json else output.table(_COLUMNS, map(_row, report.loads))


def _row(load: ModelLoad) -> tuple[str, ...]:
    return (
        load.model,
        output.word(ModelState, load.state),
        _of(load.running_requests, load.max_num_seqs),
        _of(load.waiting_requests, load.max_num_queued_reqs),
        f"{load.kv_cache_usage:.1%}",
        f"{load.prompt_tokens_per_second:.1f}",
        f"{load.generation_tokens_per_second:.1f}",
        str(load.refused_calls),
    )


def _of(number: int, most: int) -> str:
    return f"{number}/{most}" if most else str(number)
