"""Forms of output in vLLM's terms, checked by the compiler that the engine uses."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import xgrammar
from vllm import SamplingParams as VllmSamplingParams
from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM

from bitmill_common.errors import FieldViolation, InvalidArgumentError
from bitmill_inference.requests.sampling import MAX_STRUCTURED_CHARACTERS, StructuredOutputs

# An engine has one compiler, for vLLM that of its first request; another one would take a later form for what it is
# not. This one knows every form.
STRUCTURED_BACKEND = "xgrammar"
UNCOMPILABLE = "FORM_INVALID"
MAX_PATTERN_CHARACTERS = 4096

# Rules that xgrammar 0.2.8 writes with a space whatever the separators are
# (https://github.com/mlc-ai/xgrammar/issues/945).
_SPACED_RULE = re.compile(r'^(basic_(?:array_items|object_properties) ::= \(\(", )', re.MULTILINE)

# Where in xgrammar's own source an error was raised, and when.
_SOURCE_PLACE = re.compile(r"\[\d\d:\d\d:\d\d\] \S+\.cc:\d+: ")


class CheckedSamplingParams(VllmSamplingParams):
    """Sampling parameters whose form `check_form` has seen; vLLM would compile it again, on the event loop."""

    def _validate_structured_outputs(self, *_: Any) -> None:
        """Does nothing."""


def structured_outputs_params(outputs: StructuredOutputs) -> StructuredOutputsParams:
    """Converts."""
    value: Any = list(outputs.value) if isinstance(outputs.value, tuple) else outputs.value
    form = {outputs.form.value: value} if outputs.form else {}
    return StructuredOutputsParams(**form, disable_any_whitespace=outputs.disable_any_whitespace)


async def check_form(params: VllmSamplingParams, llm: AsyncLLM, path: str) -> None:
    """Compiles the form as far as vLLM does before it takes a request, in a thread: a large one takes a while.

    Raises `InvalidArgumentError` with the compiler's words; `path` is the form's place in the request.
    """
    try:
        await asyncio.to_thread(_check, params, llm)
    except VLLMClientError as error:
        raise InvalidArgumentError([FieldViolation(path, _words(error), UNCOMPILABLE)]) from error


def _check(params: VllmSamplingParams, llm: AsyncLLM) -> None:
    outputs = params.structured_outputs
    if isinstance(outputs.json, str) and not outputs.json.lstrip().startswith("{"):
        raise VLLMValidationError("a JSON schema must be a JSON object")
    _check_size(outputs)
    check_patterns(outputs)
    VllmSamplingParams._validate_structured_outputs(
        params, llm.model_config, llm.vllm_config.structured_outputs_config, llm.get_tokenizer()
    )
    if outputs.disable_any_whitespace and (outputs.json is not None or outputs.json_object):
        # vLLM has white space as a matter of the engine, and not of the request.
        outputs.grammar = compact_json_grammar(outputs.json or '{"type": "object"}')
        outputs.json = outputs.json_object = None


def check_patterns(outputs: StructuredOutputsParams) -> None:
    """Refuses regular expressions in a schema on which xgrammar's parser overflows its stack and ends the process.

    One by itself has limits of its own. Raises `VLLMValidationError`.
    """
    for form in (outputs.json, outputs.structural_tag):
        for pattern in _patterns(_parsed(form)):
            if len(pattern) > MAX_PATTERN_CHARACTERS:
                description = f"a pattern has {len(pattern)} characters, at most {MAX_PATTERN_CHARACTERS}"
                raise VLLMValidationError(description)


def _parsed(form: Any) -> Any:
    if not isinstance(form, str):
        return form
    try:
        return json.loads(form)
    # vLLM says what is wrong with it.
    except (ValueError, RecursionError):
        return None


def _patterns(value: Any) -> Iterator[str]:
    """The regular expressions of a JSON Schema, or of whatever has schemas in it."""
    waiting = [value]
    while waiting:
        match waiting.pop():
            case dict() as fields:
                if isinstance(pattern := fields.get("pattern"), str):
                    yield pattern
                if isinstance(properties := fields.get("patternProperties"), dict):
                    yield from properties
                waiting.extend(fields.values())
            case list() as items:
                waiting.extend(items)


def _check_size(outputs: StructuredOutputsParams) -> None:
    """Refuses a form that was made of large tools; one of the request itself was measured with it."""
    form = outputs.json or outputs.structural_tag or outputs.grammar or ""
    characters = len(form if isinstance(form, str) else json.dumps(form))
    if characters > MAX_STRUCTURED_CHARACTERS:
        raise VLLMValidationError(f"the form has {characters} characters, at most {MAX_STRUCTURED_CHARACTERS}")


def compact_json_grammar(schema: str | dict[str, Any]) -> str:
    """The grammar of JSON without white space between its parts that follows a schema."""
    grammar = str(xgrammar.Grammar.from_json_schema(schema, any_whitespace=False, separators=(",", ":")))
    return _SPACED_RULE.sub(lambda match: match[1].removesuffix(" "), grammar)


def _words(error: VLLMClientError) -> str:
    """vLLM's words, and the compiler's where vLLM leaves them out."""
    words = str(error.args[0])
    cause = str(error.__cause__ or "")
    return _SOURCE_PLACE.sub("", words if cause in words else f"{words} {cause}").strip()
