"""What the model says in a conversation, taken apart by vLLM's parsers: content, reasoning and calls of tools."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jsonschema.exceptions
import jsonschema.validators
from vllm import SamplingParams as VllmSamplingParams
from vllm.entrypoints.generate.base.protocol import DeltaMessage, FunctionDefinition
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionNamedFunction,
    ChatCompletionNamedToolChoiceParam,
    ChatCompletionRequest,
    ChatCompletionToolsParam,
)
from vllm.parser import Parser, ParserManager
from vllm.reasoning import ReasoningParserManager
from vllm.renderers.chat_utils import make_tool_call_id
from vllm.tool_parsers import ToolParserManager
from vllm.v1.engine.async_llm import AsyncLLM

from bitmill_common.errors import FailedPreconditionError
from bitmill_inference.models.engine_options import EngineOptions
from bitmill_inference.requests.generation import Chunk, Finish, FinishReason, ToolCallDelta
from bitmill_inference.requests.prompts import ChatPrompt, NamedTool, Tool
from bitmill_inference.requests.sampling import SamplingParams
from bitmill_inference.requests.violations import Violations
from bitmill_inference.vllm.errors import translated
from bitmill_inference.vllm.prompts import message_of, template_kwargs, tool_of


def check_parsers(options: EngineOptions, violations: Violations, prefix: str = "engine_options") -> None:
    """Notes a parser that vLLM does not have, with the names that there are."""
    known = {
        "tool_call_parser": (options.tool_call_parser, ToolParserManager.list_registered()),
        "reasoning_parser": (options.reasoning_parser, ReasoningParserManager.list_registered()),
    }
    for field, (name, names) in known.items():
        if name and name not in names:
            violations.add(f"{prefix}.{field}", f"must be one of {', '.join(names)}, got {name!r}", "UNKNOWN_PARSER")


class ChatParsers:
    """The parsers of one model. Raises `FailedPreconditionError` for those that its tokenizer has no tags for."""

    def __init__(self, llm: AsyncLLM, tool_call_parser: str, reasoning_parser: str) -> None:
        self.model_config = llm.model_config
        self.tokenizer = llm.get_tokenizer()
        try:
            self.parser_class: type[Parser] | None = ParserManager.get_parser(
                tool_parser_name=tool_call_parser or None,
                reasoning_parser_name=reasoning_parser or None,
                enable_auto_tools=bool(tool_call_parser),
                is_harmony=self.model_config.hf_config.model_type == "gpt_oss",
                tokenizer=self.tokenizer,
            )
        # What a parser raises that misses its tags in the tokenizer is its cause.
        except TypeError as error:
            reason = str(error.__cause__ or error)
            raise FailedPreconditionError(
                "PARSER_UNFIT", f"the parsers do not fit the model's tokenizer: {reason}", {"reason": reason}
            ) from error

    async def begin(self, prompt: ChatPrompt, params: SamplingParams) -> ChatCall | None:
        """Returns what parses the answer to a conversation, or None when all of it is content.

        Raises `FailedPreconditionError` for tools where the model has no parser of calls, and `InvalidArgumentError`
        for a schema that is none.
        """
        tools = prompt.offered_tools
        parser_class = self.parser_class
        if tools and (parser_class is None or parser_class.tool_parser_cls is None):
            raise FailedPreconditionError(
                "TOOL_PARSER_MISSING",
                "the model was loaded without engine_options.tool_call_parser, so calls of tools cannot be told from "
                "text",
                {"option": "engine_options.tool_call_parser"},
            )
        if parser_class is None or params.detokenize is False:
            return None
        if not (tools or parser_class.reasoning_parser_cls or parser_class.always_adjust_request):
            return None
        if tools:
            # A big schema takes milliseconds.
            await asyncio.to_thread(_check_schemas, prompt.tools)
        return ChatCall(self, parser_class, prompt)


class ChatCall:
    """The parsing of one call's answer: of each of its sequences on its own."""

    def __init__(self, parsers: ChatParsers, parser_class: type[Parser], prompt: ChatPrompt) -> None:
        self._request = _request_of(prompt)
        self._template_kwargs = template_kwargs(prompt)
        tools, kwargs = self._request.tools, self._template_kwargs
        self._new_parser: Callable[[], Parser] = lambda: parser_class(
            parsers.tokenizer, tools, chat_template_kwargs=kwargs, model_config=parsers.model_config
        )
        self._first_parser = self._new_parser()
        self._prompt_token_ids: list[int] = []
        self._sequences: dict[int, _Sequence] = {}

    def prepare(self, params: VllmSamplingParams, prompt_token_ids: list[int]) -> dict[str, Any]:
        """Sets what the parsers need of sampling, and returns what they need of `AsyncLLM.generate` besides.

        That is special tokens in the text, a form that forces calls of tools, and where reasoning ends, which no form
        binds. Raises `InvalidArgumentError` for tools that have no such form.
        """
        self._prompt_token_ids = prompt_token_ids
        parser, request = self._first_parser, self._request
        request.structured_outputs = params.structured_outputs
        request.skip_special_tokens = params.skip_special_tokens
        with translated("tools"):
            request = self._request = parser.adjust_request(request)
        params.structured_outputs = request.structured_outputs
        params.skip_special_tokens = request.skip_special_tokens
        arguments: dict[str, Any] = {"reasoning_ended": self._request.resolve_reasoning_ended(parser, prompt_token_ids)}
        if parser.reasoning_parser is not None:
            arguments["reasoning_parser_kwargs"] = {"chat_template_kwargs": self._template_kwargs}
        return arguments

    def parse(self, chunk: Chunk) -> None:
        """Moves what is not content out of the chunk's text; the sequence's last chunk gets what was held back."""
        sequence = self._sequences.get(chunk.index)
        if sequence is None:
            sequence = _Sequence(self._new_parser, self._request, self._prompt_token_ids)
            self._sequences[chunk.index] = sequence
        sequence.parse(chunk)
        if chunk.usage is not None:
            reasoning_tokens = sum(sequence.reasoning_tokens for sequence in self._sequences.values())
            chunk.usage = replace(chunk.usage, reasoning_tokens=reasoning_tokens)


class _Sequence:
    """The parsing of one sequence."""

    def __init__(
        self,
        new_parser: Callable[[], Parser],
        request: ChatCompletionRequest,
        prompt_token_ids: list[int],
    ) -> None:
        self._new_parser = new_parser
        self._parser = new_parser()
        self._request = request
        self._prompt_token_ids = prompt_token_ids
        self._token_ids: list[int] = []
        self._raw: list[str] = []
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: set[int] = set()
        self.reasoning_tokens = 0

    def parse(self, chunk: Chunk) -> None:
        """See `ChatCall.parse`."""
        token_ids = list(chunk.token_ids)
        self._raw.append(chunk.text)
        self._token_ids.extend(token_ids)
        delta = self._parser.parse_delta(
            chunk.text, token_ids, self._request, self._prompt_token_ids, finished=chunk.finish is not None
        )
        delta = delta or DeltaMessage()
        chunk.text = delta.content or ""
        chunk.reasoning = delta.reasoning or ""
        chunk.tool_calls = self._tool_calls(delta)
        self._content.append(chunk.text)
        self._reasoning.append(chunk.reasoning)
        if chunk.finish is not None:
            chunk.text += self._held_back()
            self.reasoning_tokens = self._count_reasoning_tokens()
            if self._calls and chunk.finish.reason is FinishReason.STOP:
                chunk.finish = Finish(FinishReason.TOOL_CALLS)

    def _tool_calls(self, delta: DeltaMessage) -> Sequence[ToolCallDelta]:
        if not delta.tool_calls:
            return ()
        deltas = []
        for call in delta.tool_calls:
            if call.index and self._request.parallel_tool_calls is False:
                continue
            function = call.function
            name = (function and function.name) or ""
            call_id = call.id or ""
            if call.index not in self._calls:
                self._calls.add(call.index)
                call_id = call_id or make_tool_call_id()
            deltas.append(ToolCallDelta(call.index, call_id, name, (function and function.arguments) or ""))
        return deltas

    def _held_back(self) -> str:
        """The end of the content, where a parser of calls waited for a tag to go on that did not.

        Those of vLLM's parsers that look at text alone never give it out in a stream, and all of them in a whole text.
        """
        tool_parser = self._parser.tool_parser
        if self._calls or tool_parser is None or tool_parser.engine_based_streaming:
            return ""
        given = "".join(self._content)
        raw = "".join(self._raw)
        reasoning_parser = self._parser.reasoning_parser
        texts = [raw]
        if reasoning_parser is not None and self._parser.is_reasoning_end(self._prompt_token_ids):
            # A whole text is taken for one that has its reasoning in it, though the prompt has ended that.
            texts.append((reasoning_parser.reasoning_end_str or "") + raw)
        for text in texts:
            reasoning, content, calls = self._new_parser().parse(text, self._request, enable_auto_tools=True)
            same_reasoning = (reasoning or "").strip() == "".join(self._reasoning).strip()
            if content and not calls and same_reasoning and content.startswith(given):
                return str(content[len(given) :])
        return ""

    def _count_reasoning_tokens(self) -> int:
        token_ids = self._token_ids
        parser = self._parser.reasoning_parser
        start = getattr(parser, "start_token_id", None)
        # Where the template opens the reasoning in the prompt, vLLM's parsers look for its start in vain.
        if start is not None and start not in token_ids and any(self._reasoning):
            token_ids = [start, *token_ids]
        return int(self._parser.count_reasoning_tokens(token_ids))


def _request_of(prompt: ChatPrompt) -> ChatCompletionRequest:
    """What vLLM's parsers look at of a request; the values were checked before."""
    tools = [
        ChatCompletionToolsParam(function=FunctionDefinition(**tool_of(tool)["function"]))
        for tool in prompt.offered_tools
    ]
    match prompt.tool_choice:
        case _ if not tools:
            choice: Any = "none"
        case NamedTool(name=name):
            choice = ChatCompletionNamedToolChoiceParam(function=ChatCompletionNamedFunction(name=name))
        case mode:
            choice = mode.value
    return ChatCompletionRequest.model_construct(
        messages=[message_of(message) for message in prompt.messages],
        tools=tools or None,
        tool_choice=choice,
        parallel_tool_calls=prompt.parallel_tool_calls,
        chat_template_kwargs=dict(prompt.chat_template_kwargs),
    )


def _check_schemas(tools: Sequence[Tool]) -> None:
    violations = Violations()
    for index, tool in enumerate(tools):
        if tool.parameters_json_schema and (fault := _schema_fault(tool.parameters_json_schema)):
            violations.add(f"tools[{index}].parameters_json_schema", fault, "INVALID_JSON_SCHEMA")
    violations.raise_if_any()


# A schema has at most MAX_SCHEMA_CHARACTERS.
@functools.lru_cache(maxsize=256)
def _schema_fault(text: str) -> str:
    """What is wrong with a JSON Schema, or nothing."""
    schema = json.loads(text)
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        validator.check_schema(schema)
    except jsonschema.exceptions.SchemaError as error:
        return f"is no JSON Schema: {error.json_path}: {error.message}"
    except RecursionError:
        return "is nested too deeply"
    return ""
