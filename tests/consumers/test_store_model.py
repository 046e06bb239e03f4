"""Stores against a model: after any order of failures and kills, every promised row is there once."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import shutil
from collections import Counter
from pathlib import Path

import duckdb
import numpy as np
import pytest

import capflow
from capflow import limits
from capflow.capture.frame import Frame
from capflow.capture.site import Site
from capflow.errors import CapflowError, FatalError
from capflow.protocol import recording
from capflow_consumers.duckdb.consumer import DuckdbConfig, DuckdbConsumer
from capflow_consumers.filesystem.consumer import FilesystemConfig, FilesystemConsumer
from capflow_consumers.record import RecordConfig, RecordConsumer
from tests.kit import storemodel
from tests.kit.databases import Clock, Counts
from tests.kit.frames import row_of, token_of
from tests.kit.storemodel import MODELS, SITES, Lane, check, script

TOKEN = Site(-1, "token")
"""Where tokens stand among the rows."""


@contextlib.contextmanager
def files_that_do_not_grow():
    """Have every write after the first 100 bytes of a file fail, in this process."""
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

        def guarded(*args):
            with files_that_do_not_grow() if self._refusing else contextlib.nullcontext():
                append(*args)
            if self._chance.random() < 0.05:
                raise FatalError("nobody knows whether that was committed; it was")

        consumer._database.append = guarded
        return consumer

    def reopen(self, consumer):
        with contextlib.suppress(CapflowError):
            consumer.close()
        consumer.open(Counts())
        self._guarded(consumer)

    def kill(self, consumer):
        """Keep the disk as it is now, without what the consumer would write at its end."""
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
        """Return the rows that this store keeps: those of the first site, and the tokens."""
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


class FilesystemStore:
    """The filesystem consumer with a layout. While the disk refuses, a write of any file does not get through."""

    def __init__(self, root: Path, chance: random.Random, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root / "0"
        self._chance = chance
        self._layout = layout
        self._refusing = False
        write = os.pwritev

        def pwritev(*args):
            if self._refusing:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(*args)

        monkeypatch.setattr(os, "pwritev", pwritev)

    def open(self):
        options = {"tail_s": 0.001} if self._layout == "per_file" else {}
        if self._layout == "sharded":
            options["shard_bytes"] = limits.MIB
        buffer = self._chance.choice([0, 500, limits.MIB])
        config = FilesystemConfig(
            str(self.root), layout=self._layout, on_collision="suffix", fsync=False, buffer_bytes_max=buffer, **options
        )
        consumer = FilesystemConsumer(config)
        consumer.open(Counts())
        return consumer

    def reopen(self, consumer):
        with contextlib.suppress(CapflowError):
            consumer.close()
        consumer.open(Counts())

    def kill(self, consumer):
        """Keep the disk as it is now, in another place, without what the consumer would write at its end."""
        killed, self.root = self.root, self.root.with_name(str(int(self.root.name) + 1))
        shutil.copytree(killed, self.root)
        consumer.close()

    def refuse(self, *, refusing):
        self._refusing = refusing

    @staticmethod
    def stored(rows):
        """Return the rows that this store keeps: all of them."""
        return rows

    def rows(self):
        counts: Counter[storemodel.Place] = Counter()
        for capture in capflow.open(self.root):
            sidecar = capture.sidecar
            model = MODELS[sidecar.engine]
            for site in capture.sites:
                rows, positions, tokens = capture[site]
                for row, position, token in zip(rows, positions.tolist(), tokens.tolist(), strict=True):
                    expected = row_of(sidecar.request, site, position, model.hidden_size, model.dtype)
                    np.testing.assert_array_equal(row, expected)
                    assert token == token_of(sidecar.request, position)
                    counts[sidecar.engine, sidecar.request, site, position] += 1
        return counts


class RecordStore:
    """The record consumer, whose spool's disk is one in memory; it is killed with whatever that has."""

    def __init__(self, root: Path) -> None:
        self.root = root / "0"

    def open(self):
        consumer = RecordConsumer(RecordConfig(str(self.root)))
        consumer.open(Counts())
        return consumer

    def reopen(self, consumer):
        raise AssertionError("nothing of it is fatal")

    def kill(self, consumer):
        killed, self.root = self.root, self.root.with_name(str(int(self.root.name) + 1))
        shutil.copytree(killed, self.root)
        consumer.close()

    def refuse(self, *, refusing):
        """Its disk works here; `test_recording` has one that does not."""

    @staticmethod
    def stored(rows):
        """Return the rows that this store keeps: all of them."""
        return rows

    def rows(self):
        counts: Counter[storemodel.Place] = Counter()
        for event in recording.read(self.root):
            if isinstance(event, Frame):
                for chunk in event.chunks():
                    for site in chunk.sites:
                        counts.update(
                            (event.header.engine, chunk.request.id, site, chunk.start + at)
                            for at in range(chunk.rows.shape[1])
                        )
        return counts


def run(store, chance, *, requests=8, **rates):
    records, expected = script(chance, requests)
    lane = Lane(records, store, chance)
    lane.run(**rates)
    check(lane.done, {number: store.stored(rows) for number, rows in expected.items()}, store.rows())
    assert {result.status for result in lane.done.values()} == {"ok"}, lane.done
    return lane


# `test_the_model_refuses_and_kills` has the first seeds.
@pytest.mark.parametrize("seed", [4, 5, 6, 7, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(8, 12))])
def test_duckdb_has_every_promised_row_once(tmp_path, seed):
    run(DuckdbStore(tmp_path, random.Random(seed)), random.Random(seed))


@pytest.mark.parametrize("failing", [0, 0.2])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("layout", ["packed", "per_file", "sharded"])
def test_a_data_set_has_every_promised_row_once(tmp_path, monkeypatch, layout, seed, failing):
    store = FilesystemStore(tmp_path, random.Random(seed), layout, monkeypatch)
    run(store, random.Random(seed), failing=failing, deadly=0.08)


@pytest.mark.parametrize("seed", range(4))
def test_a_recording_has_every_frame_once(tmp_path, seed):
    run(RecordStore(tmp_path), random.Random(seed), deadly=0.08)


def test_the_model_refuses_and_kills(tmp_path):
    """The model refuses and kills; otherwise the tests above would show nothing."""
    lanes = []
    for seed in range(4):
        root = tmp_path / str(seed)
        root.mkdir()
        lanes.append(run(DuckdbStore(root, random.Random(seed)), random.Random(seed)))
    assert sum(lane.refused for lane in lanes) > 5
    assert sum(lane.kills for lane in lanes) > 2
    assert sum(lane.fatal for lane in lanes) > 2
