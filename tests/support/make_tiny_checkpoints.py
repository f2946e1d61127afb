"""Make small random checkpoints with a real tokenizer, in seconds. Run with the llmcompressor engine's python:

    python tests/support/make_tiny_checkpoints.py build/test-checkpoints

- `tied`, `untied`: two-layer Llamas of 64 channels, for tests. Every text they write is noise, but their files, their
  tokenizer and their chat template are those of a real checkpoint.
- `chat`: as `tied`, with a template that shows tools and reasoning, and their tags in the vocabulary.
- `cross-encoder`: a two-layer BERT that gives a pair of texts one score.
- `streaming-bench`: a 3-million-parameter Llama, for measuring what a server adds to a model that costs little, with
  the tokenizer of the checkpoint given with --tokenizer, or the small one.
"""

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from pydoc_data import topics

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

VOCAB_SIZE = 768
CONTEXT_LENGTH = 512
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# In the manner of Qwen3. `enable_thinking` false closes the reasoning in the prompt and true opens it there; unset, the
# model does.
TOOLS_TEMPLATE = """\
{%- if messages[0].role == 'assistant' %}{{ raise_exception('an assistant cannot begin') }}{% endif -%}
{%- if style is defined -%}
{{ '<|im_start|>system\\nstyle ' ~ style ~ ' of ' ~ (level.value + 1) ~ '<|im_end|>\\n' }}
{%- endif -%}
{%- if tools -%}
{{ '<|im_start|>system\\n' }}
{%- for tool in tools %}{{ tool | tojson ~ '\\n' }}{% endfor -%}
{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' ~ message.role ~ (' ' ~ message.name if message.name else '') ~ '\\n' }}
{%- if message.reasoning_content %}{{ '<think>\\n' ~ message.reasoning_content ~ '\\n</think>\\n\\n' }}{% endif -%}
{{ message.content }}
{%- for call in message.tool_calls or [] -%}
{{ '<tool_call>' ~ {'name': call.function.name, 'arguments': call.function.arguments} | tojson ~ '</tool_call>' }}
{%- endfor -%}
{%- if message.tool_call_id %}{{ ' answers ' ~ message.tool_call_id }}{% endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined %}{{ '<think>\\n' if enable_thinking else '<think>\\n\\n</think>\\n\\n' }}{% endif -%}
{%- endif -%}
"""
CHAT_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="where to put one directory for each checkpoint")
    parser.add_argument("--tokenizer", type=Path, help="checkpoint directory whose tokenizer streaming-bench takes")
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    small = train_tokenizer()
    bench = AutoTokenizer.from_pretrained(arguments.tokenizer) if arguments.tokenizer else small
    # head_dim is 32: the smallest that vLLM's CPU attention takes.
    tiny = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    _save(arguments.directory / "tied", small, tie_word_embeddings=True, num_key_value_heads=1, **tiny)
    _save(arguments.directory / "untied", small, tie_word_embeddings=False, num_key_value_heads=2, **tiny)
    chat = train_tokenizer(CHAT_TAGS)
    chat.chat_template = TOOLS_TEMPLATE
    _save(arguments.directory / "chat", chat, tie_word_embeddings=True, num_key_value_heads=1, **tiny)
    _save_cross_encoder(arguments.directory / "cross-encoder", **tiny)
    _save(
        arguments.directory / "streaming-bench",
        bench,
        tie_word_embeddings=True,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )


def train_tokenizer(tags: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of VOCAB_SIZE tokens, `tags` among them, trained on Python's documentation topics."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", *tags],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((topics.topics[name] for name in sorted(topics.topics)), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT_LENGTH,
    )


def _save(directory: Path, tokenizer: PreTrainedTokenizerBase, **config: object) -> None:
    """Save a random Llama for the tokenizer at `directory`."""
    torch.manual_seed(0)
    special = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = {"max_position_embeddings": CONTEXT_LENGTH, **config}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **special, **config)).to(torch.bfloat16)
    model.generation_config = GenerationConfig(**special)
    write_checkpoint(directory, tokenizer, model)


def _save_cross_encoder(directory: Path, **config: object) -> None:
    """Save a random BERT that scores pairs at `directory`."""
    torch.manual_seed(0)
    tokenizer = train_tokenizer()
    start, end = "<|im_start|>", "<|im_end|>"
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in (start, end)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}", pair=f"{start} $A {end} $B:1 {end}:1", special_tokens=ids
    )
    tokenizer.chat_template = None
    bert = BertConfig(
        vocab_size=len(tokenizer),
        num_labels=1,
        max_position_embeddings=CONTEXT_LENGTH,
        pad_token_id=tokenizer.pad_token_id,
        **config,
    )
    write_checkpoint(directory, tokenizer, BertForSequenceClassification(bert))


def write_checkpoint(
    directory: Path, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, **options: object
) -> None:
    """Write a checkpoint at `directory`, which appears whole or not at all; `options` are those of save_pretrained."""
    if directory.exists():
        return
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}.") as scratch:
        checkpoint = Path(scratch) / "checkpoint"
        model.save_pretrained(checkpoint, **options)
        tokenizer.save_pretrained(checkpoint)
        checkpoint.rename(directory)


if __name__ == "__main__":
    main()
