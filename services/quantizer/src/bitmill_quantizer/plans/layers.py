"""Which layers of a checkpoint are quantized, and which vLLM runs as one matrix, from its tensors alone. Pure.

Names are those of transformers' modules, which the engine goes by, also where a checkpoint's files have others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from bitmill_common.checkpoint import Checkpoint
from bitmill_common.gguf_checkpoint import MAX_EXPERT_MATRICES, MAX_EXPERTS
from bitmill_quantizer.recipes.patterns import REGEX_PREFIX

# Decoder-only models whose quantizable weights are all Linear layers below `layers`, those of a mixture's experts among
# them; transformers 5.17, which the engine loads with, knows them, and vLLM 0.32, which serves, has models of its own
# for them. tests/e2e/test_llmcompressor_checkpoints.py makes, quantizes and serves one of each.
ARCHITECTURES = frozenset(
    {
        "CohereForCausalLM",
        "Cohere2ForCausalLM",
        "GemmaForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "Glm4ForCausalLM",
        "GraniteForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "StableLmForCausalLM",
    }
)

# What vLLM runs as one matrix, by its name there: `packed_modules_mapping` of its models. It refuses a checkpoint in
# which only some members of a group are quantized.
_FUSED_GROUPS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

OUTPUT_HEAD = "lm_head"
_FLOATS = frozenset({"F16", "BF16", "F32", "F64"})
MAX_DECODER_LAYERS = 10_000
"""A hundred times those of any model; a configuration may count what it will."""
_DECODER_LAYER = re.compile(r".*?\blayers\.(\d{1,9})\.")
_LINEAR = re.compile(r"(?P<module>.*\blayers\.\d+\..+)\.weight")
# All experts of a layer, and all three matrices of each, are one kernel's.
_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(\d+|\*)\.(?P<leaf>\w+)")
# Experts as the one tensor that transformers 5 holds them in: (experts, output, input), gate above up.
_STACKED_EXPERTS = re.compile(r"(?P<experts>.*\blayers\.\d+\..*\bexperts)\.(?P<leaf>gate_up_proj|down_proj)")
# What a mixture chooses its experts by; vLLM keeps it as it is, and so does the engine.
_ROUTER = re.compile(r".*\.(mlp|block_sparse_moe)\.(gate|shared_expert_gate)")
# transformers 5 has one name for what Mixtral's files name otherwise; `conversion_mapping` there.
_MIXTRAL_LEAVES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_MIXTRAL_LEAF = re.compile(r"(?<=\.)w[123]$")


def linear_layers(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Returns the (output, input) shape of every Linear layer by module name, output head and routers left out.

    Each expert's layers are there by themselves: "model.layers.0.mlp.experts.3.down_proj".
    """
    layers: dict[str, tuple[int, ...]] = {}
    num_stacked = 0
    for name, tensor in checkpoint.tensors.items():
        if stacked := _STACKED_EXPERTS.fullmatch(name):
            num_stacked += tensor.shape[0] if tensor.shape else 0
            if num_stacked <= MAX_EXPERT_MATRICES:
                layers.update(_unstack(stacked["experts"], stacked["leaf"], tensor.shape))
            continue
        match = _LINEAR.fullmatch(name)
        if match and len(tensor.shape) == 2 and not _ROUTER.fullmatch(match["module"]):
            layers[_module_name(match["module"], checkpoint.architecture)] = tuple(tensor.shape)
    return layers


def missing_decoder_layers(checkpoint: Checkpoint) -> list[int]:
    """Returns the numbers of the decoder layers that config.json counts and of which there is no tensor."""
    count = checkpoint.config.get("num_hidden_layers")
    if type(count) is not int or not 0 < count <= MAX_DECODER_LAYERS:
        return []
    present = {int(match[1]) for name in checkpoint.tensors if (match := _DECODER_LAYER.match(name))}
    return sorted(set(range(count)) - present)


def non_float_tensors(checkpoint: Checkpoint) -> list[str]:
    """Returns the names of tensors that hold no floating-point numbers of 16 bits or more: already quantized ones."""
    return [name for name, tensor in checkpoint.tensors.items() if tensor.dtype not in _FLOATS]


def _unstack(experts: str, leaf: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    if len(shape) != 3 or shape[0] > MAX_EXPERTS:
        return
    count, rows, columns = shape
    for expert in range(count):
        if leaf == "down_proj":
            yield f"{experts}.{expert}.down_proj", (rows, columns)
        else:
            yield from ((f"{experts}.{expert}.{half}", (rows // 2, columns)) for half in ("gate_proj", "up_proj"))


def _module_name(name: str, architecture: str) -> str:
    if architecture != "MixtralForCausalLM":
        return name
    name = name.replace(".block_sparse_moe.", ".mlp.")
    return _MIXTRAL_LEAF.sub(lambda leaf: _MIXTRAL_LEAVES[leaf[0]], name)


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern names a module: the rule of compressed-tensors' `match_name`, which the engine goes by."""
    if pattern.startswith(REGEX_PREFIX):
        return re.match(pattern.removeprefix(REGEX_PREFIX), name) is not None
    return pattern == name


def fused_matrix(name: str) -> str:
    """Returns what vLLM runs a layer as part of: layers of one answer need one treatment.

    "….self_attn.qkv_proj" for its query, key and value, "….mlp.gate_up_proj" for gate and up, "….mlp.experts" for
    whatever belongs to an expert there, and the layer's own name for any other.
    """
    if expert := _EXPERT.fullmatch(name):
        return expert["experts"]
    parent, _, leaf = name.rpartition(".")
    for fused, members in _FUSED_GROUPS.items():
        if leaf in members:
            return f"{parent}.{fused}"
    return name


def row_name(name: str) -> str:
    """Returns the name of a layer's row in an artifact's `modules`: the experts of a decoder layer share one."""
    expert = _EXPERT.fullmatch(name)
    return f"{expert['experts']}.*.{expert['leaf']}" if expert else name


def has_experts(names: Iterable[str]) -> bool:
    """Whether any of these layers, or rows of layers, belongs to an expert of a mixture."""
    return any(_EXPERT.fullmatch(name) for name in names)
