"""`bitmill embed`, `bitmill score` and `bitmill abort`."""

from __future__ import annotations

import math
from typing import Annotated, Any

import typer

from bitmill.cli import output
from bitmill.cli.generate import ModelName
from bitmill.cli.session import session_of
from bitmill.inference.v1.inference_service_pb2 import AbortResponse

_SHOWN_VALUES = 4

Truncate = Annotated[int | None, typer.Option(min=0, help="Keep only this many last tokens of each text.")]
Adapter = Annotated[str | None, typer.Option(help="An adapter that the model has.")]
Priority = Annotated[int | None, typer.Option(help="Lower runs earlier.")]


def embed(
    context: typer.Context,
    texts: Annotated[list[str], typer.Argument(metavar="TEXT...", help="What to embed.")],
    model: ModelName = "",
    dimensions: Annotated[
        int | None, typer.Option(min=0, help="Length of the vectors, for models trained to be cut.")
    ] = None,
    normalize: Annotated[bool | None, typer.Option(help="Scale each vector to length 1.")] = None,
    truncate_prompt_tokens: Truncate = None,
    adapter: Adapter = None,
    priority: Priority = None,
) -> None:
    """Turn texts into vectors. --json prints them whole."""
    session = session_of(context)
    options = _given(adapter=adapter, priority=priority)
    with session.inference() as client:
        response = client.embed(
            texts,
            model=model,
            dimensions=dimensions,
            normalize=normalize,
            truncate_prompt_tokens=truncate_prompt_tokens,
            **options,
        )
    if session.json:
        output.emit(response)
        return
    rows = (
        (text, str(len(embedding.values)), f"{math.hypot(*embedding.values):.3f}", _beginning(embedding.values))
        for text, embedding in zip(texts, response.embeddings, strict=True)
    )
    output.table(("TEXT", "DIMENSIONS", "LENGTH", "VALUES"), rows)


def score(
    context: typer.Context,
    query: Annotated[str, typer.Argument(metavar="QUERY", help="What the documents are compared with.")],
    documents: Annotated[list[str], typer.Argument(metavar="DOCUMENT...", help="What is compared.")],
    model: ModelName = "",
    truncate_prompt_tokens: Truncate = None,
    adapter: Adapter = None,
    priority: Priority = None,
) -> None:
    """Say how well documents fit a query, the best first. --json keeps their order."""
    session = session_of(context)
    options = _given(adapter=adapter, priority=priority)
    with session.inference() as client:
        response = client.score(query, documents, model=model, truncate_prompt_tokens=truncate_prompt_tokens, **options)
    if session.json:
        output.emit(response)
        return
    ranked = sorted(zip(response.scores, documents, strict=True), reverse=True)
    output.table(("SCORE", "DOCUMENT"), ((f"{fit:.4f}", document) for fit, document in ranked))


def abort(
    context: typer.Context,
    request_ids: Annotated[list[str], typer.Argument(metavar="REQUEST_ID...", help="Ids of running calls.")],
) -> None:
    """End running calls by their request ids; they answer with what they have."""
    session = session_of(context)
    with session.inference() as client:
        aborted = client.abort(request_ids)
    if session.json:
        output.emit(AbortResponse(aborted_calls=aborted))
    else:
        output.write(f"aborted {aborted} call{'' if aborted == 1 else 's'}\n")


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _beginning(values: Any) -> str:
    shown = " ".join(f"{value:.4f}" for value in values[:_SHOWN_VALUES])
    return shown + (" …" if len(values) > _SHOWN_VALUES else "")
