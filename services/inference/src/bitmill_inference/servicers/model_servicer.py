"""The gRPC edge of ModelService: convert, call, convert."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime

from bitmill.inference.v1 import model_service_pb2 as pb
from bitmill.inference.v1 import model_service_pb2_grpc
from bitmill_inference.models.load import LoadReport
from bitmill_inference.models.models import Models
from bitmill_inference.servicers import convert_model


class ModelServicer(model_service_pb2_grpc.ModelServiceServicer):
    """See `model_service.proto`."""

    def __init__(self, models: Models, load: LoadReport) -> None:
        self._models = models
        self._load = load

    async def LoadModel(self, request: pb.LoadModelRequest, context: object) -> pb.LoadModelResponse:
        """See `model_service.proto`."""
        options = convert_model.engine_options(request.engine_options)
        model = await self._models.load(
            request.name,
            request.uri,
            options,
            aliases=request.aliases,
            unload_replaced=request.unload_replaced,
            wait=not request.return_immediately,
        )
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

    async def SetAlias(self, request: pb.SetAliasRequest, context: object) -> pb.SetAliasResponse:
        """See `model_service.proto`."""
        model = await self._models.set_alias(request.alias, request.name)
        return pb.SetAliasResponse(model=convert_model.model_message(model))

    async def DeleteAlias(self, request: pb.DeleteAliasRequest, context: object) -> pb.DeleteAliasResponse:
        """See `model_service.proto`."""
        await self._models.delete_alias(request.alias)
        return pb.DeleteAliasResponse()

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: object) -> pb.LoadAdapterResponse:
        """See `model_service.proto`."""
        adapter = await self._models.load_adapter(request.model, request.name, request.uri, request.digest)
        return pb.LoadAdapterResponse(adapter=convert_model.adapter_message(adapter))

    async def UnloadAdapter(self, request: pb.UnloadAdapterRequest, context: object) -> pb.UnloadAdapterResponse:
        """See `model_service.proto`."""
        await self._models.unload_adapter(request.model, request.name)
        return pb.UnloadAdapterResponse()

    async def SleepModel(self, request: pb.SleepModelRequest, context: object) -> pb.SleepModelResponse:
        """See `model_service.proto`."""
        return pb.SleepModelResponse(model=convert_model.model_message(await self._models.sleep(request.name)))

    async def WakeModel(self, request: pb.WakeModelRequest, context: object) -> pb.WakeModelResponse:
        """See `model_service.proto`."""
        return pb.WakeModelResponse(model=convert_model.model_message(await self._models.wake(request.name)))

    async def GetLoad(self, request: pb.GetLoadRequest, context: object) -> pb.GetLoadResponse:
        """See `model_service.proto`."""
        return convert_model.load_response(self._load.loads(request.model), datetime.now(UTC))
