"""Embedding and scoring written plainly, in 32-bit floats; run with the llmcompressor engine's python:

    python plain_pooling.py vectors CHECKPOINT TOKEN_IDS
    python plain_pooling.py scores CHECKPOINT QUERY DOCUMENTS

TOKEN_IDS is a JSON list of lists of token ids; prints the last hidden state of each one's last token. DOCUMENTS is a
JSON list of texts; prints the score of each with the query, from 0 to 1.
"""

import json
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer


def main() -> None:
    what, checkpoint, *arguments = sys.argv[1:]
    print(json.dumps({"vectors": vectors, "scores": scores}[what](checkpoint, *arguments)))


def vectors(checkpoint: str, token_ids: str) -> list[list[float]]:
    model = AutoModel.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [model(torch.tensor([ids])).last_hidden_state[0, -1].tolist() for ids in json.loads(token_ids)]


def scores(checkpoint: str, query: str, documents: str) -> list[float]:
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    with torch.inference_mode():
        pairs = [tokenizer(query, document, return_tensors="pt") for document in json.loads(documents)]
        return [model(**pair).logits[0, 0].sigmoid().item() for pair in pairs]


if __name__ == "__main__":
    main()
