"""Prompts as vLLM's engine takes them: tokenized, and conversations through the model's own chat template."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from vllm.exceptions import VLLMValidationError
from vllm.renderers.params import ChatParams, TokenizeParams
from vllm.utils.async_utils import make_async
from vllm.utils.mistral import is_mistral_tokenizer
from vllm.v1.engine.async_llm import AsyncLLM

from bitmill_common.errors import FieldViolation, InvalidArgumentError
from bitmill_inference.requests import generation
from bitmill_inference.requests.prompts import ChatMessage, ChatPrompt, Prompt, TextPrompt, TokensPrompt, Tool

# A text of so many characters is tokenized in the time that handing it to a thread takes.
SHORT_CHARACTERS = 1024


class PromptRenderer:
    """Tokenizes the prompts of one model: short ones at once, long ones in the thread of vLLM's renderer."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._renderer = llm.renderer
        self._vocab_size: int = llm.model_config.get_vocab_size()
        self._max_model_len: int = llm.model_config.max_model_len
        tokenizer = llm.get_tokenizer()
        self._max_characters = self._max_model_len * tokenizer.max_chars_per_token
        # Apart from the renderer's: a long text that somebody wants counted holds nobody's generation up.
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="Tokenize")
        # Without vLLM's own limit, which would cut the text and hide how long it really is.
        self._unlimited: TokenizeParams = dataclasses.replace(
            llm.renderer.default_cmpl_tok_params, max_total_tokens=None
        )
        self._bare: TokenizeParams = dataclasses.replace(self._unlimited, add_special_tokens=False)
        self._encode = tokenizer.encode
        self._encode_elsewhere = make_async(tokenizer.encode, executor=self._executor)
        self._decode = make_async(tokenizer.decode, executor=self._executor)

    async def render(self, prompt: Prompt, truncate: int | None = None) -> dict[str, Any]:
        """Returns vLLM's engine input, cut to the last `truncate` tokens; `prompt_token_ids` are in it.

        Raises InvalidArgumentError for a conversation whose text cannot fit, or that the template refuses.
        """
        if isinstance(prompt, ChatPrompt):
            path, prompt = prompt.path, await self._through_template(prompt)
            self.check(prompt, path, truncate)
        match prompt:
            case TextPrompt(text=text, add_special_tokens=add_special_tokens):
                text = self.end_of(text, truncate)
                if len(text) <= SHORT_CHARACTERS:
                    ids = self._encode(self._cased(text), add_special_tokens=add_special_tokens)
                    (engine_input,) = self._renderer.render_cmpl([{"prompt_token_ids": ids}], self._unlimited)
                else:
                    params = self._unlimited if add_special_tokens else self._bare
                    (engine_input,) = await self._renderer.render_cmpl_async([{"prompt": text}], params)
            case TokensPrompt(token_ids=token_ids):
                ids = list(token_ids[-truncate:] if truncate else token_ids)
                (engine_input,) = self._renderer.render_cmpl([{"prompt_token_ids": ids}], self._unlimited)
        if truncate:
            engine_input["prompt_token_ids"] = engine_input["prompt_token_ids"][-truncate:]
        return cast(dict[str, Any], engine_input)

    def check(self, prompt: Prompt, path: str, truncate: int | None = None) -> None:
        """Raises InvalidArgumentError for ids outside the vocabulary and for text that cannot fit.

        `path` is the prompt's place in its request.
        """
        match prompt:
            case TokensPrompt(token_ids=ids):
                # vLLM lets ids of the tokenizer pass that the embedding lacks; on those an engine core dies.
                generation.check_vocabulary(path, ids, self._vocab_size)
                return
            case TextPrompt(text=text):
                characters = len(text)
            case ChatPrompt(messages=messages):
                characters = sum(len(message.role) + len(message.content) for message in messages)
        # Spares the tokenizer a text that cannot fit whatever its tokens are.
        if characters > self._max_characters and not self._is_cut(truncate):
            raise InvalidArgumentError(
                [
                    FieldViolation(
                        path,
                        f"the prompt has {characters} characters; the context of {self._max_model_len} tokens "
                        f"holds {self._max_characters} at most",
                        "PROMPT_TOO_LONG",
                    )
                ]
            )

    def end_of(self, text: str, truncate: int | None) -> str:
        """Returns the text, or an end of it that surely has its last `truncate` tokens: it spares the tokenizer."""
        return text[-self._max_characters :] if self._is_cut(truncate) else text

    async def tokenize(self, prompt: Prompt) -> Sequence[int]:
        """Returns the token ids of a prompt of any length."""
        if isinstance(prompt, ChatPrompt):
            prompt = await self._through_template(prompt)
        match prompt:
            case TextPrompt(text=text, add_special_tokens=add_special_tokens):
                ids = await self._encode_elsewhere(self._cased(text), add_special_tokens=add_special_tokens)
                return cast(Sequence[int], ids)
            case TokensPrompt(token_ids=ids):
                return ids

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Returns the text of token ids."""
        return str(await self._decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def close(self) -> None:
        """Ends the thread."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _cased(self, text: str) -> str:
        return text.lower() if self._unlimited.do_lower_case else text

    def _is_cut(self, truncate: int | None) -> bool:
        """Whether a text of any length may fit once it is cut."""
        return truncate is not None and truncate <= self._max_model_len

    async def _through_template(self, prompt: ChatPrompt) -> TextPrompt | TokensPrompt:
        """What the model's template makes of a conversation. Only Mistral's own tokenizer has ids for it at once."""
        chat_params = ChatParams(
            chat_template_kwargs={
                **template_kwargs(prompt),
                "tools": [tool_of(tool) for tool in prompt.offered_tools] or None,
                "tokenize": is_mistral_tokenizer(self._renderer.tokenizer),
            }
        )
        messages = [message_of(message) for message in prompt.messages]
        try:
            _, rendered = await self._renderer.render_messages_async(messages, chat_params)
        # With the template's own words, or jinja's.
        except VLLMValidationError as error:
            violation = FieldViolation(prompt.path, str(error.args[0]), "TEMPLATE_REFUSED")
            raise InvalidArgumentError([violation]) from error
        # Of JSON that vLLM reads: others are taken for no arguments, but not what Python's own limits refuse.
        except (RecursionError, ValueError) as error:
            description = f"arguments of a tool call are too deep or too long: {error}"
            raise InvalidArgumentError([FieldViolation(prompt.path, description, "ARGUMENTS_UNREADABLE")]) from error
        if "prompt" in rendered:
            # The template writes the special tokens itself.
            return TextPrompt(_unicode(rendered["prompt"]), add_special_tokens=False)
        return TokensPrompt(tuple(rendered["prompt_token_ids"]))


def _unicode(text: str) -> str:
    """Returns the text, with U+FFFD for each half of a character, which JSON can spell and no tokenizer takes."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def template_kwargs(prompt: ChatPrompt) -> dict[str, Any]:
    """What the chat template is given besides messages and tools."""
    return {
        **prompt.chat_template_kwargs,
        "add_generation_prompt": not prompt.continue_final_message,
        "continue_final_message": prompt.continue_final_message,
    }


def message_of(message: ChatMessage) -> dict[str, Any]:
    """A message in OpenAI's form, without what is empty."""
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    for name in ("reasoning", "tool_call_id", "name"):
        if value := getattr(message, name):
            fields[name] = value
    if message.tool_calls:
        fields["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}
            for call in message.tool_calls
        ]
    return fields


def tool_of(tool: Tool) -> dict[str, Any]:
    """A tool in OpenAI's form, without what is empty."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    function["parameters"] = (
        json.loads(tool.parameters_json_schema) if tool.parameters_json_schema else {"type": "object", "properties": {}}
    )
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}
