"""`bitmill quantize`: plan or start a job, and follow it."""

from __future__ import annotations

import enum
from typing import Annotated, Any

import typer
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

from bitmill.artifact.v1.recipe_pb2 import ActivationOrder, Algorithm, KvCacheScheme, Packing, Scheme
from bitmill.cli import engine_options, output
from bitmill.cli import recipes as recipe_texts
from bitmill.cli.artifact_facts import show_plan, show_result
from bitmill.cli.following import follow, view_for
from bitmill.cli.session import FAILED, session_of
from bitmill.requests import to_uri
from bitmill.watching import succeeded


def _names(kind: EnumTypeWrapper, prefix: str) -> dict[str, str]:
    """Returns the choices of an option: the names of a proto's enum without its prefix."""
    names = (name.removeprefix(prefix) for name, number in kind.items() if number)
    return {name: name for name in names}


SchemeName = enum.Enum("SchemeName", _names(Scheme, "SCHEME_"), type=str)  # type: ignore[misc]
AlgorithmName = enum.Enum("AlgorithmName", _names(Algorithm, "ALGORITHM_"), type=str)  # type: ignore[misc]
OrderName = enum.Enum("OrderName", _names(ActivationOrder, "ACTIVATION_ORDER_"), type=str)  # type: ignore[misc]
KvCacheName = enum.Enum("KvCacheName", _names(KvCacheScheme, "KV_CACHE_SCHEME_"), type=str)  # type: ignore[misc]
PackingName = enum.Enum("PackingName", _names(Packing, "PACKING_"), type=str)  # type: ignore[misc]


def quantize(
    context: typer.Context,
    source: Annotated[str, typer.Argument(metavar="SOURCE_URI", help="The checkpoint: a URI, or a local path.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the artifact.")],
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="What the options below start from: a name from `bitmill recipes list`, or a .json file.",
        ),
    ] = None,
    scheme: Annotated[
        SchemeName | None,
        typer.Option(case_sensitive=False, help="How weights and activations are stored; else W4A16."),
    ] = None,
    algorithm: Annotated[
        AlgorithmName | None, typer.Option(case_sensitive=False, help="How weights are rounded.")
    ] = None,
    group_size: Annotated[
        int | None, typer.Option(help="Input channels that share a scale; -1: one scale per output channel.")
    ] = None,
    symmetric: Annotated[bool | None, typer.Option(help="Whether the weight grid is symmetric about zero.")] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(help="A layer to leave as it is, or re:PATTERN. May be repeated.")
    ] = None,
    rule: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN=SCHEME[:GROUP_SIZE]", help="Another scheme for the layers that match. May be repeated."
        ),
    ] = None,
    activation_order: Annotated[
        OrderName | None,
        typer.Option(
            case_sensitive=False,
            help="The order in which GPTQ rounds input channels.",
        ),
    ] = None,
    kv_cache: Annotated[
        KvCacheName | None,
        typer.Option(case_sensitive=False, help="How keys and values are stored when served."),
    ] = None,
    smoothing_strength: Annotated[
        float | None, typer.Option(help="SmoothQuant's migration strength for W8A8_INT8; 0: none.")
    ] = None,
    candidate: Annotated[
        list[str] | None,
        typer.Option(metavar="SCHEME[:GROUP_SIZE]", help="What ADAPTIVE may choose for a layer. May be repeated."),
    ] = None,
    max_size_bytes: Annotated[
        int | None, typer.Option(min=1, help="ADAPTIVE's budget: the least loss within this size.")
    ] = None,
    max_perplexity_ratio: Annotated[
        float | None, typer.Option(help="ADAPTIVE's budget: the least size within this multiple of the perplexity.")
    ] = None,
    num_samples: Annotated[int | None, typer.Option(min=1, help="Calibration samples.")] = None,
    max_sequence_length: Annotated[int | None, typer.Option(min=1, help="Tokens in each calibration sample.")] = None,
    packing: Annotated[
        PackingName | None, typer.Option(case_sensitive=False, help="How samples are made of documents.")
    ] = None,
    dampening_frac: Annotated[
        float | None, typer.Option(help="GPTQ damping, a fraction of the Hessian's mean diagonal.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed for the order of the samples.")] = None,
    calibration: Annotated[
        str | None, typer.Option(metavar="URI", help="Calibration data, .txt or .jsonl: a URI or a path.")
    ] = None,
    evaluation_tokens: Annotated[
        int | None, typer.Option(min=1, help="Held-out tokens that the evaluation reads.")
    ] = None,
    engine: Annotated[str | None, typer.Option(help="The quantization engine. [default: llmcompressor]")] = None,
    engine_option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="How to serve the artifact, for its manifest. May be repeated."),
    ] = None,
    request_id: Annotated[
        str, typer.Option(help="Your id: the same one again returns the same job instead of a second.")
    ] = "",
    plan: Annotated[
        bool, typer.Option("--plan", help="Only say what would be done and what stands in the way.")
    ] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Print the job's id and leave it running.")] = False,
) -> None:
    """Quantize a checkpoint into an artifact, and follow the job to its end.

    Ctrl-C while following leaves the job running.
    """
    session = session_of(context)
    options: dict[str, Any] = {
        "recipe": recipe,
        "scheme": scheme and scheme.value,
        "algorithm": algorithm and algorithm.value,
        "group_size": group_size,
        "symmetric": symmetric,
        "ignore": ignore or None,
        "rules": recipe_texts.parsed_rules(rule) if rule else None,
        "activation_order": activation_order and activation_order.value,
        "kv_cache": kv_cache and kv_cache.value,
        "smoothing_strength": smoothing_strength,
        "adaptive": recipe_texts.parsed_search(candidate or [], max_size_bytes, max_perplexity_ratio),
        "packing": packing and packing.value,
        "engine": engine,
        "num_samples": num_samples,
        "max_sequence_length": max_sequence_length,
        "dampening_frac": dampening_frac,
        "seed": seed,
        "calibration_uri": calibration,
        "evaluation_tokens": evaluation_tokens,
        "engine_options": engine_options.parsed(engine_option, "--engine-option") if engine_option else None,
    }
    given = {key: value for key, value in options.items() if value is not None}
    with session.quantizer() as client:
        if plan:
            planned = client.plan(to_uri(source), name, request_id=request_id, **given)
            output.emit(planned) if session.json else show_plan(planned)
            if planned.problems:
                raise typer.Exit(FAILED)
            return
        job = client.quantize(to_uri(source), name, request_id=request_id, **given)
        if detach:
            output.emit(job) if session.json else output.write(f"{job.job_id}\n")
            return
        if not session.json:
            output.note(f"job {job.job_id}")
        job = succeeded(follow(job.job_id, client.watch(job.job_id), view_for(json=session.json)))
        if not session.json:
            show_result(job, client.artifact(job.artifact_uri))
