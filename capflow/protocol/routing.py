"""Shards: which of an engine's hubs has a request.

With several hubs each request belongs to one of them, whole: its rows, its end, its results. Which one follows from its id and the
number of hubs alone, so that every process of an engine, and anybody else, finds the same. The hash is rendezvous hashing
(Thaler and Ravishankar, 1998): one hub more takes its part of the requests from all others and moves no other request.
"""

from __future__ import annotations

import xxhash


def hub_of(request: str, hubs: int) -> int:
    """Return the number of the hub, of `hubs`, that has a request: the one whose number, as the seed, gives its id the largest XXH3.

    request: the id that a client knows it by. The hash is the 64-bit one, of the id's UTF-8; the lower number wins a
        tie.
    """
    if hubs == 1:
        return 0
    key = request.encode("utf-8", "surrogatepass")
    return max(range(hubs), key=lambda hub: xxhash.xxh3_64_intdigest(key, seed=hub))
