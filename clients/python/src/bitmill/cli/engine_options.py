"""Options of the engine as text: KEY=VALUE on the command line, and how they are shown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any, cast

import typer
from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.struct_pb2 import Struct

from bitmill.cli.sampling import json_of
from bitmill.inference.v1.model_pb2 import EngineOptions
from bitmill.keywords import EngineKeywords, check

_FIELDS: Mapping[str, Any] = EngineOptions.DESCRIPTOR.fields_by_name


def parsed(options: Iterable[str], flag: str = "--option") -> EngineKeywords:
    """Returns KEY=VALUE texts, given with `flag`, as keywords; wrong usage names the text and what would be right.

    Truth values are true or false, times are seconds, hf_overrides is a JSON object.
    """
    values: dict[str, Any] = {}
    for option in options:
        name, equals, text = option.partition("=")
        name = name.replace("-", "_")
        if not equals:
            raise typer.BadParameter(f"{flag} is KEY=VALUE, not {option!r}")
        if name in values:
            raise typer.BadParameter(f"{flag} {name} is given twice")
        try:
            check(EngineKeywords, {name: text})
        except TypeError as error:
            raise typer.BadParameter(f"{flag} {option}: {error}") from error
        values[name] = _value(flag, _FIELDS[name], text)
    return cast(EngineKeywords, values)


def facts(options: EngineOptions) -> list[tuple[str, str]]:
    """Returns the names and values of the options that are set."""
    return [(field.name, _text(value)) for field, value in options.ListFields()]


def _value(flag: str, field: FieldDescriptor, text: str) -> Any:
    if field.message_type is Struct.DESCRIPTOR:
        return json_of(f"{flag} {field.name}", text, dict)
    try:
        if field.message_type is Duration.DESCRIPTOR:
            return timedelta(seconds=float(text))
        match field.cpp_type:
            case FieldDescriptor.CPPTYPE_BOOL:
                return {"true": True, "false": False}[text.lower()]
            case FieldDescriptor.CPPTYPE_FLOAT:
                return float(text)
            case FieldDescriptor.CPPTYPE_STRING:
                return text
        return int(text)
    except (KeyError, ValueError, OverflowError) as error:
        raise typer.BadParameter(f"{flag} {field.name}={text}: {_meant(field)} is meant") from error


def _meant(field: FieldDescriptor) -> str:
    if field.message_type is Duration.DESCRIPTOR:
        return "a number of seconds"
    return {
        FieldDescriptor.CPPTYPE_BOOL: "true or false",
        FieldDescriptor.CPPTYPE_FLOAT: "a number",
    }.get(field.cpp_type, "a whole number")


def _text(value: Any) -> str:
    match value:
        case Duration():
            return f"{value.ToTimedelta().total_seconds():g} s"
        case Struct():
            return json.dumps(json_format.MessageToDict(value))
        case float():
            return f"{value:g}"
    return str(value)
