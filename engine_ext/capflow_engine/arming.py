"""Arming: an engine's arguments checked and capflow's put in, and the hub that it brings its frames to."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from capflow.address import check_address, default_address
from capflow.client import Client
from capflow.errors import UsageError, explain
from capflow.keys import peer_key_path
from capflow.launch import HubProcess
from capflow_engine import compat_model
from capflow_engine.settings import Outbound, Settings

_LAUNCH_WAIT_S = 60.0
_NO_HUB_WAIT_S = 0.5


@dataclass(frozen=True)
class Armed:
    """What an engine in this process is started with. hub: the one that was started for its consumers, if any."""

    settings: Settings
    hub: HubProcess | None


def arm(
    kind: type[Any],
    model: str,
    arguments: dict[str, Any],
    *,
    consumers: Sequence[str],
    hub: str | None,
    key: str | None,
    insecure: bool,
    sites: Sequence[str],
    outbound: Outbound,
    bank_bytes: int,
) -> Armed:
    """Return the settings for an engine, with a hub started for its consumers.

    kind: vLLM's class for an engine's arguments, of which `additional_config` is taken out here. hub: the address of one that runs.

    Raises UsageError for wrong arguments and HubUnreachableError when `hub` was named and does not answer.
    """
    for name in ("worker_cls", "scheduler_cls"):
        if name in arguments:
            raise UsageError(explain(name, got=arguments[name], expected="to be left out; capflow brings its own"))
    if consumers and hub is not None:
        raise UsageError(explain("LLM: both hub and consumers", do="give consumers to the hub with `capflow run`"))
    user: Mapping[str, Any] = arguments.pop("additional_config", None) or {}
    tapped = compat_model.check_model(kind(model=model, **arguments), sites)
    process = None
    if consumers:
        process = HubProcess(consumers)
        process.start(_LAUNCH_WAIT_S)
    elif hub is not None:
        with Client(hub, key=key, insecure=insecure):  # raises when nobody answers
            pass
    address = process.address if process is not None else hub or default_address()
    check_address(address, insecure=insecure, where="hub")
    path = peer_key_path(address, key)
    settings = Settings(
        engine=uuid.uuid4().hex,
        hub=address,
        key=None if path is None else str(path),
        insecure=insecure,
        sites=tapped.sites,
        fixed=tapped.fixed,
        outbound=outbound,
        steering_bank_bytes=bank_bytes,
        hub_wait_s=_LAUNCH_WAIT_S if consumers or hub is not None else _NO_HUB_WAIT_S,
        user=dict(user),
    )
    return Armed(settings, process)
