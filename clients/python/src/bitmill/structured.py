"""Forms that an output must have, for the keyword `structured_outputs` of the calls that generate.

```
city = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
inference.chat_unary("Name a city.", structured_outputs=structured.json_schema(city))
```

One that the engine's compiler refuses is InvalidArgumentError, with the compiler's words.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bitmill.errors import RequestValueError
from bitmill.filling import filled
from bitmill.inference.v1.structured_outputs_pb2 import Choices, StructuredOutputs


def json_schema(schema: Mapping[str, Any] | str, *, disable_any_whitespace: bool = False) -> StructuredOutputs:
    """JSON that follows a JSON Schema, a mapping or JSON text. `disable_any_whitespace`: none between its parts."""
    return filled(
        StructuredOutputs, json_schema=json_text("json_schema", schema), disable_any_whitespace=disable_any_whitespace
    )


def json_object(*, disable_any_whitespace: bool = False) -> StructuredOutputs:
    """Any JSON object."""
    return filled(StructuredOutputs, json_object=True, disable_any_whitespace=disable_any_whitespace)


def regex(pattern: str) -> StructuredOutputs:
    """Text that matches a regular expression as a whole."""
    return filled(StructuredOutputs, regex=pattern)


def grammar(grammar: str) -> StructuredOutputs:
    """Text of a context-free grammar, in GBNF or Lark."""
    return filled(StructuredOutputs, grammar=grammar)


def choice(*texts: str) -> StructuredOutputs:
    """One of several texts."""
    return filled(StructuredOutputs, choice=filled(Choices, texts=texts))


def structural_tag(tag: Mapping[str, Any] | str) -> StructuredOutputs:
    """Free text with parts that follow schemas, in xgrammar's format: a mapping or JSON text."""
    return filled(StructuredOutputs, structural_tag=json_text("structural_tag", tag))


def json_text(name: str, value: Mapping[str, Any] | str) -> str:
    """Returns a mapping as JSON and text as it is; RequestValueError for what JSON cannot hold."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RequestValueError(f"{name}: {error}") from error
