"""What `capflow serve` hands to each of its API servers, beside the engine's settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from capflow import limits
from capflow_engine.serve.api_keys import Keys
from capflow_engine.serve.ending import Ending


@dataclass(frozen=True)
class Serving:
    """The options of an API server.

    directory: of the store that the API servers share; None for a single one.
    keys: who may change what steers other requests.
    body_bytes_max: how large the body of a request may be.
    rpc_address: where gRPC is served, HOST:PORT; None for nowhere.
    ending: how the server ends.
    saes: the autoencoders by whose features requests may be steered, each `[NAME=]PATH[@SITE]`. Each API server loads
        them.
    saes_digest: `capflow.saes.named.digest_of` them; empty without any.
    """

    directory: Path | None = None
    keys: Keys = field(default_factory=Keys)
    body_bytes_max: int = limits.BODY_BYTES_DEFAULT
    rpc_address: str | None = None
    ending: Ending = field(default_factory=Ending)
    saes: tuple[str, ...] = ()
    saes_digest: str = ""
