"""The evaluation written plainly, over whole logits; run with the llmcompressor engine's python:

    python plain_evaluation.py EVALUATE_REQUEST.json

Prints what the result event tells of the models, except `num_tokens` and memory, as a JSON object.
"""

import json
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy
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
    layers: list[list[torch.Tensor]] = [[], []]
    divergences, agreements = [], []
    left, start = request["num_tokens"], 0
    while left:
        length = min(request["window"], left)
        window = torch.tensor(ids[start : start + length + 1])
        logprobs = []
        for model, nll, kept in zip(models, losses, layers, strict=True):
            logits, outputs = read(model, window[None, :-1])
            logprobs.append(torch.log_softmax(logits, dim=-1))
            nll.append(-logprobs[-1][torch.arange(length), window[1:]])
            kept.append(outputs)
        divergences.append((logprobs[0].exp() * (logprobs[0] - logprobs[1])).sum(dim=-1))
        agreements.append(logprobs[0].argmax(dim=-1) == logprobs[1].argmax(dim=-1))
        start += request["window"] + 1
        left -= length
    source, artifact = (torch.cat(kept).mean().exp().item() for kept in losses)
    divergence = torch.cat(divergences)
    expected, real = (torch.cat(kept, dim=1) for kept in layers)
    relative = ((real - expected) ** 2).sum(dim=(1, 2)) / (expected**2).sum(dim=(1, 2))
    result = {
        "source_perplexity": source,
        "artifact_perplexity": artifact,
        "mean_kl_divergence": divergence.mean().item(),
        "p99_kl_divergence": float(numpy.quantile(divergence.numpy(), 0.99)),
        "top1_agreement": torch.cat(agreements).double().mean().item(),
        "layer_losses": [
            {"layer": f"model.layers.{index}", "relative_error": error} for index, error in enumerate(relative.tolist())
        ],
    }
    print(json.dumps(result))


def read(model: torch.nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, (tokens, vocabulary), and the decoder layers' outputs, (layers, tokens, hidden size), of one text."""
    unnormalized = []
    # The last of transformers' hidden states is behind the final norm.
    hook = model.model.norm.register_forward_pre_hook(lambda _, inputs: unnormalized.append(inputs[0]))
    with torch.inference_mode():
        answer = model(tokens, output_hidden_states=True)
    hook.remove()
    outputs = torch.cat([*answer.hidden_states[1:-1], *unnormalized])
    return answer.logits[0].double(), outputs.double()


if __name__ == "__main__":
    main()
