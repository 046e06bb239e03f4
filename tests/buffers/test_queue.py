"""The byte queue: bounded in bytes, in order, and never stuck."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capflow.buffers.queue import ByteQueue
from tests.kit.waiting import eventually


def test_items_leave_in_the_order_they_came():
    queue = ByteQueue(100)
    for item in range(5):
        assert queue.offer(item, 10)
    assert [queue.get(0) for _ in range(6)] == [0, 1, 2, 3, 4, None]


def test_offer_refuses_what_does_not_fit_and_counts_it():
    queue = ByteQueue(100)
    assert queue.offer("a", 60)
    assert not queue.offer("b", 41)
    assert queue.offer("c", 40)
    assert (queue.accepted, queue.refused, queue.nbytes, queue.bytes_peak) == (2, 1, 100, 100)


def test_an_item_larger_than_the_bound_is_admitted_alone():
    queue = ByteQueue(100)
    assert queue.offer("large", 500)
    assert not queue.offer("small", 1)
    assert queue.get(0) == "large"
    assert queue.offer("small", 1)


def test_put_waits_for_room():
    queue = ByteQueue(100)
    queue.offer("a", 100)
    results = []
    thread = threading.Thread(target=lambda: results.append(queue.put("b", 50, 20)))
    thread.start()
    assert queue.get(0) == "a"
    thread.join(20)
    assert results == [True]
    assert queue.get(0) == "b"


def test_put_gives_up_in_time():
    queue = ByteQueue(100)
    queue.offer("a", 100)
    assert not queue.put("b", 50, 0.01)
    assert queue.refused == 1


def test_close_wakes_those_who_wait_and_leaves_what_is_in_it():
    queue = ByteQueue(100)
    queue.offer("a", 100)
    results = []
    thread = threading.Thread(target=lambda: results.append(queue.put("b", 50)))
    thread.start()
    queue.close()
    thread.join(20)
    assert results == [False]
    assert not queue.offer("c", 0)
    queue.force("d", 0)
    assert (queue.get(), queue.get()) == ("a", None)


def test_get_waits_for_an_item():
    queue = ByteQueue(100)
    results = []
    thread = threading.Thread(target=lambda: results.append(queue.get(20)))
    thread.start()
    queue.offer("a", 1)
    thread.join(20)
    assert results == ["a"]


def test_a_thread_that_waits_can_be_woken_once_for_several_items():
    queue = ByteQueue(100)
    queue.wake()  # nobody waits
    results = []
    thread = threading.Thread(target=lambda: results.extend(queue.get(20) for _ in range(3)))
    thread.start()
    eventually(lambda: queue._getting)
    queue.force("a", 1, wake=False)
    assert displace(queue, "b", 1, wake=False) == []
    thread.join(0.2)
    assert results == []
    queue.wake()
    eventually(lambda: results == ["a", "b"] and queue._getting)
    queue.offer("c", 1)
    thread.join(20)
    assert results == ["a", "b", "c"]
    assert not queue._getting


def test_an_item_that_wakes_nobody_is_there_for_who_comes_later():
    queue = ByteQueue(100)
    queue.force("a", 1, wake=False)
    assert queue.get(20) == "a"


def displace(queue, item, nbytes, source="", **options):
    """Return what the queue throws out for an item; the item too when it is not added."""
    gone = []
    added = queue.displace(item, nbytes, source, gone.append, **options)
    return gone if added else [*gone, item]


def test_displace_throws_out_the_oldest_that_have_a_size():
    queue = ByteQueue(10)
    queue.force("end", 0)
    for name in "abc":
        assert displace(queue, name, 3) == []
    assert displace(queue, "d", 6) == ["a", "b"]
    assert queue.nbytes == 9
    assert displace(queue, "large", 50) == ["c", "d"]
    queue.close()
    assert displace(queue, "late", 1) == ["late"]
    assert [queue.get(0) for _ in range(3)] == ["end", "large", None]


@pytest.mark.parametrize(("newest", "gone"), [(False, ["f0", "f1"]), (True, ["f9", "f8"])])
def test_a_source_within_its_part_has_room_beside_one_that_fills_the_queue(newest, gone):
    queue = ByteQueue(100)
    for number in range(10):
        assert displace(queue, f"f{number}", 10, "flood", newest=newest) == []
    queue.force("end", 0, "flood")
    assert displace(queue, "h0", 20, "honest", newest=newest) == gone
    assert queue.refused == 2
    assert queue.nbytes == 100
    left = [item for item in iter(lambda: queue.get(0), None) if item.startswith("f")]
    assert left == [f"f{number}" for number in range(10) if f"f{number}" not in gone]


@pytest.mark.parametrize("newest", [False, True])
def test_a_source_above_its_part_costs_no_other_anything(newest):
    queue = ByteQueue(100)
    for item in ("h0", "h1"):
        assert displace(queue, item, 25, "honest", newest=newest) == []
    for number in range(5):
        assert displace(queue, f"f{number}", 10, "flood", newest=newest) == []
    assert displace(queue, "f5", 10, "flood", newest=newest) == ["f5" if newest else "f0"]
    assert displace(queue, "large", 60, "flood", newest=newest) == ["large"]
    assert displace(queue, "h2", 25, "honest", newest=newest) == ["h2" if newest else "h0"]
    assert queue.nbytes <= 100


SIZES = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 30)), max_size=60)


@given(SIZES, st.integers(30, 100), st.booleans())
def test_no_source_within_its_part_loses_an_item(items, bound, newest):
    queue, held = ByteQueue(bound), Counter()
    for number, (source, nbytes) in enumerate(items):
        before = Counter({name: size for name, size in held.items() if size})
        part = bound // len(before.keys() | {source})

        def lose(item, source=source, part=part):
            name, size = items[item]
            assert size
            assert held[name] > part or (name == source and held[name] + items[number][1] > part)  # noqa: B023
            held[name] -= size

        if queue.displace(number, nbytes, source, lose, newest=newest):
            held[source] += nbytes
        else:
            assert before[source] + nbytes > part
        assert queue.nbytes == held.total() <= bound
    left = [items[number] for number in iter(lambda: queue.get(0), None)]
    assert Counter(source for source, nbytes in left for _ in range(nbytes)) == held


def test_remove_takes_out_the_oldest_that_matches():
    queue = ByteQueue(10)
    for name in ("a1", "b1", "b2", "a2"):
        queue.force(name, 2)
    queue.force("b0", 0)
    assert queue.remove(lambda item: item.startswith("b")) == "b1"
    assert queue.nbytes == 6
    assert queue.remove(lambda item: item == "b0") == "b0"
    assert queue.remove(lambda item: item == "c") is None
    assert displace(queue, "d", 8) == ["a1", "b2"]
    assert [queue.get(0) for _ in range(3)] == ["a2", "d", None]


def test_sources_take_turns_and_keep_their_order():
    queue = ByteQueue(100)
    for number in range(1000):
        queue.force(f"much{number}", source="much")
    queue.force("few0", 5, "few")
    assert queue.get(0) == "much0"
    assert queue.get(0) == "few0"  # it waited for one item of the other
    queue.offer("few1", 5, "few")
    assert displace(queue, "more0", 5, "more") == []
    assert [queue.get(0) for _ in range(5)] == ["much1", "few1", "more0", "much2", "much3"]
    queue.force("few2", 60, "few")
    queue.force("few3", 0, "few")
    assert displace(queue, "more1", 50, "more") == ["few2"]
    assert queue.remove(lambda item: item == "much5") == "much5"
    assert [queue.get(0) for _ in range(5)] == ["much4", "few3", "more1", "much6", "much7"]
    assert queue.nbytes == 0


def test_force_ignores_the_bound():
    queue = ByteQueue(10)
    queue.force("a", 50)
    queue.force("b", 50)
    assert queue.nbytes == 100
    assert (queue.get(0), queue.get(0), queue.nbytes) == ("a", "b", 0)


@given(st.lists(st.tuples(st.sampled_from(["offer", "get"]), st.integers(0, 30))), st.integers(1, 50))
def test_the_bound_holds_and_nothing_is_lost(steps, bound):
    queue, inside = ByteQueue(bound), []
    for number, (step, size) in enumerate(steps):
        if step == "offer":
            fits = not inside or sum(s for _, s in inside) + size <= bound
            assert queue.offer(number, size) == fits
            if fits:
                inside.append((number, size))
        else:
            assert queue.get(0) == (inside.pop(0)[0] if inside else None)
        assert queue.nbytes == sum(s for _, s in inside)


def test_many_threads_pass_everything_through_once():
    queue, taken = ByteQueue(64), []

    def give(first):
        for item in range(first, first + 200):
            assert queue.put(item, 7, 20)

    def take():
        while (item := queue.get(20)) is not None:
            taken.append(item)

    givers = [threading.Thread(target=give, args=(first,)) for first in (0, 200, 400)]
    takers = [threading.Thread(target=take) for _ in range(2)]
    for thread in (*givers, *takers):
        thread.start()
    for thread in givers:
        thread.join(20)
    queue.close()
    eventually(lambda: not any(thread.is_alive() for thread in takers))
    assert sorted(taken) == list(range(600))
