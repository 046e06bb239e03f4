"""The timeline of a request: what applies at each position, for any order of actions, leases, cuts and freezes."""

from hypothesis import given, settings
from hypothesis import strategies as st

from capflow.capture.site import Site
from capflow.steering.action import Gain, Steer, Unsteer
from capflow.steering.vector import SteeringVector
from capflow_engine.steering.timeline import ENGINE, FOREVER, FROZEN, Owner, Timeline, entry_of, hub_owner, slot_of

OWNERS = (Owner(0, "first"), Owner(1, "second"), hub_owner("watcher"), hub_owner("client"))
END = 60


def steer(number, lease=None):
    vector = SteeringVector.make(Site(1, "post_block"), [float(number), 1.0])
    return Steer("r", (vector,), lease_positions=lease)


@st.composite
def orders(draw):
    """Return orders, each at a position that is not before the one of the order before it."""
    position, some = 0, []
    for number in range(draw(st.integers(1, 10))):
        position += draw(st.integers(0, 6))
        lease = draw(st.one_of(st.none(), st.integers(1, 12)))
        kind = draw(st.sampled_from(("steer", "steer", "unsteer", "gain", "freeze", "unfreeze")))
        owner = draw(st.sampled_from(OWNERS))
        action = {
            "steer": steer(number, lease),
            "unsteer": Unsteer("r"),
            "gain": Gain("r", "global", draw(st.sampled_from((0.0, 0.5, 1.0))), lease_positions=lease),
        }.get(kind)
        some.append((kind, owner, action, position))
    return some


def replayed(some, gains):
    """Return what applies at each position by going through all orders for each position."""
    result = []
    for position in range(END):
        state = {}
        for kind, owner, action, first in some:
            if first > position:
                continue
            if kind == "freeze":
                state = {FROZEN: (True, FOREVER)}
            elif kind == "unfreeze":
                state = {slot_of(Gain("", name, scale), ENGINE): (scale, FOREVER) for name, scale in gains.items()}
            else:
                entry = entry_of(action, owner, first)
                state[slot_of(action, owner)] = (entry.value, entry.until)
        result.append({slot: value for slot, (value, until) in state.items() if value is not None and position < until})
    return result


def applied(timeline, some, gains):
    for kind, owner, action, first in some:
        if kind == "freeze":
            timeline.freeze(first)
        elif kind == "unfreeze":
            timeline.unfreeze(first, gains)
        else:
            timeline.set(first, {slot_of(action, owner): entry_of(action, owner, first)})
    return timeline


@settings(max_examples=100, deadline=None)
@given(orders())
def test_each_position_has_what_a_replay_of_all_orders_gives(some):
    gains = {"module calm": 0.5}
    timeline = applied(Timeline(), some, gains)
    assert [dict(timeline.at(position).live) for position in range(END)] == replayed(some, gains)
    assert [part.first for part in timeline.parts] == sorted({part.first for part in timeline.parts})


@settings(max_examples=100, deadline=None)
@given(orders(), st.integers(0, 30))
def test_a_cut_undoes_what_controllers_did_behind_it_and_keeps_what_hubs_ordered(some, limit):
    some = [each for each in some if each[0] in ("steer", "unsteer", "gain")]
    timeline = applied(Timeline(), some, {})
    timeline.cut(limit)
    kept = [each for each in some if each[1].by_hub or each[3] <= limit]
    assert [dict(timeline.at(position).live) for position in range(END)] == replayed(kept, {})


@settings(max_examples=100, deadline=None)
@given(orders(), st.integers(0, 30), st.integers(1, 4))
def test_a_shift_lowers_what_begins_behind_it_with_its_lease(some, first, count):
    some = [each for each in some if each[0] in ("steer", "unsteer", "gain")]
    # Nothing begins at the positions that are shifted over.
    some = [(*each[:3], each[3] + (count if each[3] >= first else 0)) for each in some]
    timeline = applied(Timeline(), some, {})
    timeline.shift(first + count, count)
    moved = [(*each[:3], each[3] - (count if each[3] >= first + count else 0)) for each in some]
    assert [dict(timeline.at(position).live) for position in range(END)] == replayed(moved, {})


def test_a_lease_ends_by_itself_and_a_renewed_action_extends_it():
    timeline = Timeline()
    for first in (10, 13):
        action = steer(1, lease=5)
        timeline.set(first, {slot_of(action, OWNERS[3]): entry_of(action, OWNERS[3], first)})
    live = [position for position in range(END) if timeline.at(position).live]
    assert live == list(range(10, 18))


def test_consumers_come_after_controllers_by_name_and_clients_last():
    names = [hub_owner("b"), hub_owner("client"), Owner(3, "z"), hub_owner("client KEY"), hub_owner("a")]
    assert [owner.name for owner in sorted(names)] == ["z", "a", "b", "client", "client KEY"]
