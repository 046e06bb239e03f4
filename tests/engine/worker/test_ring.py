import gc
import threading

import numpy as np
import pytest

from capflow_engine.worker.ring import Ring


@pytest.fixture
def ring():
    return Ring(256 * 1024, pinned=False)


def test_a_buffer_comes_back_when_its_last_view_is_gone(ring):
    buffer = ring.acquire(100_000, 0)
    view = memoryview(buffer[10:20])
    other = np.frombuffer(view, np.uint8)
    del buffer, view
    gc.collect()
    assert ring.bytes_lent == 128 * 1024
    del other
    assert ring.bytes_lent == 0


def test_memory_is_used_again(ring):
    buffer = ring.acquire(100_000, 0)
    place = buffer.ctypes.data
    del buffer
    assert ring.acquire(90_000, 0).ctypes.data == place


def test_no_more_is_lent_than_the_bound(ring):
    held = [ring.acquire(64 * 1024, 0) for _ in range(4)]
    assert all(b is not None for b in held)
    assert ring.acquire(1, 0) is None
    held.pop()
    assert ring.acquire(1, 0) is not None


def test_one_buffer_larger_than_the_bound_is_lent_alone(ring):
    large = ring.acquire(1024 * 1024, 0)
    assert large.nbytes == 1024 * 1024
    assert ring.acquire(1, 0) is None


def test_a_waiter_gets_the_buffer_that_another_thread_gives_back(ring):
    held = [ring.acquire(256 * 1024, 0)]
    got = []
    waiter = threading.Thread(target=lambda: got.append(ring.acquire(1000, 30)))
    waiter.start()
    held.clear()
    waiter.join(30)
    assert got[0].nbytes == 1000


def test_what_steps_under_way_hold_is_not_waited_for():
    ring = Ring(2 * 65536, pinned=False)
    under_way = ring.acquire(2 * 65536, 0)
    assert ring.acquire(65536, 0) is None
    more = ring.acquire(65536, 0, held=ring.size_of(2 * 65536))
    assert more is not None
    assert ring.acquire(2 * 65536, 0, held=ring.size_of(2 * 65536)) is None  # but what the sender has still counts
    del under_way, more
