"""Greedy generation written plainly, in 32-bit floats; run with the llmcompressor engine's python:

    python plain_generation.py CHECKPOINT NUM_TOKENS PROMPTS

PROMPTS is a JSON list of lists of token ids. Prints what follows each, in the same form.
"""

import json
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    checkpoint, num_tokens, prompts = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        for _ in range(num_tokens):
            with torch.inference_mode():
                following = model(ids).logits[0, -1].argmax()
            ids = torch.cat([ids, following.view(1, 1)], dim=1)
        outputs.append(ids[0, len(prompt) :].tolist())
    print(json.dumps(outputs))


if __name__ == "__main__":
    main()
