"""The calls of the quantizer, QuantizerService and ArtifactService: each written once, for the sync and async client.

A function here gives a client's method its signature and its documentation, and returns the call to make.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Unpack

from bitmill import methods, requests
from bitmill.artifact.v1 import artifact_service_pb2 as artifact_pb
from bitmill.artifact.v1.artifact_pb2 import Artifact
from bitmill.filling import filled
from bitmill.keywords import CallOptions, QuantizationOptions, call_options
from bitmill.methods import Call, whole
from bitmill.quantizer.v1 import quantizer_service_pb2 as quantizer_pb
from bitmill.quantizer.v1.quantization_job_pb2 import QuantizationJob


def quantize(
    source_uri: str | os.PathLike[str],
    artifact_name: str,
    *,
    scheme: str | int | None = None,
    **options: Unpack[QuantizationOptions],
) -> Call[QuantizationJob]:
    """Queues a job and returns it at once. `options` as in `RecipeOptions`; a path object becomes a file:// URI.

    Without `scheme` it is that of the `recipe` option, and without that W4A16.

    The same `request_id` with the same options returns the same job. Raises InvalidArgumentError with every wrong
    field, FailedPreconditionError for a checkpoint that cannot be used.
    """
    call = call_options(QuantizationOptions, options)
    call["request_id"] = methods.checked_request_id(call.get("request_id", ""))
    spec = requests.quantization_spec(source_uri, artifact_name, scheme, options)
    return Call(
        methods.CREATE_JOB,
        filled(quantizer_pb.CreateQuantizationJobRequest, request_id=call["request_id"], spec=spec),
        call,
        lambda response: response.job,
    )


def plan(
    source_uri: str | os.PathLike[str],
    artifact_name: str,
    *,
    scheme: str | int | None = None,
    **options: Unpack[QuantizationOptions],
) -> Call[quantizer_pb.PlanQuantizationResponse]:
    """The dry run of `quantize`: sizes, memory, and every problem at once."""
    spec = requests.quantization_spec(source_uri, artifact_name, scheme, options)
    return Call(
        methods.PLAN,
        filled(quantizer_pb.PlanQuantizationRequest, spec=spec),
        call_options(QuantizationOptions, options),
        whole,
    )


def job(job_id: str, **options: Unpack[CallOptions]) -> Call[QuantizationJob]:
    """Returns one job. Raises NotFoundError."""
    request = filled(quantizer_pb.GetQuantizationJobRequest, job_id=job_id)
    return Call(methods.GET_JOB, request, options, lambda response: response.job)


def jobs(
    states: Iterable[str | int] = (), *, page_size: int = 0, **options: Unpack[CallOptions]
) -> Call[Sequence[QuantizationJob]]:
    """Iterates over jobs, newest first, page by page. `states` such as "RUNNING"; none: all."""
    request = filled(quantizer_pb.ListQuantizationJobsRequest, page_size=page_size, states=requests.job_states(states))
    return Call(methods.LIST_JOBS, request, options, lambda response: response.jobs)


def cancel(job_id: str, **options: Unpack[CallOptions]) -> Call[QuantizationJob]:
    """Asks a job to stop and returns it. One that is publishing or final is returned as it is."""
    request = filled(quantizer_pb.CancelQuantizationJobRequest, job_id=job_id)
    return Call(methods.CANCEL_JOB, request, options, lambda response: response.job)


def artifact(uri: str, **options: Unpack[CallOptions]) -> Call[Artifact]:
    """Returns one artifact with its files. Raises NotFoundError."""
    request = filled(artifact_pb.GetArtifactRequest, uri=uri)
    return Call(methods.GET_ARTIFACT, request, options, lambda response: response.artifact)


def artifacts(name: str = "", *, page_size: int = 0, **options: Unpack[CallOptions]) -> Call[Sequence[Artifact]]:
    """Iterates over artifacts by name and digest, page by page, without their files. No `name`: all."""
    request = filled(artifact_pb.ListArtifactsRequest, name=name, page_size=page_size)
    return Call(methods.LIST_ARTIFACTS, request, options, lambda response: response.artifacts)


def verify(uri: str, **options: Unpack[CallOptions]) -> Call[artifact_pb.VerifyArtifactResponse]:
    """Reads every byte of an artifact again and says whether it is what the manifest says."""
    return Call(methods.VERIFY_ARTIFACT, filled(artifact_pb.VerifyArtifactRequest, uri=uri), options, whole)
