"""Arming: checks an engine's arguments, adds capflow's, and starts the hub for its consumers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from capflow.errors import UsageError, explain
from capflow.saes.sae import Sae
from capflow.text.engine_name import new_engine
from capflow.transport.hub_process import HubProcess
from capflow_engine.compat import model as compat_model
from capflow_engine.compat.launch import Launch
from capflow_engine.hubs import hubs_at
from capflow_engine.settings import Outbound, Settings, check_on_divergence
from capflow_engine.steering.saes import load_for

_LAUNCH_WAIT_S = 60.0
_NO_HUB_WAIT_S = 0.5


@dataclass(frozen=True)
class Armed:
    """What an engine in this process is started with.

    settings: the engine's.
    saes: the autoencoders by whose features requests may be steered, by name.
    hub: the hub that was started for its consumers, if any.
    """

    settings: Settings
    saes: Mapping[str, Sae]
    hub: HubProcess | None


def arm(
    kind: type[Any],
    model: str,
    arguments: dict[str, Any],
    *,
    consumers: Sequence[str],
    hub: str | Sequence[str] | None,
    spare_hubs: Sequence[str],
    key: str | None,
    insecure: bool,
    sites: Sequence[str],
    steer_sites: Sequence[str] | None,
    outbound: Outbound,
    bank_bytes: int,
    engine_name: str | None,
    engine_id: str | None,
    on_divergence: str,
    saes: Sequence[str],
) -> Armed:
    """Return the settings of an engine. Starts a hub for its consumers, if there are any.

    kind: vLLM's class for an engine's arguments.
    arguments: those of `kind`; `additional_config` is taken out.
    hub: the address of a running hub, or of several.
    spare_hubs: the addresses of hubs that may start later.
    engine_name: the engine's name; None for a random one.
    engine_id: what all processes of the engine are given; None for a random id.
    saes: the autoencoders by whose features requests may be steered, each `[NAME=]PATH[@SITE]`.

    Raises UsageError for wrong arguments, HubUnreachableError if a named hub does not answer.
    """
    for name in ("worker_cls", "scheduler_cls"):
        if name in arguments:
            raise UsageError(explain(name, got=arguments[name], expected="to be left out; capflow brings its own"))
    check_on_divergence(on_divergence)
    engine = new_engine(engine_name, engine_id)
    if spare_hubs and hub is None:
        raise UsageError(explain("LLM: spare_hubs without hub", do="name the hubs that run now with hub="))
    if consumers and hub is not None:
        raise UsageError(explain("LLM: both hub and consumers", do="give consumers to the hub with `capflow run`"))
    user: Mapping[str, Any] = arguments.pop("additional_config", None) or {}
    with compat_model.explaining(model):
        engine_args = kind(model=model, additional_config=dict(user), **arguments)
    named = [hub] if isinstance(hub, str) else list(hub or ())
    hubs = hubs_at(named, key, spares=spare_hubs, insecure=insecure)
    launched = Launch.of(engine_args)
    if not consumers:
        launched.check(hubs, engine_id, hub_from="hub", id_from="engine_id")
    elif launched.several or launched.on_ray or engine_id is not None:
        got = "an engine of several commands, each with a hub of its own, or of workers on other machines"
        do = "start a hub with `capflow run`, and name it with hub"
        raise UsageError(explain("consumers", got=got, expected="one hub, which every process reaches", do=do))
    process = HubProcess(consumers) if consumers else None
    with contextlib.ExitStack() as undo:
        if process is not None:
            process.begin()  # it starts beside the reading of the model
            undo.callback(process.stop)
        tapped = compat_model.check_model(engine_args, sites, steer_sites)
        loaded = load_for(saes, functools.partial(compat_model.info_of, engine_args, tapped), "saes")
        if process is not None:
            process.wait(_LAUNCH_WAIT_S)
            hubs = hubs_at([process.address], key, insecure=insecure)
        undo.pop_all()
    for one in hubs[: len(named)]:
        with one.client():  # raises if the hub does not answer
            pass
    settings = Settings(
        engine=engine,
        hubs=hubs,
        spares=len(spare_hubs),
        **tapped.settings,
        outbound=outbound,
        steering_bank_bytes=bank_bytes,
        on_divergence=on_divergence,
        shared=engine_id is not None,
        hub_wait_s=_LAUNCH_WAIT_S if consumers or hub is not None else _NO_HUB_WAIT_S,
        user=dict(user),
    )
    return Armed(settings, loaded, process)
