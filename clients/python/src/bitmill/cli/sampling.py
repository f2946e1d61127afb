"""The sampling options that `generate` and `chat` share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

_OPTIONS: dict[str, Any] = {
    "temperature": Annotated[float | None, typer.Option(help="Randomness, 0 (greedy) to 2.")],
    "top_p": Annotated[float | None, typer.Option(help="Keep the smallest set of tokens with this probability.")],
    "top_k": Annotated[int | None, typer.Option(help="Keep this many tokens; 0: all.")],
    "min_p": Annotated[float | None, typer.Option(help="Least fraction of the likeliest token's probability.")],
    "max_tokens": Annotated[int | None, typer.Option(min=0, help="Most tokens to generate.")],
    "min_tokens": Annotated[int | None, typer.Option(min=0, help="Fewest tokens before a stop counts.")],
    "seed": Annotated[int | None, typer.Option(help="Seed of the sampling.")],
    "stop": Annotated[list[str] | None, typer.Option(help="A string that ends generation. May be repeated.")],
    "presence_penalty": Annotated[float | None, typer.Option(help="-2 to 2; above 0 discourages repetition.")],
    "frequency_penalty": Annotated[float | None, typer.Option(help="-2 to 2; above 0 discourages repetition.")],
    "repetition_penalty": Annotated[float | None, typer.Option(help="Above 1 discourages repetition.")],
    "ignore_eos": Annotated[bool | None, typer.Option("--ignore-eos", help="Go on after the end of sequence.")],
    "logprobs": Annotated[int | None, typer.Option(min=0, help="Log probabilities of each token, with --json.")],
}


def with_sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the sampling options to a command that takes those given as `sampling`."""

    def run(**arguments: Any) -> None:
        sampling = {name: arguments.pop(name) for name in _OPTIONS}
        command(**arguments, sampling={name: value for name, value in sampling.items() if value not in (None, [])})

    own = {
        name: parameter
        for name, parameter in inspect.signature(command, eval_str=True).parameters.items()
        if name != "sampling"
    }
    added = {
        name: inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in _OPTIONS.items()
    }
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (own | added).values()]
    run.__name__ = command.__name__
    run.__doc__ = command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
