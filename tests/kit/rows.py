"""Captured rows held against Transformers' and against what was promised."""

import contextlib
import time

import numpy as np

from capflow.capture.result import CaptureResult
from capflow.capture.site import Site
from capflow.plugins.consumer import Consumer
from tests.kit.engines import LAYERS, relative_error, vector
from tests.kit.hubs import running_hub

FLOAT32_BOUND = 1e-5
SITES = [Site(layer, "post_block") for layer in range(LAYERS)]
ALL = {"hooks": {"post_block": "all"}, "positions": "all"}


def check_rows(request, tokens, reference, steering=None, positions=None, bound=FLOAT32_BOUND):
    """Hold a request's files against the reference: these positions of these tokens, each once, at every site.

    steering: `{layer: seed}`, added at every position. positions: by default all but the last, which is never an input.
    """
    request.verify()
    assert sorted(request.sites) == SITES
    rows = {site: (request[site].positions, request[site].token_ids, request[site].rows) for site in SITES}
    _hold(rows, tokens, reference, steering, positions, bound)


def _hold(rows, tokens, reference, steering, positions, bound):
    positions = list(range(len(tokens) - 1)) if positions is None else positions
    added = {int(layer): (vector(seed), 0) for layer, seed in (steering or {}).items()}
    expected = reference.post_block(tokens, added)
    for site, (at, ids, got) in rows.items():
        assert list(at) == positions, site
        assert list(ids) == [tokens[p] for p in positions], site
        error = relative_error(np.asarray(got), expected[site.layer, positions])
        assert error < bound, (site, error)


class Keeper(Consumer):
    """Keeps every captured row with its request and its worker; a row that comes twice is an error."""

    name = "keeper"
    reads_requests = True

    def __init__(self):
        super().__init__(None)
        # Request → site → position → (token id, row).
        self.rows = {}
        # Request → site → the ranks that sent it.
        self.ranks = {}
        self.done = {}
        self.twice = []
        self.late = []
        # Request → position → whether it was steered.
        self.steered = {}
        # The events, in order.
        self.events = []

    def on_action(self, answered):
        self.events.append(answered)
        # The answer to a client's action comes by another way than the rows.
        if answered.request in self.done and not answered.asked_by.startswith("client"):
            self.late.append(answered.request)

    def events_of(self, name):
        """Return the events of a request, in order."""
        return [event for event in self.events if event.request == name]

    def on_frame(self, frame):
        for chunk in frame.chunks():
            name = chunk.request.id
            steered = self.steered.setdefault(name, {})
            for position, one in enumerate(chunk.steered.tolist(), chunk.start):
                assert steered.setdefault(position, one) == one
            if name in self.done:
                self.late.append(name)
            for number, site in enumerate(chunk.sites):
                kept = self.rows.setdefault(name, {}).setdefault(site, {})
                self.ranks.setdefault(name, {}).setdefault(site, set()).add(frame.header.rank)
                for offset, token in enumerate(chunk.token_ids):
                    position = chunk.start + offset
                    if position in kept:
                        self.twice.append((name, site, position))
                    kept[position] = token, np.array(chunk.rows[number, offset])

    def on_request_done(self, done):
        self.done[done.request] = done
        return CaptureResult("ok")

    def hold(self, name, tokens, reference, steering=None, positions=None, sites=SITES):
        """Hold a request's rows against the reference, as `check_rows` does with files."""
        assert not self.twice
        assert not self.late
        assert sorted(self.rows[name]) == sorted(sites)
        rows = {
            site: (sorted(kept), [kept[p][0] for p in sorted(kept)], [kept[p][1] for p in sorted(kept)])
            for site, kept in self.rows[name].items()
        }
        _hold(rows, tokens, reference, steering, positions, FLOAT32_BOUND)


class SlowKeeper(Keeper):
    """Takes a third of a second for each frame, and so has its workers wait."""

    def on_frame(self, frame):
        # The slowness itself.
        time.sleep(0.3)
        super().on_frame(frame)


@contextlib.contextmanager
def kept(keeper, tmp_path_factory):
    """Yield a keeper on a hub of this process, its address in `keeper.address`."""
    keeper.address = f"ipc://{tmp_path_factory.mktemp('h')}/h"
    with running_hub(keeper.address, keeper):
        yield keeper
