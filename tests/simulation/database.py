"""The duckdb consumer itself, on a database in memory that outlives hubs and keeps what was committed."""

from __future__ import annotations

import contextlib

import duckdb
import numpy as np

import capflow_consumers.duckdb.database
import capflow_consumers.duckdb.port
from capflow.capture.site import Site
from capflow.errors import CapflowError
from capflow_consumers.duckdb.consumer import DuckdbConfig, DuckdbConsumer
from tests.simulation.oracle import rows_of

SITE = Site(0, "post_block")
_CHANGES = ("INSERT", "COMMIT", "CHECKPOINT")


class Base:
    """A database file. broken: whether its disk is full for now."""

    def __init__(self, world):
        self.world = world
        self.broken = False
        self.connection = duckdb.connect(":memory:", config={"threads": "1"})

    def consumer(self, path, *, batch_rows):
        """Return the consumer that writes it."""
        config = DuckdbConfig(
            str(path / "scores.duckdb"), site=str(SITE), vectors=True, batch_rows=batch_rows, flush_s=0.05
        )
        return DuckdbConsumer(config, lambda: self.world.now)

    def connect(self, *_, **__):
        """Open it; what a process that was killed had not committed is gone."""
        with contextlib.suppress(duckdb.Error):
            self.connection.execute("ROLLBACK")
        return _Connection(self)

    def check(self, oracle):
        """Give the oracle the rows of honest engines that are in the database."""
        rows = self.connection.execute(
            "SELECT engine, request_id, position, layer, hook, vector FROM vectors"
        ).fetchall()
        for engine, request, position, layer, hook, vector in rows:
            site = Site(layer, hook)
            oracle.took["duckdb", 0][engine, request].rows[site, position] += 1
            if (engine, request) in oracle.sent:
                expected = rows_of(engine, request, site, position, 1, len(vector))[0]
                if not np.array_equal(np.array(vector, np.float32), expected):
                    oracle.fail(f"duckdb: wrong row of {engine}/{request} at {site} {position}")

    @contextlib.contextmanager
    def installed(self):
        """Make the consumer open this database, without a port."""
        database, port = capflow_consumers.duckdb.database, capflow_consumers.duckdb.port
        old = database.duckdb, database._identity, port.SqlPort
        database.duckdb = _Duckdb(self)
        database._identity = lambda _: (0, 0)
        port.SqlPort = _NoPort
        try:
            yield
        finally:
            database.duckdb, database._identity, port.SqlPort = old
            self.connection.close()


class _Duckdb:
    def __init__(self, base):
        self.connect, self.Error = base.connect, duckdb.Error


class _NoPort:
    def __init__(self, *_):
        pass

    def open(self):
        raise CapflowError("a simulation has no sockets")


class _Connection:
    """What the consumer has of a connection."""

    def __init__(self, base):
        self._base, self._connection = base, base.connection

    def execute(self, sql, *values):
        self._base.world.point("sql")
        if self._base.broken and sql.startswith(_CHANGES):
            raise duckdb.IOException("Could not write file: No space left on device")
        return self._connection.execute(sql, *values)

    def __getattr__(self, name):
        return getattr(self._connection, name)

    def cursor(self):
        return self

    def close(self):
        pass
