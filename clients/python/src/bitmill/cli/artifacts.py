"""`bitmill artifacts`: list, show, verify and report on artifacts."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from bitmill.artifact.v1.artifact_pb2 import Artifact
from bitmill.artifact.v1.artifact_service_pb2 import FileFaultKind
from bitmill.cli import output
from bitmill.cli.artifact_facts import artifact_facts, recipe_text
from bitmill.cli.report import render
from bitmill.cli.session import FAILED, session_of
from bitmill.requests import to_uri

app = typer.Typer(help="Quantized checkpoints in the store.", no_args_is_help=True)

ArtifactUri = Annotated[str, typer.Argument(metavar="URI", help="The artifact: a URI, or a local path.")]


@app.command("list")
def list_artifacts(
    context: typer.Context,
    name: Annotated[str, typer.Option(help="Only artifacts of this name.")] = "",
    limit: Annotated[int | None, typer.Option(min=1, max=2**31, help="At most this many.")] = None,
) -> None:
    """List artifacts by name and digest."""
    session = session_of(context)
    with session.quantizer() as client:
        artifacts = islice(client.artifacts(name), limit)
        if session.json:
            for artifact in artifacts:
                output.emit(artifact)
        else:
            output.table(("NAME", "SCHEME", "SIZE", "PERPLEXITY", "CREATED", "URI"), map(_row, artifacts))


@app.command()
def show(context: typer.Context, uri: ArtifactUri) -> None:
    """Show one artifact and its files."""
    session = session_of(context)
    with session.quantizer() as client:
        artifact = client.artifact(to_uri(uri))
        if session.json:
            output.emit(artifact)
            return
        output.facts(artifact_facts(artifact))
        output.table(
            ("FILE", "SIZE", "SHA-256"), ((f.path, output.size(f.size_bytes), f.sha256) for f in artifact.files)
        )


@app.command()
def verify(context: typer.Context, uri: ArtifactUri) -> None:
    """Read every byte of an artifact again; exit code 1 when one differs from the manifest."""
    session = session_of(context)
    with session.quantizer() as client:
        result = client.verify(to_uri(uri))
    if session.json:
        output.emit(result)
    elif result.intact:
        output.write(f"intact: {output.size(result.verified_bytes)} verified\n")
    for fault in result.faults:
        output.complain(f"{fault.path}: {output.word(FileFaultKind, fault.kind).replace('_', ' ')}")
    if not result.intact:
        raise typer.Exit(FAILED)


@app.command()
def report(
    context: typer.Context,
    uris: Annotated[list[str], typer.Argument(metavar="URI...", help="The artifacts: URIs, or local paths.")],
    file: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write the page. -: standard output.")
    ] = Path("report.html"),
) -> None:
    """Write an HTML page about artifacts: what they lost, layer by layer, how they were made, and their siblings.

    The page refers to nothing outside itself. Siblings are the artifacts of the same source that the server has.
    """
    session = session_of(context)
    with session.quantizer() as client:
        artifacts = [client.artifact(to_uri(uri)) for uri in dict.fromkeys(uris)]
        page = render(artifacts, list(client.artifacts()))
    if str(file) == "-":
        output.write(page)
        return
    try:
        file.write_text(page, encoding="utf-8")
    except OSError as error:
        output.complain(f"cannot write {file}: {error.strerror}")
        raise typer.Exit(FAILED) from error
    output.write(f"{json.dumps({'path': str(file.absolute())})}\n" if session.json else f"{file}\n")


def _row(artifact: Artifact) -> tuple[str, ...]:
    evaluation = artifact.evaluation
    return (
        artifact.name,
        recipe_text(artifact),
        output.size(artifact.size_bytes),
        f"{evaluation.source_perplexity:.2f} → {evaluation.artifact_perplexity:.2f}" if evaluation.num_tokens else "",
        output.time(artifact.create_time),
        artifact.uri,
    )
