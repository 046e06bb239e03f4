"""Stores against a model: whatever fails and whoever is killed in which order, every promised row is there once."""

from __future__ import annotations

import contextlib
import random
import resource
import shutil
from collections import Counter
from pathlib import Path

import duckdb
import numpy as np
import pytest
from frames import row_of, token_of
from storemodel import MODELS, SITES, Lane, check, script
from test_duckdb import Clock, Counts

from capflow.errors import CapflowError
from capflow.site import Site
from capflow_consumers.duckdb import DuckdbConfig, DuckdbConsumer

TOKEN = Site(-1, "token")
"""Where tokens stand among the rows."""


@contextlib.contextmanager
def files_that_do_not_grow():
    """Have every write behind the first 100 bytes of a file fail, in this process."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class DuckdbStore:
    """The duckdb consumer, which writes the rows of the first site and all tokens, in transactions of some rows."""

    def __init__(self, root: Path, chance: random.Random) -> None:
        self.path = root / "0.duckdb"
        self._chance = chance
        self._clock = Clock()
        self._refusing = False

    def open(self):
        rows = self._chance.choice([2, 12, 1000])
        consumer = DuckdbConsumer(
            DuckdbConfig(str(self.path), batch_rows=rows, vectors=True, site=str(SITES[0])), self._clock
        )
        consumer.open(Counts())
        return self._guarded(consumer)

    def _guarded(self, consumer):
        append = consumer._database.append

        def guarded(tables):
            with files_that_do_not_grow() if self._refusing else contextlib.nullcontext():
                append(tables)

        consumer._database.append = guarded
        return consumer

    def reopen(self, consumer):
        with contextlib.suppress(CapflowError):
            consumer.close()
        consumer.open(Counts())
        self._guarded(consumer)

    def kill(self, consumer):
        """Leave what is on the disk now, without what the consumer would write at its end."""
        killed, self.path = self.path, self.path.with_name(f"{int(self.path.stem) + 1}.duckdb")
        for suffix in ("", ".wal"):
            if Path(f"{killed}{suffix}").exists():
                shutil.copy(f"{killed}{suffix}", f"{self.path}{suffix}")
        consumer._port.close()
        consumer._database._connection.close()

    def refuse(self, *, refusing):
        self._refusing = refusing
        self._clock.now += 1.0

    @staticmethod
    def stored(rows):
        """Return what there is of a request's rows in this store: those of the first site, and its tokens."""
        return Counter(
            {place: n for place, n in rows.items() if place[2] == SITES[0]}
            | {(*place[:2], TOKEN, place[3]): n for place, n in rows.items() if place[2] == SITES[0]}
        )

    def rows(self):
        with duckdb.connect(str(self.path), read_only=True) as connection:
            vectors = connection.execute(
                "SELECT engine, request_id, layer, hook, position, vector FROM vectors"
            ).fetchall()
            tokens = connection.execute("SELECT engine, request_id, position, token_id FROM tokens").fetchall()
        for engine, request, layer, hook, position, vector in vectors:
            model = MODELS[engine]
            row = row_of(request, Site(layer, hook), position, model.hidden_size, model.dtype)
            np.testing.assert_array_equal(vector, row.astype(np.float32))
        for _, request, position, token in tokens:
            assert token == token_of(request, position)
        return Counter((e, r, Site(layer, hook), p) for e, r, layer, hook, p, _ in vectors) + Counter(
            (engine, request, TOKEN, position) for engine, request, position, _ in tokens
        )


def run(store, chance, *, requests=8, **rates):
    records, expected = script(chance, requests)
    lane = Lane(records, store, chance)
    lane.run(**rates)
    check(lane.done, {number: store.stored(rows) for number, rows in expected.items()}, store.rows())
    assert {result.status for result in lane.done.values()} == {"ok"}, lane.done
    return lane


@pytest.mark.parametrize("seed", range(12))
def test_duckdb_has_every_promised_row_once(tmp_path, seed):
    run(DuckdbStore(tmp_path, random.Random(seed)), random.Random(seed))


def test_the_model_refuses_and_kills(tmp_path):
    """Or else the tests above would show nothing."""
    lanes = []
    for seed in range(4):
        root = tmp_path / str(seed)
        root.mkdir()
        lanes.append(run(DuckdbStore(root, random.Random(seed)), random.Random(seed)))
    assert sum(lane.refused for lane in lanes) > 5
    assert sum(lane.kills for lane in lanes) > 2
