"""The service of steering: the routes under `/v1/steering`, called with messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel
from starlette.datastructures import Headers

from capflow_engine.serve.front import Front
from capflow_engine.serve.http import steering_routes
from capflow_engine.serve.http.steering_bodies import ModuleBody, ModulesState, NameBody, SetBody
from capflow_engine.serve.rpc import capflow_pb2 as pb
from capflow_engine.serve.rpc.capflow_pb2_grpc import SteeringServicer
from capflow_engine.serve.rpc.refusals import refusing
from capflow_engine.serve.rpc.values import fields_of, parsed, tiers_message

# ruff: noqa: N802 - the methods have gRPC's names


class SteeringService(SteeringServicer):
    """The service `SteeringService`."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def Get(self, request: pb.GetRequest, context: Any) -> pb.SteeringState:
        """Return the global state and the modules."""
        state = await self._call(request, context, steering_routes.state)
        return pb.SteeringState(
            active=state.active,
            key=state.key,
            global_state=tiers_message(state.everywhere),
            generation=state.generation,
            modules=_modules(state),
        )

    async def Layers(self, request: pb.LayersRequest, context: Any) -> pb.LayersState:
        """Return where this model can be steered."""
        state = await self._call(request, context, steering_routes.layers)
        return parsed(state.model_dump(), pb.LayersState())

    async def Set(self, request: pb.SetRequest, context: Any) -> pb.SetResponse:
        """Set the global state, which steers every later request besides its own steering."""
        state = await self._call(request, context, steering_routes.set_state, SetBody, changes=True)
        return parsed(state.model_dump(), pb.SetResponse())

    async def Clear(self, request: pb.ClearRequest, context: Any) -> pb.ClearResponse:
        """Empty the global state."""
        await self._call(request, context, steering_routes.clear_state, changes=True)
        return pb.ClearResponse()

    async def ListModules(self, request: pb.ListModulesRequest, context: Any) -> pb.ModulesState:
        """Return the modules that are registered."""
        return pb.ModulesState(modules=_modules(await self._call(request, context, steering_routes.modules)))

    async def RegisterModule(self, request: pb.RegisterModuleRequest, context: Any) -> pb.ModuleNames:
        """Register a module."""
        named = await self._call(request, context, steering_routes.register_module, ModuleBody, changes=True)
        return parsed(named.model_dump(), pb.ModuleNames())

    async def UnregisterModule(self, request: pb.UnregisterModuleRequest, context: Any) -> pb.ModuleNames:
        """Forget a module."""
        named = await self._call(request, context, steering_routes.unregister_module, NameBody, changes=True)
        return parsed(named.model_dump(), pb.ModuleNames())

    async def _call(
        self,
        request: Any,
        context: Any,
        route: Callable[..., Any],
        body: type[BaseModel] | None = None,
        *,
        changes: bool = False,
    ) -> Any:
        """Return a route's answer. The route runs beside the event loop.

        changes: whether the route needs a key.
        """
        async with refusing(context):
            if changes:
                steering_routes.check_key(self._front.keys, headers_of(context.invocation_metadata()))
            fields = fields_of(request)
            given = {} if body is None else {"body": body.model_validate(fields)}
            return await asyncio.to_thread(route, front=self._front, **given)


def headers_of(metadata: Any) -> Headers:
    """Return the text metadata of a call as HTTP's headers."""
    return Headers({name: value for name, value in metadata or () if isinstance(value, str)})


def _modules(state: ModulesState) -> dict[str, pb.TiersState]:
    return {name: tiers_message(tiers) for name, tiers in state.contents.items()}
