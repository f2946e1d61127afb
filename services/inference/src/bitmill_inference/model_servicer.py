"""The gRPC edge of ModelService: convert, call, convert."""

from __future__ import annotations

from collections.abc import AsyncIterator

from bitmill.inference.v1 import model_service_pb2 as pb
from bitmill.inference.v1 import model_service_pb2_grpc
from bitmill_inference import convert_model
from bitmill_inference.models import Models


class ModelServicer(model_service_pb2_grpc.ModelServiceServicer):
    """See `model_service.proto`."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def LoadModel(self, request: pb.LoadModelRequest, context: object) -> pb.LoadModelResponse:
        """See `model_service.proto`."""
        options = convert_model.engine_options(request.engine_options)
        model = await self._models.load(request.name, request.uri, options, wait=not request.return_immediately)
        return pb.LoadModelResponse(model=convert_model.model_message(model))

    async def UnloadModel(self, request: pb.UnloadModelRequest, context: object) -> pb.UnloadModelResponse:
        """See `model_service.proto`."""
        await self._models.unload(request.name)
        return pb.UnloadModelResponse()

    async def GetModel(self, request: pb.GetModelRequest, context: object) -> pb.GetModelResponse:
        """See `model_service.proto`."""
        return pb.GetModelResponse(model=convert_model.model_message(self._models.get(request.name)))

    async def ListModels(self, request: pb.ListModelsRequest, context: object) -> pb.ListModelsResponse:
        """See `model_service.proto`."""
        return convert_model.models_page(request, self._models.list())

    async def WatchModel(self, request: pb.WatchModelRequest, context: object) -> AsyncIterator[pb.WatchModelResponse]:
        """See `model_service.proto`."""
        async for model in self._models.watch(request.name):
            yield pb.WatchModelResponse(model=convert_model.model_message(model))
