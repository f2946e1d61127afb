"""The evaluation written plainly, over whole logits; run with the llmcompressor engine's python:

    python plain_evaluation.py EVALUATE_REQUEST.json

Prints perplexities and mean divergence as a JSON object.
"""

import json
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bitmill_engine_kit.builtin_text import held_out_documents


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    tokenizer = AutoTokenizer.from_pretrained(request["source_dir"])
    models = [AutoModelForCausalLM.from_pretrained(request[key]).eval() for key in ("source_dir", "model_dir")]
    ids: list[int] = []
    for document in held_out_documents():
        ids += tokenizer.encode(document)
        if len(ids) > 2 * request["num_tokens"] + request["window"]:
            break
    losses: list[list[torch.Tensor]] = [[], []]
    divergences = []
    left, start = request["num_tokens"], 0
    while left:
        length = min(request["window"], left)
        window = torch.tensor(ids[start : start + length + 1])
        with torch.inference_mode():
            logprobs = [torch.log_softmax(model(window[None, :-1]).logits[0].double(), dim=-1) for model in models]
        for kept, values in zip(losses, logprobs, strict=True):
            kept.append(-values[torch.arange(length), window[1:]])
        divergences.append((logprobs[0].exp() * (logprobs[0] - logprobs[1])).sum(dim=-1))
        start += request["window"] + 1
        left -= length
    source, artifact = (torch.cat(kept).mean().exp().item() for kept in losses)
    result = {
        "source_perplexity": source,
        "artifact_perplexity": artifact,
        "mean_kl_divergence": torch.cat(divergences).mean().item(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
