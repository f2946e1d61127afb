"""The options that `generate` and `chat` share: how to sample, what form to give the output, how to queue."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from bitmill import structured
from bitmill.inference.v1.structured_outputs_pb2 import StructuredOutputs

J = TypeVar("J", list[Any], dict[str, Any])


def file_option(help_text: str, **more: Any) -> Any:
    """An option that names a file to read."""
    return typer.Option(exists=True, dir_okay=False, readable=True, metavar="FILE", help=help_text, **more)


_FORM: dict[str, Any] = {"rich_help_panel": "Form of the output, at most one"}
_REQUEST: dict[str, Any] = {"rich_help_panel": "How the engine treats the request"}
_MORE: dict[str, Any] = {"rich_help_panel": "More about tokens"}

_OPTIONS: dict[str, Any] = {
    "temperature": Annotated[float | None, typer.Option(help="Randomness, 0 (greedy) to 2.")],
    "top_p": Annotated[float | None, typer.Option(help="Keep the smallest set of tokens with this probability.")],
    "top_k": Annotated[int | None, typer.Option(help="Keep this many tokens; 0: all.")],
    "min_p": Annotated[float | None, typer.Option(help="Least fraction of the likeliest token's probability.")],
    "max_tokens": Annotated[int | None, typer.Option(min=0, help="Most tokens to generate.")],
    "min_tokens": Annotated[int | None, typer.Option(min=0, help="Fewest tokens before a stop counts.")],
    "n": Annotated[int | None, typer.Option("--n", min=0, help="Sequences to generate, each printed when it ends.")],
    "seed": Annotated[int | None, typer.Option(help="Seed of the sampling.")],
    "stop": Annotated[list[str] | None, typer.Option(help="A string that ends generation. May be repeated.")],
    "presence_penalty": Annotated[float | None, typer.Option(help="-2 to 2; above 0 discourages repetition.")],
    "frequency_penalty": Annotated[float | None, typer.Option(help="-2 to 2; above 0 discourages repetition.")],
    "repetition_penalty": Annotated[float | None, typer.Option(help="Above 1 discourages repetition.")],
    "ignore_eos": Annotated[bool | None, typer.Option("--ignore-eos", help="Go on after the end of sequence.")],
    "logprobs": Annotated[int | None, typer.Option(min=0, help="Log probabilities of each token, with --json.")],
    "prompt_logprobs": Annotated[int | None, typer.Option(min=0, help="The same of the prompt, with --json.", **_MORE)],
    "logprob_token_ids": Annotated[
        list[int] | None,
        typer.Option(
            "--logprob-token-id", min=0, help="Report this token's, not the likeliest's. Repeatable.", **_MORE
        ),
    ],
    "logit_bias": Annotated[
        list[str] | None,
        typer.Option(metavar="TOKEN_ID=BIAS", help="Added to a token's logit. May be repeated.", **_MORE),
    ],
    "stop_token_ids": Annotated[
        list[int] | None,
        typer.Option("--stop-token-id", min=0, help="A token that ends generation. May be repeated.", **_MORE),
    ],
    "allowed_token_ids": Annotated[
        list[int] | None,
        typer.Option("--allowed-token-id", min=0, help="Only such tokens are generated. May be repeated.", **_MORE),
    ],
    "bad_words": Annotated[
        list[str] | None,
        typer.Option("--bad-word", help="A word that the output never contains. May be repeated.", **_MORE),
    ],
    "truncate_prompt_tokens": Annotated[
        int | None, typer.Option(min=0, help="Keep only this many last tokens of the prompt.", **_MORE)
    ],
    "thinking_token_budget": Annotated[
        int | None, typer.Option(min=0, help="Most tokens of reasoning before the answer.", **_MORE)
    ],
    "skip_special_tokens": Annotated[bool | None, typer.Option(help="Leave special tokens out of the text.", **_MORE)],
    "spaces_between_special_tokens": Annotated[
        bool | None, typer.Option(help="Write a space between special tokens.", **_MORE)
    ],
    "include_stop_str_in_output": Annotated[
        bool | None, typer.Option("--include-stop-str-in-output", help="Keep the stop string that matched.", **_MORE)
    ],
    "detokenize": Annotated[
        bool | None, typer.Option(help="Turn tokens into text. Without, --json shows the ids.", **_MORE)
    ],
    "stream_interval": Annotated[int | None, typer.Option(min=0, help="New tokens that one chunk waits for.", **_MORE)],
    "json_schema": Annotated[Path | None, file_option("JSON that follows this JSON Schema.", **_FORM)],
    "json_object": Annotated[bool | None, typer.Option("--json-object", help="Any JSON object.", **_FORM)],
    "regex": Annotated[str | None, typer.Option(help="Text that matches this expression as a whole.", **_FORM)],
    "grammar": Annotated[Path | None, file_option("Text of this grammar, GBNF or Lark.", **_FORM)],
    "choice": Annotated[list[str] | None, typer.Option(help="One of the texts given so. May be repeated.", **_FORM)],
    "structural_tag": Annotated[
        Path | None, file_option("Free text with parts that follow schemas, in xgrammar's format.", **_FORM)
    ],
    "adapter": Annotated[str | None, typer.Option(help="An adapter that the model has.", **_REQUEST)],
    "priority": Annotated[int | None, typer.Option(help="Lower runs earlier.", **_REQUEST)],
    "cache_salt": Annotated[
        str | None, typer.Option(help="Share cached prompts only with requests of this salt.", **_REQUEST)
    ],
    "session_id": Annotated[str | None, typer.Option(help="Groups the requests of one conversation.", **_REQUEST)],
    "request_id": Annotated[
        str | None, typer.Option(help="Your id of the call, for the server's log and bitmill abort.", **_REQUEST)
    ],
}

_FORMS: dict[str, Callable[[Any], StructuredOutputs]] = {
    "json_schema": lambda file: structured.json_schema(text_of(file)),
    "json_object": lambda _: structured.json_object(),
    "regex": structured.regex,
    "grammar": lambda file: structured.grammar(text_of(file)),
    "choice": lambda texts: structured.choice(*texts),
    "structural_tag": lambda file: structured.structural_tag(text_of(file)),
}


def with_sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds these options to a command that takes those given as `sampling`, keywords of a client's call."""

    def run(**arguments: Any) -> None:
        given = {name: arguments.pop(name) for name in _OPTIONS}
        command(**arguments, sampling=_keywords({k: v for k, v in given.items() if v not in (None, [])}))

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


def text_of(file: Path) -> str:
    """Returns the text of a file that an option names; wrong usage when it is not UTF-8."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{file} is not UTF-8 text: {error}") from error


def json_of(option: str, text: str, kind: type[J]) -> J:
    """Returns the list or the object that an option's JSON text is; wrong usage when it is something else."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"{option} is not JSON: {error}") from error
    if not isinstance(value, kind):
        raise typer.BadParameter(f"{option} is a JSON {'list' if kind is list else 'object'}, not {text.strip()[:40]}")
    return value


def _keywords(given: dict[str, Any]) -> dict[str, Any]:
    forms = [name for name in _FORMS if name in given]
    if len(forms) > 1:
        options = " and ".join(f"--{name.replace('_', '-')}" for name in forms)
        raise typer.BadParameter(f"an output has one form, not {options}")
    for name in forms:
        given["structured_outputs"] = _FORMS[name](given.pop(name))
    if "logit_bias" in given:
        given["logit_bias"] = dict(map(_bias, given["logit_bias"]))
    return given


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError as error:
        raise typer.BadParameter(f"--logit-bias is TOKEN_ID=BIAS, not {text!r}") from error
