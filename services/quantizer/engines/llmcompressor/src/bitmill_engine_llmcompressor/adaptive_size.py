"""How many bytes an artifact's weight files will have, told before any weight is rounded.

compressed-tensors itself says it, of layers of the same shapes; no table of formats can drift from what is saved.
"""

from __future__ import annotations

import json
from functools import cache

import torch
from compressed_tensors.compressors import compress_module
from compressed_tensors.quantization import initialize_module_for_quantization
from safetensors.torch import _TYPES
from transformers import PreTrainedModel

from bitmill_engine_kit.plan import AS_IT_IS, Plan
from bitmill_engine_kit.protocol import Recipe, Treatment
from bitmill_engine_llmcompressor.recipes import TARGET, quantization_scheme

# Length of the header, the metadata {"format": "pt"} and padding; files are cut at 5 GB.
_FILE_BYTES = 64
_BYTES_IN_A_FILE = 5 * 10**9
# Offsets in a header are written out; those of a file of 5 GB have at most ten digits.
_OFFSET = 10**9
_TYPE_NAMES = {dtype: name for name, dtype in _TYPES.items()}
_CACHE_SCALES = ("k_scale", "v_scale")


def layer_bytes(name: str, layer: torch.nn.Linear, treatment: Treatment) -> int:
    """What a Linear layer takes, treated so: its tensors and their entries in the header.

    Exact but for offsets in the header of fewer than ten digits.
    """
    shape = (layer.out_features, layer.in_features)
    tensors = _stored_tensors(shape, layer.bias is not None, layer.weight.dtype, treatment)
    return sum(size + _entry_bytes(f"{name}.{leaf}", kind, sizes) for leaf, kind, sizes, size in tensors)


def other_bytes(model: PreTrainedModel, plan: Plan, recipe: Recipe) -> int:
    """What is no layer of the plan takes: embeddings, norms, a head that is not tied, scales of the KV cache."""
    total, seen = 0, set()
    for name, tensor in model.state_dict().items():
        # Tied tensors are saved once.
        if name.rpartition(".")[0] in plan or tensor.data_ptr() in seen:
            continue
        seen.add(tensor.data_ptr())
        total += tensor.nbytes + _entry_bytes(name, tensor.dtype, tuple(tensor.shape))
    if recipe.kv_cache is not None:
        scale = torch.zeros(1, dtype=model.dtype)
        for name in (f"{attention}.{leaf}" for attention in _attentions(plan) for leaf in _CACHE_SCALES):
            total += scale.nbytes + _entry_bytes(name, scale.dtype, tuple(scale.shape))
    return total + _FILE_BYTES * (1 + 2 * total // _BYTES_IN_A_FILE)


def _attentions(plan: Plan) -> set[str]:
    return {name.rpartition(".")[0] for name in plan if name.endswith((".k_proj", ".qkv_proj"))}


def _entry_bytes(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """What a tensor takes in the header of a safetensors file."""
    entry = {name: {"dtype": _TYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [_OFFSET, _OFFSET]}}
    return len(json.dumps(entry, separators=(",", ":"))) - 1  # a comma in place of two braces


@cache
def _stored_tensors(
    shape: tuple[int, int], bias: bool, dtype: torch.dtype, treatment: Treatment
) -> tuple[tuple[str, torch.dtype, tuple[int, ...], int], ...]:
    """Name, data type, shape and bytes of each tensor that compressed-tensors makes of a layer."""
    layer = torch.nn.Linear(shape[1], shape[0], bias=bias, dtype=dtype).requires_grad_(False)
    if treatment != AS_IT_IS:
        initialize_module_for_quantization(layer, quantization_scheme(treatment, "NONE", [TARGET]))
        for parameter in layer.parameters():
            parameter.fill_(1)
        compress_module(layer)
    return tuple((leaf, each.dtype, tuple(each.shape), each.nbytes) for leaf, each in layer.state_dict().items())
