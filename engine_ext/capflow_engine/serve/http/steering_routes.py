"""The steering routes: the global state, the modules, and the sites at which this model can be steered.

Whoever reaches the server may read; a change needs a key.
Invariant: a change holds for every request after the answer, in each of the server's processes. Running requests keep
their steering.
"""

# No postponed annotations: FastAPI reads those of the routes.

from collections.abc import Mapping
from http import HTTPStatus
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, HTTPException, Request, Security
from fastapi.concurrency import run_in_threadpool
from fastapi.routing import APIRoute
from fastapi.security import APIKeyHeader, HTTPBearer

from capflow.errors import CapflowError, UsageError, explain
from capflow.serve_options import STEERING_KEY
from capflow.steering.action import ActionApplied, Freeze, Gain, Unfreeze
from capflow.text.jsontext import check_keys
from capflow_engine.compat import engine as compat
from capflow_engine.compat.protocol import ErrorResponse
from capflow_engine.hubs import HubAt
from capflow_engine.scheduler.calls import ask
from capflow_engine.serve.api_keys import ENVIRONMENT_VARIABLE, Keys
from capflow_engine.serve.http.steering_bodies import (
    ClearBody,
    Done,
    EmptyBody,
    EngineChanged,
    GainBody,
    LayersState,
    LayerState,
    ModuleBody,
    ModulesState,
    NameBody,
    NamedAnswer,
    Set,
    SetBody,
    SteeringState,
    TiersState,
)
from capflow_engine.serve.refusals import refused
from capflow_engine.settings import Settings
from capflow_engine.steering.applied import NOTHING_KEY, key_of
from capflow_engine.steering.module import as_written
from capflow_engine.steering.sharing import NotEverywhereError

# How long a hub may take to answer.
_HUB_S = 1.0


class _Route(APIRoute):
    """A route whose UsageErrors are refusals."""

    def get_route_handler(self) -> Any:
        handler = super().get_route_handler()

        async def answer(request: Request) -> Any:
            try:
                check_keys(await request.body(), "body")
                return await handler(request)
            except UsageError as e:
                return refused(e)
            except NotEverywhereError as e:
                return refused(str(e), HTTPStatus.SERVICE_UNAVAILABLE)

        return answer


_ERRORS: dict[int | str, dict[str, Any]] = {
    code.value: {"model": ErrorResponse}
    for code in (
        HTTPStatus.BAD_REQUEST,
        HTTPStatus.UNAUTHORIZED,
        HTTPStatus.FORBIDDEN,
        HTTPStatus.NOT_FOUND,
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        HTTPStatus.SERVICE_UNAVAILABLE,
    )
}
router = APIRouter(prefix="/v1/steering", tags=["steering"], route_class=_Route, responses=_ERRORS)


def front_of(request: Request) -> Any:
    """Return the front of the server."""
    front = request.app.state.capflow
    if front is None:
        do = "start the server with `capflow serve`"
        raise HTTPException(HTTPStatus.NOT_FOUND, explain("steering: this engine is not capflow's", do=do))
    return front


Front = Annotated[Any, Depends(front_of)]


def key_holder(
    request: Request,
    front: Front,
    _bearer: Annotated[Any, Security(HTTPBearer(auto_error=False, scheme_name="steering key"))],
    _header: Annotated[
        Any, Security(APIKeyHeader(name="X-API-Key", auto_error=False, scheme_name="steering key header"))
    ],
) -> None:
    """Raise HTTPException unless a request may change what steers others."""
    check_key(front.keys, request.headers)


def check_key(keys: Keys, headers: Mapping[str, str]) -> None:
    """Raise HTTPException unless a request with these headers may change what steers others."""
    if keys.secrets:
        if not keys.admit(headers):
            expected = "a steering key as `Authorization: Bearer KEY` or `X-API-Key: KEY`"
            raise HTTPException(
                HTTPStatus.UNAUTHORIZED, explain("steering key", got="none that fits", expected=expected)
            )
    elif not keys.open:
        do = (
            f"start the server with {STEERING_KEY} (or {ENVIRONMENT_VARIABLE}), with --host 127.0.0.1 and no other "
            "--grpc-host, or with --insecure"
        )
        raise HTTPException(
            HTTPStatus.FORBIDDEN,
            explain("steering: other machines reach this server, and it has no steering key", do=do),
        )


_MUTATES = [Depends(key_holder)]

# Routes that touch files or many numbers are plain functions, so that they run beside the event loop.


@router.get("")
async def state_of_engine(request: Request, front: Front) -> SteeringState:
    """Return the global state and the modules, the gains of the engine, and whether it is frozen."""
    held = await run_in_threadpool(state, front)
    try:
        engine = await ask(request.app.state.engine_client)
    except CapflowError:
        return held
    return held.model_copy(update={"gains": engine.gains, "frozen": engine.frozen})


def state(front: Front) -> SteeringState:
    """Return the global state and the modules."""
    held = front.store.held
    key = key_of(front.fit.program(None, front.store))
    return SteeringState(
        active=key != NOTHING_KEY,
        key=key,
        everywhere=TiersState.of(held.everywhere),
        generation=held.generation,
        off=compat.features_off(),
        **dict(ModulesState.of(held)),
    )


@router.get("/layers")
def layers(front: Front) -> LayersState:
    """Return the sites at which this model can be steered."""
    info = front.info
    hooks: dict[int, list[str]] = {}
    sites = [site for site in info.sites if site not in info.fixed]
    for site in sites:
        hooks.setdefault(site.layer, []).append(site.hook)
    return LayersState(
        layers={layer: LayerState(hook_points=sorted(names)) for layer, names in sorted(hooks.items())},
        sites=[str(site) for site in sites],
        num_layers=info.num_layers,
        hidden_size=info.hidden_size,
        dtype=info.dtype,
    )


@router.post("/set", dependencies=_MUTATES)
def set_state(body: SetBody, front: Front) -> Set:
    """Set the global state, which steers every later request besides its own steering.

    In each tier only the named sites change, unless `replace` is true. A scale or a strength of 0 removes an entry.
    """
    steering = body.steering(front.info)
    with as_written():
        front.store.set_global(steering, replace=body.replace)
    parts = [part for _, part in steering.parts()]
    return Set(
        hook_points=sorted({part.hook for part in parts}),
        layers_updated=sorted({part.layer for part in parts}),
        key=key_of(front.fit.program(None, front.store)),
    )


@router.post("/clear", dependencies=_MUTATES)
def clear_state(front: Front, body: ClearBody | None = None) -> Done:  # noqa: ARG001 - it is only checked
    """Clear the global state, from the next request on."""
    front.store.clear_global()
    return Done()


@router.post("/gain", dependencies=_MUTATES)
async def gain(request: Request, body: GainBody) -> EngineChanged:
    """Multiply what an owner contributes to all running and later requests, from each one's next position on."""
    return await _change(request, Gain("", body.owner, body.scale))


@router.post("/freeze", dependencies=_MUTATES)
async def freeze(request: Request, body: EmptyBody | None = None) -> EngineChanged:  # noqa: ARG001 - it is only checked
    """Take back everything that changes requests beside their own steering, until `unfreeze`."""
    return await _change(request, Freeze())


@router.post("/unfreeze", dependencies=_MUTATES)
async def unfreeze(request: Request, body: EmptyBody | None = None) -> EngineChanged:  # noqa: ARG001 - only checked
    """End `freeze`: modules and the global state contribute again."""
    return await _change(request, Unfreeze())


async def _change(request: Request, action: Gain | Freeze | Unfreeze) -> EngineChanged:
    """Return the engine's answer to an action. Raises HTTPException if a part of the engine does not answer."""
    settings = front_of(request).settings
    try:
        state = await ask(request.app.state.engine_client, action)
        if settings.shared:  # other commands have other replicas
            await run_in_threadpool(act_everywhere, settings, action)
    except UsageError:
        raise
    except CapflowError as e:
        raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, str(e)) from e
    return EngineChanged.of(state)


def act_everywhere(settings: Settings, action: Gain | Freeze | Unfreeze) -> None:
    """Apply an action on all replicas of an engine, through a hub. Raises NotEverywhereError if one lacks it."""
    reason = "no hub answers"
    action = msgspec.structs.replace(action, engine=settings.engine)
    for hub in settings.hubs:
        try:
            with hub.client(_HUB_S) as client:
                outcome = client.act(action)
        except CapflowError as e:
            reason = str(e)
            continue
        if isinstance(outcome, ActionApplied) and not outcome.reason:
            return
        reason = outcome.reason
    do = "the action holds in the replicas of this command; send it again"
    raise NotEverywhereError(explain("steering: not all replicas of the engine", got=reason, do=do))


@router.get("/dynamic")
def dynamic(front: Front) -> dict[str, Any]:
    """Return `determinism`: whether the ranks of the engine steer alike, as a hub knows it; null if none says it."""
    reports = (determinism_at(hub, front.settings.engine) for hub in front.settings.hubs)
    return {"determinism": next((report for report in reports if report is not None), None)}


def determinism_at(hub: HubAt, engine: str) -> dict[str, Any] | None:
    """Return what a hub knows of an engine's ranks; None if it does not answer or does not know."""
    try:
        if not hub.is_listening():
            return None
        with hub.client(_HUB_S) as client:
            report: dict[str, Any] | None = client.status().get("determinism", {}).get(engine)
            return report
    except CapflowError:
        return None


@router.get("/modules")
def modules(front: Front) -> ModulesState:
    """Return the modules that are registered."""
    return ModulesState.of(front.store.held)


@router.get("/modules/{name:path}")
def module(name: str, front: Front) -> TiersState:
    """Return the content of a module."""
    return TiersState.of(front.store.held.module(name, "name"))


@router.post("/modules", dependencies=_MUTATES)
@router.post("/modules/register", dependencies=_MUTATES)
def register_module(body: ModuleBody, front: Front) -> NamedAnswer:
    """Register a module. It replaces a module of its name; requests that run with the old one keep it."""
    steering = body.steering(front.info)
    with as_written():
        front.store.register(body.name, steering)
    return NamedAnswer(name=body.name, modules=list(front.store.names))


@router.delete("/modules", dependencies=_MUTATES)
@router.post("/modules/unregister", dependencies=_MUTATES)
def unregister_module(body: NameBody, front: Front) -> NamedAnswer:
    """Forget a module. Requests that run with it keep it."""
    return _unregistered(front, body.name)


@router.delete("/modules/{name:path}", dependencies=_MUTATES)
def unregister_named_module(name: str, front: Front) -> NamedAnswer:
    """Forget a module. Requests that run with it keep it."""
    return _unregistered(front, name)


def _unregistered(front: Any, name: str) -> NamedAnswer:
    front.store.unregister(name)
    return NamedAnswer(name=name, modules=list(front.store.names))
