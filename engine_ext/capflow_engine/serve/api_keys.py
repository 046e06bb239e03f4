"""Keys: who may change what a server steers by.

A key comes as `Authorization: Bearer KEY` or as `X-API-Key: KEY`; of several, any opens, so that one can be taken out of use while
another is already in. How long a comparison takes tells nothing of a key.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

ENVIRONMENT_VARIABLE = "CAPFLOW_STEERING_API_KEY"


@dataclass(frozen=True)
class Keys:
    """Which keys there are. Without any, changes are open to everyone when `open` says so, and else to nobody."""

    secrets: tuple[str, ...] = field(default=(), repr=False)
    open: bool = False

    def admit(self, headers: Mapping[str, str]) -> bool:
        """Return whether a request with these headers brings one of the keys. Header names are looked up as they are here."""
        given = [headers.get("X-API-Key") or ""]
        scheme, _, token = (headers.get("Authorization") or "").partition(" ")
        if scheme.lower() == "bearer":
            given.append(token.strip())
        admitted = False
        for one in given:
            for secret in self.secrets:  # all of them, whichever fits
                admitted |= hmac.compare_digest(_hashed(one), _hashed(secret))
        return admitted


def keys_of(flags: Sequence[str], variable: str | None) -> tuple[str, ...]:
    """Return the keys that flags and the environment's variable name; empty ones are none."""
    return tuple(dict.fromkeys(key for given in (*flags, *(variable or "").split(",")) if (key := given.strip())))


def is_loopback(host: str | None) -> bool:
    """Return whether a server that listens on this host is reached from its own machine alone. None: on every address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False


def _hashed(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
