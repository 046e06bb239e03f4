"""Shards: which of an engine's hubs has a request.

With several hubs each request belongs to one of them: its rows, its end and its results. The hub follows from the
request's id and the number of hubs alone, so every process finds the same one. The hash is rendezvous hashing (Thaler
and Ravishankar, 1998): an additional hub takes its part of the requests from all others, and no other request moves.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash


def hub_of(request: str, hubs: int) -> int:
    """Return the number of the hub that has a request, from 0.

    It is the hub whose number, as the seed, gives the id the largest 64-bit XXH3 of its UTF-8; the lowest of equals.

    request: the id by which a client knows the request.
    hubs: the number of hubs.
    """
    return 0 if hubs == 1 else hub_among(request, range(hubs))


def hub_among(request: str, numbers: Iterable[int]) -> int:
    """As `hub_of`, of the hubs of these numbers, in ascending order."""
    key = request.encode("utf-8", "surrogatepass")
    return max(numbers, key=lambda hub: xxhash.xxh3_64_intdigest(key, seed=hub))
