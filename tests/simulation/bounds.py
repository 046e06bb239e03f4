"""The bounds of a hub that its peers share, checked each time one takes something of them."""

from __future__ import annotations

import contextlib
from unittest import mock

from capflow.buffers.shares import Shares


@contextlib.contextmanager
def checked(oracle, owners_max):
    """Make every `Shares` report to the oracle: owners that together exceed the total, or one denied its own part."""
    offer = Shares.offer

    def offered(shares, owner, amount):
        own = shares.held(owner) + amount <= shares.total // 2 // owners_max
        new = not shares.held(owner) and shares.owners >= owners_max
        fits = offer(shares, owner, amount)
        if fits and shares.used > shares.total:
            oracle.fail(f"{shares.label}: {shares.used} are taken, {shares.total} is the bound")
        if not fits and own and not new:
            oracle.fail(f"{shares.label}: {owner} has {shares.held(owner)}, and is refused {amount} of its own part")
        return fits

    with (
        mock.patch.dict(Shares.__init__.__kwdefaults__, owners_max=owners_max),
        mock.patch.object(Shares, "offer", offered),
    ):
        yield
