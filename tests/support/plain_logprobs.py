"""Log probabilities of a text's tokens, by transformers in 32-bit floats; run with the llmcompressor engine's python:

    python plain_logprobs.py MODELS.json TEXT

MODELS.json is a list of model directories. Prints as JSON, last, a list with one list for each: of every token but the
first.
"""

import json
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch

from bitmill_engine_llmcompressor.checkpoints import load_model, load_tokenizer
from bitmill_engine_llmcompressor.evaluate import load_artifact


def main() -> None:
    print(json.dumps([_logprobs(Path(model), sys.argv[2]) for model in json.loads(Path(sys.argv[1]).read_bytes())]))


def _logprobs(directory: Path, text: str) -> list[float]:
    config = directory / "config.json"
    quantized = config.is_file() and "quantization_config" in json.loads(config.read_bytes())
    model = (load_artifact(directory) if quantized else load_model(directory)).float()
    ids = torch.tensor([load_tokenizer(directory).encode(text)])
    with torch.inference_mode():
        logprobs = torch.log_softmax(model(ids).logits[0, :-1].float(), dim=-1)
    return logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()


if __name__ == "__main__":
    main()
