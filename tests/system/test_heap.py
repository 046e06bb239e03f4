"""Free memory goes back to the system, also where memory in use lies behind it."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
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


_FAULTS = """
import contextlib, resource, sys, threading
from capflow.system import heap

def receive():
    for turn in range(20):
        messages = [b"x" * (2 << 20) for _ in range(8)]
        if not turn:
            print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
        del messages

with heap.trimmed() if sys.argv[1] == "kept" else contextlib.nullcontext():
    thread = threading.Thread(target=receive)
    thread.start()
    thread.join()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library keeps what it likes")
def test_the_memory_of_a_message_is_used_again_without_the_system():
    faults = {}
    for way in ("kept", "returned"):
        run = subprocess.run([sys.executable, "-c", _FAULTS, way], capture_output=True, text=True, check=True)
        first, last = map(int, run.stdout.split())
        faults[way] = last - first
    assert faults["kept"] < faults["returned"] / 4
