"""`bitmill models`: list, show, load and unload the models of an inference server."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from bitmill.cli import output
from bitmill.cli.session import FAILED, INTERRUPTED, session_of
from bitmill.client import InferenceClient
from bitmill.inference.v1.model_pb2 import LoadPhase, Model, ModelState
from bitmill.requests import to_uri

app = typer.Typer(help="Models of an inference server.", no_args_is_help=True)

ModelName = Annotated[str, typer.Argument(metavar="NAME")]


@app.command("list")
def list_models(context: typer.Context) -> None:
    """List the models by name."""
    session = session_of(context)
    with session.inference() as client:
        models = client.models()
        if session.json:
            for model in models:
                output.emit(model)
        else:
            output.table(("NAME", "STATE", "PHASE", "QUANTIZATION", "CONTEXT", "URI"), map(_row, models))


@app.command()
def show(context: typer.Context, name: ModelName) -> None:
    """Show one model."""
    session = session_of(context)
    with session.inference() as client:
        model = client.model(name)
        output.emit(model) if session.json else output.facts(_facts(model))


@app.command()
def load(
    context: typer.Context,
    uri: Annotated[str, typer.Argument(metavar="URI", help="An artifact or a checkpoint: a URI, or a local path.")],
    name: Annotated[str, typer.Option(help="The name that requests will use. Default: the artifact's.")] = "",
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Longest context in tokens.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Most sequences in one step.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens in one step.")] = None,
    block_size: Annotated[int | None, typer.Option(min=1, help="Tokens in a block of the KV cache.")] = None,
    kv_cache_memory_bytes: Annotated[int | None, typer.Option(min=1, help="Bytes for the KV cache.")] = None,
    gpu_memory_utilization: Annotated[float | None, typer.Option(help="Fraction of the GPU's memory to use.")] = None,
    enforce_eager: Annotated[bool | None, typer.Option(help="Skip compilation: faster start, slower steps.")] = None,
    enable_prefix_caching: Annotated[bool | None, typer.Option(help="Reuse the KV cache of equal beginnings.")] = None,
    tensor_parallel_size: Annotated[int | None, typer.Option(min=1, help="GPUs that share each layer.")] = None,
    pipeline_parallel_size: Annotated[int | None, typer.Option(min=1, help="Groups of layers on own GPUs.")] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Do not wait until it serves.")] = False,
) -> None:
    """Load an artifact or a checkpoint and wait until it serves."""
    session = session_of(context)
    options: dict[str, Any] = {
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "block_size": block_size,
        "kv_cache_memory_bytes": kv_cache_memory_bytes,
        "gpu_memory_utilization": gpu_memory_utilization,
        "enforce_eager": enforce_eager,
        "enable_prefix_caching": enable_prefix_caching,
        "tensor_parallel_size": tensor_parallel_size,
        "pipeline_parallel_size": pipeline_parallel_size,
    }
    given = {key: value for key, value in options.items() if value is not None}
    with session.inference() as client:
        model = client.load_model(to_uri(uri), name=name, return_immediately=True, **given)
        if not detach:
            model = _loaded(client, model)
    output.emit(model) if session.json else output.facts(_facts(model))


@app.command()
def unload(context: typer.Context, name: ModelName) -> None:
    """Let the running calls of a model end, and unload it."""
    with session_of(context).inference() as client:
        client.unload_model(name)


def _loaded(client: InferenceClient, model: Model) -> Model:
    """Follows a model until it serves, a line on standard error for each phase."""
    told = ""
    try:
        with client.watch_model(model.name) as changes:
            for model in changes:
                phase = output.word(LoadPhase, model.phase).replace("_", " ")
                if phase and phase != told:
                    output.note(told := phase)
                if model.state != ModelState.MODEL_STATE_LOADING:
                    break
    except KeyboardInterrupt:
        output.note(f"model {model.name} goes on loading\n  stop it: bitmill models unload {model.name}")
        raise typer.Exit(INTERRUPTED) from None
    if model.state != ModelState.MODEL_STATE_SERVING:
        state = output.word(ModelState, model.state)
        why = f" {model.error.reason}: {model.error.message}" if model.error.reason else ""
        output.complain(
            f"model {model.name} {state}{why}",
            *(f"{key}={value}" for key, value in sorted(model.error.metadata.items()) if value not in why),
        )
        raise typer.Exit(FAILED)
    return model


def _row(model: Model) -> tuple[str, ...]:
    return (
        model.name,
        output.word(ModelState, model.state),
        output.word(LoadPhase, model.phase).replace("_", " "),
        model.quantization,
        str(model.max_model_len or ""),
        model.uri,
    )


def _facts(model: Model) -> list[tuple[str, str]]:
    return [
        ("model", model.name),
        ("state", output.word(ModelState, model.state)),
        ("phase", output.word(LoadPhase, model.phase).replace("_", " ")),
        ("error", f"{model.error.reason}: {model.error.message}" if model.error.reason else ""),
        *((f"  {key}", value) for key, value in sorted(model.error.metadata.items())),
        ("uri", model.uri),
        ("digest", model.digest),
        ("quantization", model.quantization),
        ("context", f"{model.max_model_len} tokens" if model.max_model_len else ""),
        *((field.name, str(value)) for field, value in model.engine_options.ListFields()),
        ("created", output.time(model.create_time)),
        ("serving", output.time(model.serving_time)),
    ]
