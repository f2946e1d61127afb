"""The calls of ModelService: each written once, for the sync and the async client.

A function here gives a client's method its signature and its documentation, and returns the call to make.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Unpack

from bitmill import methods, requests
from bitmill.filling import filled
from bitmill.inference.v1 import model_service_pb2 as model_pb
from bitmill.inference.v1.model_pb2 import Adapter, Model
from bitmill.keywords import CallOptions, LoadOptions, call_options
from bitmill.methods import Call, whole


def load_model(
    uri: str | os.PathLike[str],
    *,
    name: str = "",
    aliases: str | Iterable[str] = (),
    unload_replaced: bool = False,
    return_immediately: bool = False,
    **options: Unpack[LoadOptions],
) -> Call[Model]:
    """Loads an artifact or a checkpoint directory; returns when it serves, or at once with `return_immediately`.

    `aliases` move to the model once it serves; `unload_replaced` then unloads the models that have none left, after
    their running calls: together a hot swap. A path object becomes a file:// URI; `options` as in `LoadOptions`.
    Raises FailedPreconditionError when the server's device cannot serve it, ResourceExhaustedError with the numbers
    when it does not fit, DataLossError when a file differs from the manifest. The work goes on past the deadline;
    `watch_model` follows it.
    """
    request = filled(
        model_pb.LoadModelRequest,
        name=name,
        uri=requests.path_uri(uri),
        engine_options=requests.engine_options(options),
        aliases=requests.texts(aliases),
        unload_replaced=unload_replaced,
        return_immediately=return_immediately,
    )
    return Call(methods.LOAD_MODEL, request, call_options(LoadOptions, options), lambda response: response.model)


def unload_model(name: str, **options: Unpack[CallOptions]) -> Call[None]:
    """Lets the running calls end, stops the engine and returns."""
    return Call(methods.UNLOAD_MODEL, filled(model_pb.UnloadModelRequest, name=name), options, lambda response: None)


def model(name: str, **options: Unpack[CallOptions]) -> Call[Model]:
    """Returns one model. Raises NotFoundError."""
    return Call(
        methods.GET_MODEL, filled(model_pb.GetModelRequest, name=name), options, lambda response: response.model
    )


def models(*, page_size: int = 0, **options: Unpack[CallOptions]) -> Call[Sequence[Model]]:
    """Iterates over the models by name, page by page."""
    request = filled(model_pb.ListModelsRequest, page_size=page_size)
    return Call(methods.LIST_MODELS, request, options, lambda response: response.models)


def watch_model(name: str, **options: Unpack[CallOptions]) -> Call[Model]:
    """Streams the model as it is and then each change; ends after UNLOADED. No deadline unless `timeout`."""
    return Call(
        methods.WATCH_MODEL, filled(model_pb.WatchModelRequest, name=name), options, lambda response: response.model
    )


def set_alias(alias: str, name: str, **options: Unpack[CallOptions]) -> Call[Model]:
    """Makes an alias of the serving model `name`, or moves it there. Calls that run stay where they are."""
    request = filled(model_pb.SetAliasRequest, alias=alias, name=name)
    return Call(methods.SET_ALIAS, request, options, lambda response: response.model)


def delete_alias(alias: str, **options: Unpack[CallOptions]) -> Call[None]:
    """Removes an alias. Raises NotFoundError."""
    return Call(methods.DELETE_ALIAS, filled(model_pb.DeleteAliasRequest, alias=alias), options, lambda response: None)


def load_adapter(
    uri: str | os.PathLike[str],
    *,
    model: str = "",
    name: str = "",
    digest: str = "",
    **options: Unpack[CallOptions],
) -> Call[Adapter]:
    """Loads a LoRA adapter into a model, for calls that name it as `adapter`. `digest` is what its files must have.

    `model` may be empty when exactly one is loaded; `name` is the directory's unless given. Raises
    FailedPreconditionError when the model takes no adapters or not this one, DataLossError for another digest.
    """
    request = filled(model_pb.LoadAdapterRequest, model=model, name=name, uri=requests.path_uri(uri), digest=digest)
    return Call(methods.LOAD_ADAPTER, request, options, lambda response: response.adapter)


def unload_adapter(name: str, *, model: str = "", **options: Unpack[CallOptions]) -> Call[None]:
    """Lets the running calls with an adapter end, removes it and returns. Raises NotFoundError."""
    request = filled(model_pb.UnloadAdapterRequest, model=model, name=name)
    return Call(methods.UNLOAD_ADAPTER, request, options, lambda response: None)


def sleep_model(name: str, **options: Unpack[CallOptions]) -> Call[Model]:
    """Lets the running calls end and frees the model's memory on the device; `wake_model` brings it back.

    Raises FailedPreconditionError when the model or the device has no such mode.
    """
    return Call(
        methods.SLEEP_MODEL, filled(model_pb.SleepModelRequest, name=name), options, lambda response: response.model
    )


def wake_model(name: str, **options: Unpack[CallOptions]) -> Call[Model]:
    """Brings a sleeping model back; returns when it serves."""
    return Call(
        methods.WAKE_MODEL, filled(model_pb.WakeModelRequest, name=name), options, lambda response: response.model
    )


def load(model: str = "", **options: Unpack[CallOptions]) -> Call[model_pb.GetLoadResponse]:
    """Returns what the engines do at the moment: requests, KV cache, tokens per second. No `model`: all of them."""
    return Call(methods.GET_LOAD, filled(model_pb.GetLoadRequest, model=model), options, whole)
