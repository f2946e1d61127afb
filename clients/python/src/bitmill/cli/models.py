"""`bitmill models`: list, show, load and unload the models of an inference server."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from bitmill.cli import engine_options, output
from bitmill.cli.adapters import adapters, aliases
from bitmill.cli.load_report import top
from bitmill.cli.session import FAILED, INTERRUPTED, session_of
from bitmill.client import InferenceClient
from bitmill.inference.v1.model_pb2 import Adapter, LoadPhase, Model, ModelState
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
            output.table(("NAME", "STATE", "PHASE", "QUANTIZATION", "CONTEXT", "ALIASES", "URI"), map(_row, models))


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
    alias: Annotated[
        list[str] | None, typer.Option(help="A further name, moved here once it serves. May be repeated.")
    ] = None,
    unload_replaced: Annotated[
        bool, typer.Option("--unload-replaced", help="Then unload the models that this leaves without an alias.")
    ] = False,
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
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Any other option of the engine, such as enable_lora=true. Repeatable."),
    ] = None,
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
    others = engine_options.parsed(option or ())
    for key in given.keys() & others.keys():
        raise typer.BadParameter(f"--{key.replace('_', '-')} and --option {key} are the same")
    with session.inference() as client:
        model = client.load_model(
            to_uri(uri),
            name=name,
            aliases=alias or (),
            unload_replaced=unload_replaced,
            return_immediately=True,
            **given,
            **others,
        )
        if not detach:
            model = _loaded(client, model)
    output.emit(model) if session.json else output.facts(_facts(model))


@app.command()
def unload(context: typer.Context, name: ModelName) -> None:
    """Let the running calls of a model end, and unload it."""
    with session_of(context).inference() as client:
        client.unload_model(name)


@app.command()
def sleep(context: typer.Context, name: ModelName) -> None:
    """Let the running calls of a model end, and free its memory on the device."""
    session = session_of(context)
    with session.inference() as client:
        model = client.sleep_model(name)
    output.emit(model) if session.json else output.facts(_facts(model))


@app.command()
def wake(context: typer.Context, name: ModelName) -> None:
    """Bring a sleeping model back and wait until it serves."""
    session = session_of(context)
    with session.inference() as client:
        model = client.wake_model(name)
    output.emit(model) if session.json else output.facts(_facts(model))


app.command()(top)
app.add_typer(aliases, name="alias")
app.add_typer(adapters, name="adapters")


def _loaded(client: InferenceClient, model: Model) -> Model:
    """Follows a model until it serves, a line on standard error for each phase."""
    told = ""
    try:
        with client.watch_model(model.name) as changes:
            for model in changes:
                step = _step(model)
                if step and step != told:
                    output.note(told := step)
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


def _step(model: Model) -> str:
    """Returns the phase of a loading model, and how many tenths of it are done where it counts bytes."""
    phase = output.word(LoadPhase, model.phase).replace("_", " ")
    progress = model.load_progress
    if not progress.total_bytes:
        return phase
    return (
        f"{phase} {10 * progress.completed_bytes // progress.total_bytes * 10}% of {output.size(progress.total_bytes)}"
    )


def _adapter_text(adapter: Adapter) -> str:
    return f"{adapter.name}, rank {adapter.rank}, {adapter.running_calls} running calls, {adapter.uri}"


def _row(model: Model) -> tuple[str, ...]:
    return (
        model.name,
        output.word(ModelState, model.state),
        _step(model),
        model.quantization,
        str(model.max_model_len or ""),
        ", ".join(model.aliases),
        model.uri,
    )


def _facts(model: Model) -> list[tuple[str, str]]:
    return [
        ("model", model.name),
        ("state", output.word(ModelState, model.state)),
        ("phase", _step(model)),
        ("error", f"{model.error.reason}: {model.error.message}" if model.error.reason else ""),
        *((f"  {key}", value) for key, value in sorted(model.error.metadata.items())),
        ("uri", model.uri),
        ("digest", model.digest),
        ("quantization", model.quantization),
        ("context", f"{model.max_model_len} tokens" if model.max_model_len else ""),
        ("tasks", ", ".join(model.supported_tasks)),
        ("aliases", ", ".join(model.aliases)),
        *(("adapter", _adapter_text(adapter)) for adapter in model.adapters),
        ("restarts", str(model.restarts or "")),
        ("restart at", output.time(model.restart_time)),
        *engine_options.facts(model.engine_options),
        ("created", output.time(model.create_time)),
        ("serving", output.time(model.serving_time)),
    ]
