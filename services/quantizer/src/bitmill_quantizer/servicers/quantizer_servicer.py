"""The gRPC edge of QuantizerService: convert, call, convert."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from bitmill.quantizer.v1 import quantizer_service_pb2 as pb
from bitmill.quantizer.v1 import quantizer_service_pb2_grpc
from bitmill_quantizer.service import QuantizationService
from bitmill_quantizer.servicers import convert_job


class QuantizerServicer(quantizer_service_pb2_grpc.QuantizerServiceServicer):
    """See `quantizer_service.proto`."""

    def __init__(self, service: QuantizationService) -> None:
        self._service = service

    async def CreateQuantizationJob(
        self, request: pb.CreateQuantizationJobRequest, context: object
    ) -> pb.CreateQuantizationJobResponse:
        """See `quantizer_service.proto`."""
        job = await self._service.create(request.request_id, convert_job.draft_of(request.spec))
        return pb.CreateQuantizationJobResponse(job=convert_job.job_proto(job))

    async def PlanQuantization(
        self, request: pb.PlanQuantizationRequest, context: object
    ) -> pb.PlanQuantizationResponse:
        """See `quantizer_service.proto`."""
        plan = await self._service.plan(convert_job.draft_of(request.spec))
        return convert_job.plan_proto(plan, request.spec)

    async def GetQuantizationJob(
        self, request: pb.GetQuantizationJobRequest, context: object
    ) -> pb.GetQuantizationJobResponse:
        """See `quantizer_service.proto`."""
        job = await self._service.get(request.job_id)
        return pb.GetQuantizationJobResponse(job=convert_job.job_proto(job))

    async def ListQuantizationJobs(
        self, request: pb.ListQuantizationJobsRequest, context: object
    ) -> pb.ListQuantizationJobsResponse:
        """See `quantizer_service.proto`."""
        states = convert_job.states_of(request.states)
        page = await self._service.list(request.page_size, request.page_token, states)
        return pb.ListQuantizationJobsResponse(
            jobs=[convert_job.job_proto(job) for job in page.jobs], next_page_token=page.next_page_token
        )

    async def WatchQuantizationJob(
        self, request: pb.WatchQuantizationJobRequest, context: object
    ) -> AsyncIterator[pb.WatchQuantizationJobResponse]:
        """See `quantizer_service.proto`."""
        async with contextlib.aclosing(self._service.watch(request.job_id, request.after_sequence)) as events:
            async for event in events:
                yield pb.WatchQuantizationJobResponse(event=convert_job.event_proto(event))

    async def CancelQuantizationJob(
        self, request: pb.CancelQuantizationJobRequest, context: object
    ) -> pb.CancelQuantizationJobResponse:
        """See `quantizer_service.proto`."""
        job = await self._service.cancel(request.job_id)
        return pb.CancelQuantizationJobResponse(job=convert_job.job_proto(job))
