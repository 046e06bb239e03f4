"""Which hub has a request: the same everywhere and for ever, evenly, and moved by a further hub only to that hub."""

from collections import Counter

import xxhash
from hypothesis import given
from hypothesis import strategies as st

from capflow.protocol.routing import hub_among, hub_of


def test_the_hub_of_a_request_never_changes():
    """What is pinned here is on the wire: engines and whoever asks for results find a request by it."""
    assert [hub_of(f"r{number}", 4) for number in range(20)] == [
        0,
        0,
        1,
        1,
        3,
        0,
        0,
        2,
        1,
        2,
        2,
        1,
        3,
        3,
        3,
        3,
        0,
        0,
        3,
        3,
    ]
    assert [hub_of(name, 3) for name in ("", "a", "hello", "req-1", "é", "x" * 512)] == [2, 0, 0, 0, 0, 2]


@given(st.text(max_size=40), st.integers(1, 9))
def test_it_is_the_one_with_the_largest_hash(request, hubs):
    key = request.encode("utf-8", "surrogatepass")
    hashes = [xxhash.xxh3_64_intdigest(key, seed=seed) for seed in range(hubs)]
    assert hub_of(request, hubs) == hashes.index(max(hashes))


def test_hubs_have_equal_parts_and_a_further_one_takes_only_its_own():
    names = [f"{number:x}-{number % 7}" for number in range(20_000)]
    assert [hub_among(name, [0, 1, 2, 3]) for name in names] == [hub_of(name, 4) for name in names]
    before = {name: hub_of(name, 4) for name in names}
    after = {name: hub_of(name, 5) for name in names}
    assert all(0.9 * 5000 < count < 1.1 * 5000 for count in Counter(before.values()).values())
    moved = [name for name in names if after[name] != before[name]]
    assert {after[name] for name in moved} == {4}
    assert 0.9 * 4000 < len(moved) < 1.1 * 4000
