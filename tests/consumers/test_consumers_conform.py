"""The consumers that come with capflow keep the rules of `capflow.testing` for every consumer."""

from pathlib import Path

import pytest

import capflow
from capflow.capture.result import RequestDone
from capflow.protocol import recording
from capflow.testing import conformance, make_model
from capflow_consumers.duckdb.consumer import DuckdbConsumer
from capflow_consumers.filesystem.consumer import FilesystemConsumer
from capflow_consumers.log import LogConsumer
from capflow_consumers.record import RecordConsumer
from capflow_dashboard.consumer import Dashboard


def files():
    """Return every row that the filesystem consumer keeps, by request."""
    return {
        capture.id: {str(site): [part.tolist() for part in capture[site]] for site in capture.sites}
        for capture in capflow.open("rows")
    }


def scored():
    """Return the tokens of each request in the database."""
    import duckdb

    with duckdb.connect("scores.duckdb", read_only=True) as database:
        sql = "SELECT request_id, list((position, token_id) ORDER BY position) FROM tokens GROUP BY 1"
        return dict(database.sql(sql).fetchall())


def recorded():
    """Return how often the end of each request was recorded."""
    events = recording.read(Path("rec"))
    ends = [event.request for event in events if isinstance(event, RequestDone)]
    return {request: ends.count(request) for request in ends}


SHAPED = make_model(2, hooks=("post_block",), shapes={"heads": (2, 6), "router": (5,)})

TestFilesystem = conformance(FilesystemConsumer, {"root": "rows"}, kept=files)
TestFilesystemOfRequests = pytest.mark.long(
    conformance(FilesystemConsumer, {"root": "rows", "capture": "requests", "policy": "block"}, kept=files)
)
TestFilesystemPerFile = conformance(
    FilesystemConsumer, {"root": "rows", "layout": "per_file", "capture": "requests"}, kept=files, model=SHAPED
)
TestFilesystemSharded = conformance(
    FilesystemConsumer, {"root": "rows", "layout": "sharded", "capture": "requests"}, kept=files, model=SHAPED
)
TestDuckdb = conformance(DuckdbConsumer, {"path": "scores.duckdb", "site": "heads:1"}, kept=scored, model=SHAPED)
TestLog = conformance(LogConsumer)
TestRecord = conformance(RecordConsumer, {"path": "rec"}, kept=recorded)
TestDashboard = conformance(Dashboard, {"port": "0"}, model=SHAPED)
