"""Steering keys: who may change what steers other requests.

A key comes as `Authorization: Bearer KEY` or as `X-API-Key: KEY`. Any of several keys opens, so that a new key can be
in use before the old one is removed.
Invariant: the time of a comparison does not depend on the key.
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
    """The keys of a server.

    secrets: any of them opens.
    open: without keys, whether changes are open to everyone or to nobody.
    """

    secrets: tuple[str, ...] = field(default=(), repr=False)
    open: bool = False

    def admit(self, headers: Mapping[str, str]) -> bool:
        """Return whether a request with these headers brings one of the keys. The mapping ignores the case of names."""
        given = [headers.get("X-API-Key") or ""]
        scheme, _, token = (headers.get("Authorization") or "").partition(" ")
        if scheme.lower() == "bearer":
            given.append(token.strip())
        admitted = False
        for one in given:
            for secret in self.secrets:  # all of them: the time must not tell which one fits
                admitted |= hmac.compare_digest(_hashed(one), _hashed(secret))
        return admitted


def keys_of(flags: Sequence[str], variable: str | None) -> tuple[str, ...]:
    """Return the keys of flags and of the environment's variable, without empty ones."""
    return tuple(dict.fromkeys(key for given in (*flags, *(variable or "").split(",")) if (key := given.strip())))


def is_loopback(host: str | None) -> bool:
    """Return whether a server on this host is reached only from its own machine. None: it listens on every address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False


def _hashed(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
