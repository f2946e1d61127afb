"""Plain llm-compressor, for comparison; run with its engine's python:

    python plain_llmcompressor.py QUANTIZE_REQUEST.json MODEL_DIR

Quantizes as the request says with llm-compressor's own modifier and kernels, and prints last, as a JSON object, the
share of the quantized weights that differ from those in MODEL_DIR.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", CT_ENFORCE_EAGER="1")

import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from bitmill_engine_kit.calibration import build_samples
from bitmill_engine_kit.protocol import QuantizeRequest, parse_request
from bitmill_engine_llmcompressor.recipes import TARGET, quantization_scheme


def main() -> None:
    request = parse_request(Path(sys.argv[1]).read_bytes()).request
    assert isinstance(request, QuantizeRequest)
    with tempfile.TemporaryDirectory() as directory:
        _quantize(request, directory)
        plain, theirs = (load_file(Path(d) / "model.safetensors") for d in (directory, sys.argv[2]))
    assert plain.keys() == theirs.keys(), plain.keys() ^ theirs.keys()
    differing = total = 0
    for name in plain:
        if name.endswith("weight_packed"):
            shape = torch.Size(plain[name.replace("packed", "shape")].tolist())
            ours, others = (unpack_from_int32(tensors[name], 4, shape) for tensors in (plain, theirs))
            differing += int((ours != others).sum())
            total += ours.numel()
    print(json.dumps({"differing": differing / total, "weights": total}))


def _quantize(request: QuantizeRequest, directory: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(request.source_dir)
    model = AutoModelForCausalLM.from_pretrained(request.source_dir)
    samples = build_samples(request.calibration, tokenizer, request.recipe.seed)
    scheme = quantization_scheme(request.recipe.treatment, request.recipe.activation_order, [TARGET])
    modifier = GPTQModifier(
        config_groups={"group_0": scheme},
        actorder=scheme.weights.actorder,
        ignore=["lm_head"],
        dampening_frac=request.recipe.dampening_frac,
    )
    batches = DataLoader([{"input_ids": torch.tensor(sample)} for sample in samples.token_ids], batch_size=1)
    oneshot(model=model, processor=tokenizer, dataset=batches, recipe=[modifier])
    model.save_pretrained(directory, save_compressed=True)


if __name__ == "__main__":
    main()
