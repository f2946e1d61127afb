"""Artifacts with everything measured, as reports show them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from bitmill.artifact.v1.artifact_pb2 import Artifact, ArtifactFile, Device, DeviceSupport, Evaluation
from bitmill.artifact.v1.measurement_pb2 import (
    CalibrationUse,
    LayerLoss,
    ModuleResult,
    PhaseCost,
    Sensitivity,
    Verification,
)
from bitmill.artifact.v1.recipe_pb2 import (
    ActivationOrder,
    AdaptiveCandidate,
    AdaptiveSearch,
    Algorithm,
    Calibration,
    ModuleRule,
    Packing,
    Recipe,
    Scheme,
)

KINDS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
         "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip


def measured_artifact(num_layers: int = 3, **fields: Any) -> Artifact:
    """An artifact of a model with so many decoder layers; no two of its measured numbers are equal."""
    made = Artifact(
        name="smol-w4",
        digest="sha256:" + "ab" * 32,
        uri="s3://bucket/artifacts/smol-w4/abab",
        size_bytes=112_300_000,
        files=[ArtifactFile(path="model.safetensors", size_bytes=110_200_000, sha256="cd" * 32)],
        source_uri="hf://org/smol@main",
        source_digest="sha256:" + "ef" * 32,
        source_size_bytes=269_100_000,
        recipe=Recipe(
            scheme=Scheme.SCHEME_W4A16, group_size=64, symmetric=True, ignore=["lm_head"], dampening_frac=0.015,
            seed=7, algorithm=Algorithm.ALGORITHM_GPTQ, activation_order=ActivationOrder.ACTIVATION_ORDER_STATIC,
            rules=[ModuleRule(pattern="re:.*down_proj", scheme=Scheme.SCHEME_W8A16, group_size=-1)],
        ),
        calibration=Calibration(
            uri="s3://bucket/chats.jsonl", num_samples=256, max_sequence_length=1024, packing=Packing.PACKING_TRUNCATE
        ),
        calibration_digest="sha256:" + "12" * 32,
        calibration_use=CalibrationUse(
            num_samples=256, num_tokens=231_417, num_documents=251,
            uncalibrated_modules=["model.layers.1.mlp.experts.5"],
        ),
        devices=[
            DeviceSupport(device=Device.DEVICE_CPU),
            DeviceSupport(device=Device.DEVICE_CUDA, min_compute_capability=75),
        ],
        evaluation=Evaluation(
            source_perplexity=13.7125, artifact_perplexity=14.0211, mean_kl_divergence=0.03125, num_tokens=4097,
            p99_kl_divergence=0.4375, top1_agreement=0.9123,
            layer_losses=[
                LayerLoss(layer=f"model.layers.{index}", relative_error=0.00117 * (1 + index) ** 1.5)
                for index in range(num_layers)
            ],
        ),
        engine="llmcompressor",
        versions={"llmcompressor": "0.14.0", "torch": "2.13.0+cpu"},
        job_id="job-17",
        engine_options={"max_model_len": 512},
        modules=[
            _module(f"model.layers.{index}.{kind}", 0.0213 * (1 + index) * (2 + place))
            for index in range(num_layers)
            for place, kind in enumerate(KINDS)
        ],
        phase_costs=[
            _cost("FETCH", 0.62),
            _cost("QUANTIZE", 93.4, peak_memory_bytes=3_210_000_000, peak_device_memory_bytes=1_230_000_000),
            _cost("EVALUATE", 21.7, peak_memory_bytes=2_340_000_000),
        ],
        verification=Verification(
            text=" is Paris.\nIt is", num_tokens=8, device="cpu", versions={"vllm": "0.32.1"}
        ),
        format="compressed-tensors",
    )  # fmt: skip
    made.create_time.FromDatetime(datetime(2026, 12, 1, 18, 30, tzinfo=UTC))
    last = made.modules[-1]
    last.dampening_frac, last.remark = 0.15, "its Hessian did not invert with less damping"
    made.MergeFrom(Artifact(**fields))
    return made


def _module(name: str, loss: float) -> ModuleResult:
    if name.endswith("down_proj"):
        return ModuleResult(name=name, scheme=Scheme.SCHEME_W8A16, group_size=-1, loss=loss)
    return ModuleResult(name=name, scheme=Scheme.SCHEME_W4A16, group_size=64, loss=loss)


def _cost(phase: str, seconds: float, **memory: int) -> PhaseCost:
    cost = PhaseCost(phase=phase, **memory)
    cost.duration.FromTimedelta(timedelta(seconds=seconds))
    return cost


def adaptive_artifact(num_layers: int = 3) -> Artifact:
    """One whose schemes were chosen from measured sensitivities."""
    candidates = [
        AdaptiveCandidate(scheme=Scheme.SCHEME_W4A16, group_size=128),
        AdaptiveCandidate(scheme=Scheme.SCHEME_W4A16, group_size=32),
        AdaptiveCandidate(scheme=Scheme.SCHEME_W8A16, group_size=-1),
        AdaptiveCandidate(scheme=Scheme.SCHEME_UNQUANTIZED),
    ]
    made = measured_artifact(
        num_layers,
        sensitivities=[
            Sensitivity(
                modules=[f"model.layers.{layer}.{kind}" for kind in kinds],
                candidate=candidate,
                kl_divergence=0.0107 * (1 + layer) / (1 + 7 * place),
                size_bytes=1_110_000 * (1 + place),
                chosen=place == layer % 4,
            )
            for layer in range(num_layers)
            for kinds in (KINDS[:3], KINDS[4:6])
            for place, candidate in enumerate(candidates)
        ],
    )
    search = AdaptiveSearch(candidates=candidates, max_size_bytes=120_000_000, num_samples=8)
    made.recipe.CopyFrom(Recipe(scheme=Scheme.SCHEME_ADAPTIVE, ignore=["lm_head"], adaptive=search))
    return made


def sibling(number: int, size_bytes: int, kl: float, **fields: Any) -> Artifact:
    """Another artifact of the same source, as lists have it."""
    made = Artifact(
        name=f"smol-{number}",
        digest=f"sha256:{number:064x}",
        uri=f"s3://bucket/artifacts/smol-{number}/00",
        size_bytes=size_bytes,
        source_digest="sha256:" + "ef" * 32,
        recipe=Recipe(scheme=Scheme.SCHEME_W8A8_INT8),
        evaluation=Evaluation(
            source_perplexity=13.7125, artifact_perplexity=13.7125 + kl, mean_kl_divergence=kl, num_tokens=4097
        ),
    )
    made.MergeFrom(Artifact(**fields))
    return made
