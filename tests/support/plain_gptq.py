"""The classic GPTQ layout read plainly, in 32-bit floats; run with the llmcompressor engine's python:

    python plain_gptq.py MODELS.json TEXT

MODELS.json is a list of model directories. Prints as JSON, last, a list with one list for each: the log probabilities
of every token of the text but the first.
"""

import json
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    print(json.dumps([_logprobs(Path(model), sys.argv[2]) for model in json.loads(Path(sys.argv[1]).read_bytes())]))


def _logprobs(directory: Path, text: str) -> list[float]:
    config = AutoConfig.from_pretrained(directory)
    bits = config.quantization_config["bits"]
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    packed = load_file(directory / "model.safetensors")
    state = {name: tensor for name, tensor in packed.items() if name.rpartition(".")[2] in ("weight", "bias")}
    for layer in (name.removesuffix(".qweight") for name in packed if name.endswith(".qweight")):
        state[f"{layer}.weight"] = _weight(packed, layer, bits)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert missing == (["lm_head.weight"] if config.tie_word_embeddings else [])
    model.tie_weights()
    ids = torch.tensor([AutoTokenizer.from_pretrained(directory).encode(text)])
    with torch.inference_mode():
        logprobs = torch.log_softmax(model(ids).logits[0, :-1].float(), dim=-1)
    return logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()


def _weight(packed: dict[str, torch.Tensor], layer: str, bits: int) -> torch.Tensor:
    """(output, input) from integers of `bits` along the input, lowest first, whose middle stands for zero."""
    words, scales = packed[f"{layer}.qweight"], packed[f"{layer}.scales"].float()
    shifts = torch.arange(0, 32, bits)[None, :, None]
    numbers = ((words[:, None, :] >> shifts) & (2**bits - 1)).reshape(-1, words.shape[1]) - 2 ** (bits - 1)
    return (numbers * scales.repeat_interleave(len(numbers) // len(scales), dim=0)).T.contiguous()


if __name__ == "__main__":
    main()
