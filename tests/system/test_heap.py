"""Free memory goes back to the system, also where memory in use lies behind it."""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path

import pytest

from capflow import limits
from capflow.cli.hub.running import HubRun
from capflow.system import heap
from capflow.transport.address import private_address
from tests.kit.waiting import eventually

BLOCK_BYTES = 4_000
BLOCKS = 16_000  # 64 MB
FREED_BYTES = 40_000_000


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def fragments():
    """Return a few blocks scattered over 64 MB of free memory, in an arena that no other thread uses."""
    left = []

    def fill():
        blocks = [bytes(BLOCK_BYTES) for _ in range(BLOCKS)]
        left.extend(blocks[::64])

    thread = threading.Thread(target=fill)
    thread.start()
    thread.join()
    return left


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library gives back what is free by itself"
)
def test_what_is_free_between_blocks_in_use_is_given_back_while_a_hub_runs(monkeypatch):
    monkeypatch.setattr(limits, "TRIM_S", 0.05)
    left = fragments()
    before = resident_bytes()
    with HubRun(private_address("heap"), [], live=False):
        eventually(lambda: resident_bytes() < before - FREED_BYTES)
    assert len(left) == BLOCKS // 64


def test_where_the_c_library_is_another_nothing_is_done(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    threads = threading.active_count()
    with heap.trimmed():
        assert threading.active_count() == threads
