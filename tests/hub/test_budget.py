"""The memory that a hub takes for what peers send: how much it is, and where it is shown."""

from __future__ import annotations

import re

import pytest

from capflow import limits
from capflow.buffers.kept import Kept
from capflow.hub.monitor.metrics import registry_of
from capflow.hub.peers import budget as budgets
from capflow.hub.peers.budget import Budget, machine_bytes, memory_default
from tests.kit.hubs import Recorder, address, configured, running_hub
from tests.kit.sources import ROOT

__all__ = ["address"]


def test_its_parts_are_no_more_than_the_whole():
    budget = Budget(1024 * limits.MIB, inboxes=3)
    parts = budget.status(0, Kept(1, 1))
    assert sum(part["bytes_max"] for part in parts.values()) <= budget.bytes_max
    assert parts["frames"]["bytes_max"] == 512 * limits.MIB


@pytest.mark.parametrize(("text", "expected"), [("max\n", None), (f"{2**30}\n", 2**30), ("", None)])
def test_is_a_part_of_what_the_control_group_allows(tmp_path, monkeypatch, text, expected):
    bound = tmp_path / "memory.max"
    monkeypatch.setattr(budgets, "_CGROUPS", (str(bound), str(tmp_path / "none")))
    whole = machine_bytes()
    bound.write_text(text)
    assert machine_bytes() == (expected or whole)
    assert memory_default() == max(limits.MEMORY_BYTES_MIN, (expected or whole) // limits.MEMORY_PART)


def test_a_hub_shows_what_is_taken_of_each_part_and_its_bound(address):
    with running_hub(address, Recorder(), memory_bytes_max=512 * limits.MIB) as hub:
        memory = hub.status()["memory"]
        assert memory["bytes_max"] == 512 * limits.MIB
        assert memory["parts"]["state"] == {"bytes": 0, "bytes_max": 64 * limits.MIB}
        shown = registry_of(hub).get_sample_value("capflow_memory_limit_bytes", {"part": "frames"})
        assert shown == 256 * limits.MIB


def test_queues_of_consumers_that_drop_fit_into_their_part(address):
    lanes = [configured(Recorder(name), "drop") for name in ("one", "two")]
    with running_hub(address, *lanes, memory_bytes_max=256 * limits.MIB) as hub:
        assert [lane.queue.bytes_max for lane in hub.lanes] == [16 * limits.MIB] * 2


def test_the_table_of_limits_has_each_with_its_number():
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\d,]+) [a-z]+ \| .* \| `([A-Z_]+)` \|$", text, re.MULTILINE)
    assert len(rows) >= 9
    for number, name in rows:
        assert int(number.replace(",", "")) == getattr(limits, name), name
