"""The gRPC edge of ArtifactService: convert, call, convert."""

from __future__ import annotations

from bitmill.artifact.v1 import artifact_service_pb2 as pb
from bitmill.artifact.v1 import artifact_service_pb2_grpc
from bitmill_quantizer.catalog import ArtifactCatalog
from bitmill_quantizer.servicers import convert_artifact


class ArtifactServicer(artifact_service_pb2_grpc.ArtifactServiceServicer):
    """See `artifact_service.proto`."""

    def __init__(self, catalog: ArtifactCatalog) -> None:
        self._catalog = catalog

    async def GetArtifact(self, request: pb.GetArtifactRequest, context: object) -> pb.GetArtifactResponse:
        """See `artifact_service.proto`."""
        uri, manifest = await self._catalog.get(request.uri)
        return pb.GetArtifactResponse(artifact=convert_artifact.artifact_proto(uri, manifest))

    async def ListArtifacts(self, request: pb.ListArtifactsRequest, context: object) -> pb.ListArtifactsResponse:
        """See `artifact_service.proto`."""
        page = await self._catalog.list(request.name, request.page_size, request.page_token)
        return pb.ListArtifactsResponse(
            artifacts=[convert_artifact.artifact_proto(uri, manifest, whole=False) for uri, manifest in page.artifacts],
            next_page_token=page.next_page_token,
        )

    async def VerifyArtifact(self, request: pb.VerifyArtifactRequest, context: object) -> pb.VerifyArtifactResponse:
        """See `artifact_service.proto`."""
        verification = await self._catalog.verify(request.uri)
        return pb.VerifyArtifactResponse(
            intact=not verification.faults,
            faults=[convert_artifact.fault_proto(fault) for fault in verification.faults],
            verified_bytes=verification.verified_bytes,
        )
