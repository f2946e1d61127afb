"""llm-compressor as its own examples use it, for comparison; run with the engine's python:

    python benchmarks/plain_llmcompressor.py QUANTIZE_REQUEST.json

Does what a quantize request says with llm-compressor's own modifier and defaults: one sample a batch, activations kept
in the host's memory, eager attention, float32 Hessians. Prints last, as a JSON object, the seconds of each layer.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1")

import itertools

import torch
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from bitmill_engine_kit.calibration import build_samples
from bitmill_engine_kit.protocol import QuantizeRequest, parse_request
from bitmill_engine_llmcompressor.recipes import TARGET, quantization_scheme


class TimedGPTQModifier(GPTQModifier):
    """GPTQ that notes when each part of the model is done."""

    _ends: list[float] = []  # noqa: RUF012 (a private attribute of pydantic, copied for each instance)

    def on_sequential_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        """Round, and note the time."""
        super().on_sequential_epoch_end(*args, **kwargs)
        self._ends.append(time.perf_counter())


def main() -> None:
    """Quantizes, saves and prints the times."""
    request = parse_request(Path(sys.argv[1]).read_bytes()).request
    assert isinstance(request, QuantizeRequest)
    tokenizer = AutoTokenizer.from_pretrained(request.source_dir)
    model = AutoModelForCausalLM.from_pretrained(request.source_dir, dtype="auto")
    samples = build_samples(request.calibration, tokenizer, request.recipe.seed)
    scheme = quantization_scheme(request.recipe.treatment, request.recipe.activation_order, [TARGET])
    modifier = TimedGPTQModifier(
        config_groups={"group_0": scheme},
        actorder=scheme.weights.actorder,
        ignore=["lm_head"],
        dampening_frac=request.recipe.dampening_frac,
    )
    batches = DataLoader([{"input_ids": torch.tensor(sample)} for sample in samples.token_ids], batch_size=1)
    oneshot(model=model, processor=tokenizer, dataset=batches, recipe=[modifier])
    model.save_pretrained(request.output_dir, save_compressed=True)
    tokenizer.save_pretrained(request.output_dir)
    ends = modifier._ends
    print(json.dumps({"layer_s": [later - earlier for earlier, later in itertools.pairwise(ends)]}))


if __name__ == "__main__":
    main()
