"""The metrics: a real scrape of a real hub against the counters, the table in the docs and the dashboard."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from capflow import limits
from capflow.capture.frame import Dropped, Rank
from capflow.hub.hub import Hub
from capflow.hub.monitor.endpoint import Endpoint
from capflow.hub.monitor.metrics import BEGIN, END, markdown, registry_of
from capflow.protocol import message
from capflow.protocol.message import ControllerCounts, CpuTime, Determinism, Hello, WatchRequest
from capflow.transport.client import Client
from capflow.transport.links.worker import Staged
from capflow.transport.outbox import Outbox
from tests.kit.frames import make_finished, make_frame, make_hello
from tests.kit.hubs import Recorder, address, answer, configured, raw_peer, running_hub, worker_link
from tests.kit.sources import ROOT
from tests.kit.waiting import eventually

__all__ = ["address"]

SECRET = "patient-4711"  # a request's id
DASHBOARD = json.loads((ROOT / "docs" / "grafana.json").read_text(encoding="utf-8"))
ADDED = {"instance", "job"}  # labels that Prometheus adds


def send(link, *args, **kwargs):
    frame = make_frame(*args, **kwargs)
    assert link.send(frame.header, frame.payload) is None


def scrape(url, accept=""):
    request = urllib.request.Request(f"{url}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.read().decode()


def read(text):
    """Return the samples of a scrape: by name and labels, and the families by their sample's name."""
    samples, families = {}, {}
    for family in text_string_to_metric_families(text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        families[name] = family
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in samples, "a series comes once"
            samples[key] = sample.value
    return samples, families


def value(samples, name, /, **labels):
    return samples[f"capflow_{name}", tuple(sorted(labels.items()))]


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """The scrape of a hub in which every counted event happened, and the answers of its two workers."""
    path = tmp_path_factory.mktemp("h") / "h"
    good = Recorder("good")
    full, bad = Recorder("full", held=True), Recorder("bad", fails_on=[SECRET, "r1", "r2"])
    ran = {"gate": ControllerCounts(9, 0.5, 3, 2, 1)}
    cpu = {"worker": CpuTime(900_000, 10), "sender": CpuTime(5_000_000)}
    lost = {"queue_full": 7, "no_hub": 2}
    staged = Staged(1000, 5000, lost, controllers=ran, determinism=Determinism(True, 4, 9), cpu=cpu)
    kept = configured(Recorder("kept"), "spill", spool_dir=path.parent / "inbox")
    consumers = [good, configured(full, "drop", 1), bad, kept]
    with running_hub(f"ipc://{path}", *consumers) as hub:
        endpoint = Endpoint(hub, "127.0.0.1", 0)
        endpoint.start()
        other = make_hello("engine-2", rank=Rank(0, 1, 0), boot="b2")
        spills = {"policy": "spill", "outbox": Outbox.of(path.parent / "spool", other, limits.MIB)}
        with (
            worker_link(hub.address, staged=lambda: staged) as first,
            worker_link(hub.address, other, **spills) as second,
            raw_peer(hub.address) as tap,
        ):
            tap.send(message.encode(Hello("client", "", "tap")))
            tap.send(message.encode(WatchRequest(600)))  # room for a frame or two
            eventually(lambda: hub.watchers)
            for step in range(3):
                send(first, [(SECRET, 4, step * 4, 4)], step=step)
            eventually(full.waiting.is_set)
            lost = (Dropped(5, "queue_full"), Dropped(1, "too_large"))
            send(first, finished=[make_finished(SECRET, 4, 12, dropped=lost)])
            send(second, [("r2", 2, 0, 2)], engine="engine-2", boot="b2", rank=Rank(0, 1, 0))
            good.context.count("seen", 3)
            with raw_peer(hub.address) as peer:
                peer.send(b"nonsense")
                assert peer.poll(20_000)
            eventually(lambda: hub.index.requests_done == 1 and hub.counts.frames == 5)
            eventually(lambda: len(hub.lanes[2].results) == 1)
            eventually(
                lambda: (
                    sum(
                        entry.source is not None and entry.source.reported is not None
                        for entry in list(hub.roster.peers.values())
                    )
                    == 2
                )
            )
            eventually(
                lambda: (
                    value(
                        read(scrape(endpoint.url))[0], "worker_sent_frames_total", engine="engine-1", rank="pp0-dp0-tp0"
                    )
                    == 4
                )
            )
            eventually(lambda: hub.lanes[2].frames == 5)
            with Client(hub.address) as client:
                status = client.status()
                text = scrape(endpoint.url)
            yield text, status, endpoint.url
        endpoint.stop()


@pytest.fixture(scope="module")
def status(watched):
    return watched[1]


@pytest.fixture(scope="module")
def samples(watched):
    return read(watched[0])[0]


def test_taps_are_counted(samples, status):
    (tap,) = status["taps"]
    assert tap["frames"] >= 1
    assert tap["skipped_frames"] >= 1
    assert value(samples, "taps") == 1
    for name in ("frames", "bytes", "skipped_frames"):
        assert value(samples, f"tap_{name}_total") == tap[name]


def table():
    """Return the table in the docs: by name, its other columns."""
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `((?:capflow|process)_\w+)` \| (\w+) \| (.*?) ?\| (.*?) ?\| (.*) \|$", text, re.MULTILINE)
    result = {name: (kind, set(re.findall(r"`(\w+)`", labels)), unit, line) for name, kind, labels, unit, line in rows}
    assert len(result) == len(rows), "a metric is there once"
    return result


def test_the_table_in_the_docs_is_the_one_of_the_code():
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    written = text.partition(BEGIN)[2].partition(END)[0].strip()
    assert written == markdown().strip(), "run: python -m capflow.hub.monitor.metrics docs/operations.md"


def test_the_table_names_every_metric_and_no_other(watched):
    _, families = read(watched[0])
    assert set(families) == set(table())


def test_the_table_says_type_labels_and_meaning(watched):
    samples, families = read(watched[0])
    for name, (kind, labels, _, meaning) in table().items():
        assert families[name].type == kind, name
        if name.startswith("capflow_"):
            assert families[name].documentation == meaning, name
        had = [{label for label, _ in key} for sampled, key in samples if sampled == name]
        assert had, f"{name} has no value after all that happened"
        assert all(each == labels for each in had), name


def test_names_say_their_units():
    for name, (kind, _, unit, _) in table().items():
        bare = name.removesuffix("_total")
        assert (kind == "counter") == name.endswith("_total"), name
        if name.startswith("capflow_") and unit:
            word = "seconds" if unit == "Unix seconds" else unit
            assert bare.endswith(f"_{word}"), name
            assert ("timestamp" in name) == (unit == "Unix seconds"), name


def test_nothing_that_was_captured_is_told(watched):
    text, status, url = watched
    assert SECRET not in text
    assert "r2" not in text
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{url}/readyz", timeout=10)
    assert SECRET not in refused.value.read().decode()
    assert "failed at each" in str(status["problems"])


def test_the_values_are_what_happened(samples):
    assert value(samples, "received_frames_total") == 5
    assert value(samples, "received_rows_total") == 3 * 4 + 4 + 2
    assert value(samples, "received_bytes_total") == 18 * 8 * 4
    assert value(samples, "done_requests_total") == 1
    assert value(samples, "open_requests") == 2
    assert value(samples, "gapped_requests_total") == 1
    assert value(samples, "dropped_rows_total", reason="queue_full") == 5
    assert value(samples, "dropped_rows_total", reason="too_large") == 1
    assert value(samples, "protocol_errors_total") == value(samples, "refused_sessions_total") == 1
    assert value(samples, "sessions", role="worker") == 2
    assert value(samples, "sessions", role="client") == 2
    assert value(samples, "engines") == 2
    assert value(samples, "ready") == 0


def test_the_values_of_consumers(samples):
    assert value(samples, "consumer_rows_total", consumer="good") == 18
    assert value(samples, "consumer_counts_total", consumer="good", name="seen") == 3
    assert value(samples, "consumer_results_total", consumer="good", status="partial_error") == 1
    assert value(samples, "consumer_up", consumer="good") == 1
    assert value(samples, "consumer_errors_total", consumer="bad") >= 3
    dropped = value(samples, "consumer_dropped_rows_total", consumer="full", reason="consumer_queue_full")
    assert dropped > 0
    assert value(samples, "lost_rows_total") == 6 + dropped
    assert value(samples, "consumer_lag_seconds", consumer="full") > 0
    assert value(samples, "consumer_busy_seconds_total", consumer="full") > 0
    assert value(samples, "consumer_queue_limit_bytes", consumer="full") == 1


def test_the_values_of_workers(samples):
    first = {"engine": "engine-1", "rank": "pp0-dp0-tp0"}
    second = {"engine": "engine-2", "rank": "pp0-dp1-tp0"}
    assert value(samples, "worker_received_rows_total", **first) == 16
    assert value(samples, "worker_received_rows_total", **second) == 2
    assert value(samples, "worker_info", **first, model="test-model", dtype="float32") == 1
    assert value(samples, "worker_dropped_rows_total", **first, reason="queue_full") == 7
    assert value(samples, "worker_staged_bytes", **first) == 1000
    assert value(samples, "worker_staging_limit_bytes", **first) == 5000
    assert value(samples, "worker_queue_limit_bytes", **first) == limits.OUTBOUND_BYTES_DEFAULT
    assert value(samples, "worker_credit_bytes", **first) <= value(samples, "credit_window_bytes")


def test_the_processor_time_of_workers_and_of_the_hubs_threads(samples):
    first = {"engine": "engine-1", "rank": "pp0-dp0-tp0"}
    assert value(samples, "worker_measured_steps_total", **first, part="worker") == 10
    assert value(samples, "worker_step_cpu_seconds_total", **first, part="worker") == 0.0009
    assert value(samples, "worker_thread_cpu_seconds_total", **first, thread="sender") == 0.005
    assert value(samples, "thread_cpu_seconds_total", thread="hub") > 0
    assert value(samples, "thread_cpu_seconds_total", thread="good") > 0


def test_status_and_metrics_say_the_same(samples, watched):
    report = watched[1]
    assert value(samples, "received_rows_total") == report["rows"]
    (worker,) = [s for s in report["sessions"] if s["role"] == "worker" and s["engine"] == "engine-1"]
    assert worker["worker"]["dropped_rows"] == {"queue_full": 7, "no_hub": 2}
    assert {name for name, c in report["consumers"].items() if c["trouble"]} == {"bad"}


def test_openmetrics_for_those_who_ask(watched):
    text = scrape(watched[2], "application/openmetrics-text; version=1.0.0")
    assert text.endswith("# EOF\n")
    assert "capflow_received_rows_total 18.0" in text


def test_a_hub_has_metrics_before_its_inboxes_are_open(address, tmp_path):
    """`capflow run` checks the metrics' port before it starts the hub."""
    hub = Hub(str(address), [configured(Recorder("kept"), "spill", spool_dir=tmp_path / "inbox")])
    assert registry_of(hub).get_sample_value("capflow_consumer_dead_letters", {"consumer": "kept"}) == 0


@pytest.mark.usefixtures("replaced_at_once")
def test_a_worker_that_comes_back_is_counted_and_a_new_boot_of_it_is_not(address):
    with running_hub(address, Recorder()) as hub:
        for boot, resumed in (("b1", 0), ("b1", 1), ("b1", 2), ("b2", 2)):
            with raw_peer(address) as peer:
                peer.send(message.encode(make_hello(boot=boot)))
                assert isinstance(message.decode(answer(peer)[0]), message.Welcome)
                assert hub.roster.resumed == hub.status()["sessions_resumed"] == resumed


def test_reasons_beyond_the_bound_are_one(address):
    with running_hub(address, Recorder()) as hub, worker_link(address) as link:
        endpoint = Endpoint(hub, "127.0.0.1", 0)
        endpoint.start()
        lost = [Dropped(1, f"reason-{n:03}") for n in range(200)]
        parts = [tuple(lost[n : n + 50]) for n in range(0, 200, 50)]
        send(link, finished=[make_finished(f"r{n}", rows=0, dropped=part) for n, part in enumerate(parts)])
        eventually(lambda: hub.index.requests_done == 4)
        samples, _ = read(scrape(endpoint.url))
        reasons = {dict(key)["reason"]: n for (name, key), n in samples.items() if name == "capflow_dropped_rows_total"}
        assert len(reasons) == limits.REASONS_MAX + 1
        assert sum(reasons.values()) == 200
        assert reasons["other"] == 200 - limits.REASONS_MAX
        endpoint.stop()


class TestTheDashboard:
    def expressions(self):
        return [(panel["title"], target) for panel in DASHBOARD["panels"] for target in panel["targets"]]

    def test_every_expression_names_metrics_with_the_labels_that_they_have(self):
        have = table()
        for title, target in self.expressions():
            expression = target["expr"]
            names = re.findall(r"\b((?:capflow|process)_\w+)", expression)
            assert names, title
            assert set(names) <= set(have), title
            labels = set.union(*(have[name][1] for name in names)) | ADDED
            used = re.findall(r"(?:by|on) \(([^)]*)\)", expression) + re.findall(
                r"\{\{(\w+)\}\}", target["legendFormat"]
            )
            assert {label for group in used for label in re.findall(r"\w+", group)} <= labels, title
            matched = re.findall(r"(\w+)(?:=|!=|=~|!~)\"", expression)
            assert set(matched) <= labels, title
            assert expression.count("(") == expression.count(")"), title
            assert expression.count("{") == expression.count("}"), title

    def test_rates_are_taken_of_counters_only(self):
        have = table()
        for title, target in self.expressions():
            rated = re.findall(r"(?:rate|increase)\((\w+)", target["expr"])
            assert all(have[name][0] == "counter" for name in rated), title
            plain = set(re.findall(r"\b((?:capflow|process)_\w+)", target["expr"])) - set(rated)
            assert all(have[name][0] == "gauge" for name in plain), title

    def test_it_shows_most_of_what_there_is(self):
        shown = {name for _, t in self.expressions() for name in re.findall(r"\b(capflow_\w+)", t["expr"])}
        assert len(shown) > len([name for name in table() if name.startswith("capflow_")]) // 2

    def test_panels_lie_beside_each_other(self):
        taken = set()
        for panel in DASHBOARD["panels"]:
            at = panel["gridPos"]
            cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
            assert not cells & taken, panel["title"]
            assert at["x"] + at["w"] <= 24
            taken |= cells
        assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
