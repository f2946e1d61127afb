"""What a PEFT adapter (LoRA) is, and whether it fits the model it is for: from its configuration and headers alone."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bitmill_common.checkpoint import Checkpoint
from bitmill_common.errors import FailedPreconditionError
from bitmill_common.object_store import ObjectInfo, ObjectStore
from bitmill_common.safetensors import HeaderError, TensorInfo, read_header, require_unicode

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLES = ("adapter_model.bin", "adapter_model.pt")

_MAX_CONFIG_BYTES = 2**20
_PREFIX = "base_model.model."
_MATRICES = (".lora_A.weight", ".lora_B.weight", ".lora_embedding_A", ".lora_embedding_B")
# Features of PEFT that change what an adapter means and that vLLM 0.32 does not have (vllm/lora/peft_helper.py), and
# whole layers, which it takes for classification heads alone.
_UNSUPPORTED = (
    "use_dora",
    "lora_bias",
    "alora_invocation_tokens",
    "layer_replication",
    "use_bdlora",
    "use_qalora",
    "modules_to_save",
)
# Ways to begin the training that leave the base model as it is; the others need another base model.
_PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
# More problems than these say nothing new.
_MAX_PROBLEMS = 10


@dataclass(frozen=True)
class AdapterConfig:
    """What `adapter_config.json` says. `rank`: the highest of all modules, and without `ranks_vary` that of each.

    `problems`: why no engine would take it.
    """

    rank: int
    ranks_vary: bool
    fan_in_fan_out: bool
    problems: tuple[str, ...] = ()


@dataclass
class _Matrices:
    """The two low-rank matrices of one module: from its inputs to the rank, and from there to its outputs."""

    a: TensorInfo | None = None
    b: TensorInfo | None = None
    of_embedding: bool = False


@dataclass(frozen=True)
class _Features:
    """What a module of the base model takes and gives; None where its stored form does not tell."""

    inputs: int | None = None
    outputs: int | None = None


@dataclass(frozen=True)
class _BaseModules:
    """The modules of a checkpoint, by name, and by the part from "layers." on where that names one alone."""

    by_name: Mapping[str, _Features]
    by_tail: Mapping[str, _Features] = field(default_factory=dict)

    def find(self, module: str) -> _Features | None:
        """Checkpoints and adapters may name what is above the layers differently."""
        if module in self.by_name:
            return self.by_name[module]
        return self.by_tail.get(_tail(module))


def check_adapter(adapter: ObjectStore, uri: str, base: Checkpoint, max_rank: int) -> int:
    """Returns the rank of the adapter that `adapter` is rooted at; `uri` names it in errors.

    `FailedPreconditionError` ADAPTER_INVALID for files that cannot be read as an adapter, ADAPTER_UNSUPPORTED for a
    kind or a feature that the engine lacks, ADAPTER_INCOMPATIBLE with every problem found when it does not fit `base`.
    """
    config = _read_config(adapter, uri)
    if config.problems:
        raise _refused(uri, "ADAPTER_UNSUPPORTED", "is of a kind that cannot be served", config.problems)
    if config.rank > max_rank:
        metadata = {"uri": uri, "rank": str(config.rank), "max_lora_rank": str(max_rank)}
        message = f"the adapter {uri} has rank {config.rank}; the model was loaded with max_lora_rank {max_rank}"
        raise FailedPreconditionError("ADAPTER_RANK_TOO_HIGH", message, metadata)
    base_modules = _base_modules(base)
    problems = [
        problem
        for module, matrices in _read_modules(adapter, uri).items()
        for problem in _module_problems(module, matrices, base_modules, config)
    ]
    if problems:
        raise _refused(uri, "ADAPTER_INCOMPATIBLE", "does not fit the model", problems)
    return config.rank


def _refused(uri: str, reason: str, message: str, problems: Sequence[str]) -> FailedPreconditionError:
    listed = "; ".join(problems[:_MAX_PROBLEMS])
    more = f"; and {len(problems) - _MAX_PROBLEMS} more" if len(problems) > _MAX_PROBLEMS else ""
    text = f"the adapter {uri} {message}: {listed}{more}"
    return FailedPreconditionError(reason, text, {"uri": uri, "problems": listed})


def _read_config(adapter: ObjectStore, uri: str) -> AdapterConfig:
    try:
        document = json.loads(adapter.read(CONFIG, length=_MAX_CONFIG_BYTES + 1))
        require_unicode(document)
        if not isinstance(document, dict):
            raise ValueError("it holds no JSON object")
        return parse_config(document)
    except (ValueError, RecursionError) as error:
        raise _refused(uri, "ADAPTER_INVALID", f"has an {CONFIG} that cannot be used", [str(error)]) from error


def parse_config(document: Mapping[str, Any]) -> AdapterConfig:
    """Returns what the engine must know of a configuration. `ValueError` for one that PEFT would not write."""
    problems = []
    kind = document.get("peft_type", "LORA")
    if kind != "LORA":
        problems.append(f"peft_type is {kind!r}, not LORA")
    rank = document.get("r")
    if kind == "LORA" and (type(rank) is not int or rank < 1):
        raise ValueError(f"r must be a whole number of at least 1, is {rank!r}")
    patterns = document.get("rank_pattern") or {}
    if not isinstance(patterns, dict) or not all(type(value) is int and value > 0 for value in patterns.values()):
        raise ValueError("rank_pattern must give whole numbers of at least 1")
    alpha = document.get("lora_alpha")
    if kind == "LORA" and (isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha)):
        raise ValueError(f"lora_alpha must be a number, is {alpha!r}")
    if (bias := document.get("bias", "none")) != "none":
        problems.append(f"bias is {bias!r}; biases that were trained are not applied")
    init = document.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower() not in _PLAIN_INITS:
        problems.append(f"init_lora_weights is {init!r}, which changes the model's own weights")
    problems += [f"{name} is set, which this server does not support" for name in _UNSUPPORTED if document.get(name)]
    return AdapterConfig(
        max([rank if type(rank) is int else 0, *patterns.values()]),
        bool(patterns),
        bool(document.get("fan_in_fan_out")),
        tuple(problems),
    )


def _read_modules(adapter: ObjectStore, uri: str) -> dict[str, _Matrices]:
    info = adapter.head(WEIGHTS)
    try:
        tensors = read_header(adapter, ObjectInfo(WEIGHTS, info.size_bytes))
        modules: dict[str, _Matrices] = {}
        for name, tensor in tensors.items():
            if name.endswith((".embed_tokens.base_layer.weight", ".lm_head.base_layer.weight")):
                continue  # The base model's own, which PEFT may save beside and vLLM leaves out.
            module, suffix = _parse_name(name)
            matrices = modules.setdefault(module, _Matrices(of_embedding="embedding" in suffix))
            if suffix.endswith(("A", "A.weight")):
                matrices.a = tensor
            else:
                matrices.b = tensor
        if not modules:
            raise ValueError("it has no tensors")
    except (HeaderError, ValueError) as error:
        raise _refused(uri, "ADAPTER_INVALID", f"has an {WEIGHTS} that cannot be used", [str(error)]) from error
    return modules


def _parse_name(name: str) -> tuple[str, str]:
    """Returns the module of a tensor, and which of its matrices it is, by PEFT's names."""
    for suffix in _MATRICES:
        if name.endswith(suffix):
            return name.removeprefix(_PREFIX).removesuffix(suffix), suffix
    raise ValueError(f"{name} is no LoRA matrix")


def _module_problems(module: str, matrices: _Matrices, base: _BaseModules, config: AdapterConfig) -> Iterator[str]:
    if matrices.a is None or matrices.b is None:
        yield f"{module} has only one of its two matrices"
        return
    if len(matrices.a.shape) != 2 or len(matrices.b.shape) != 2:
        yield f"{module} has matrices of shapes {matrices.a.shape} and {matrices.b.shape}"
        return
    (rank, inputs), (outputs, rank_b) = matrices.a.shape, matrices.b.shape
    if rank != rank_b or rank > config.rank or (rank < config.rank and not config.ranks_vary):
        yield f"{module} has matrices of ranks {rank} and {rank_b}, its {CONFIG} says {config.rank}"
    # Of experts, whose tensors are stored in many ways, the engine itself judges.
    if ".experts" in module:
        return
    features = base.find(module)
    if features is None:
        yield f"{module} is no module of the model"
        return
    if config.fan_in_fan_out or matrices.of_embedding:
        features = _Features(features.outputs, features.inputs)
    expected = (features.inputs or inputs, features.outputs or outputs)
    if (inputs, outputs) != expected:
        yield f"{module} is from {inputs} to {outputs}, the model's from {expected[0]} to {expected[1]}"


def _base_modules(base: Checkpoint) -> _BaseModules:
    tensors: dict[str, dict[str, TensorInfo]] = {}
    for name, tensor in base.tensors.items():
        module, _, kind = name.rpartition(".")
        tensors.setdefault(module, {})[kind] = tensor
    by_name = {module: _features(parts) for module, parts in tensors.items()}
    if "lm_head" not in by_name:
        by_name["lm_head"] = next(
            (features for module, features in by_name.items() if module.endswith("embed_tokens")), _Features()
        )
    tails: dict[str, list[_Features]] = {}
    for module, features in by_name.items():
        tails.setdefault(_tail(module), []).append(features)
    return _BaseModules(by_name, {tail: found[0] for tail, found in tails.items() if len(found) == 1})


def _tail(module: str) -> str:
    _, found, rest = module.partition("layers.")
    return found + rest if found else module


def _features(parts: Mapping[str, TensorInfo]) -> _Features:
    """How a linear layer is stored: whole, packed by compressed-tensors, or packed by GPTQ and AWQ."""
    if (weight := parts.get("weight")) is not None and len(weight.shape) == 2:
        return _Features(inputs=weight.shape[1], outputs=weight.shape[0])
    if (packed := parts.get("weight_packed")) is not None and len(packed.shape) == 2:
        return _Features(outputs=packed.shape[0])
    if (scales := parts.get("scales")) is not None and len(scales.shape) == 2:
        indices = parts.get("g_idx")
        return _Features(inputs=indices.shape[0] if indices is not None else None, outputs=scales.shape[1])
    return _Features()
