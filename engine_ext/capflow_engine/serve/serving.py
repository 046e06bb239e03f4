"""What `capflow serve` tells each of its API servers, beside what the engine knows."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from capflow import limits
from capflow_engine.serve.api_keys import Keys
from capflow_engine.serve.ending import Ending


@dataclass(frozen=True)
class Serving:
    """directory: of the store that the API servers share; None for one alone. keys: who may change what steers others.

    body_bytes_max: how large the body of a request may be. rpc_address: where gRPC is served, HOST:PORT; None for nowhere.
    ending: how each of them ends.
    """

    directory: Path | None = None
    keys: Keys = field(default_factory=Keys)
    body_bytes_max: int = limits.BODY_BYTES_DEFAULT
    rpc_address: str | None = None
    ending: Ending = field(default_factory=Ending)
