"""How requests without room in the steering bank wait: schedulers that ask about each, and those that do not."""

import collections
import enum

import pytest

from capflow_engine.compat.waiting import holding_back


class Queue(collections.deque):
    """Has what vLLM's queues have."""

    def remove_requests(self, requests):
        kept = [request for request in self if request not in requests]
        self.clear()
        self.extend(kept)

    prepend_request = collections.deque.appendleft


class Room:
    """Has room for some requests."""

    def __init__(self, *fitting):
        self.fitting, self.asked = set(fitting), []
        self.needed = True

    def has_room(self, request):
        self.asked.append(request)
        return request in self.fitting


class Scheduler:
    """Takes every request that waits, as vLLM's before 0.31 does."""

    fails = False

    def __init__(self, room, skipped="", waiting="", policy="fcfs"):
        self.capflow = room
        self.skipped_waiting, self.waiting = Queue(skipped), Queue(waiting)
        self.policy = enum.Enum("Policy", {policy: policy})[policy]

    def schedule(self):
        if self.fails:
            raise RuntimeError
        taken = [*self.skipped_waiting, *self.waiting]
        self.skipped_waiting.clear()
        self.waiting.clear()
        return "".join(taken)


class Asking(Scheduler):
    """Asks about each request, as vLLM's does from 0.31 on."""

    def _handle_blocked_waiting_request(self, request):
        return request != "x"


def mixed(base):
    return type("Mixed", (holding_back(base), base), {})


def test_a_scheduler_that_asks_nobody_gets_only_requests_with_room():
    room = Room("b", "d")
    scheduler = mixed(Scheduler)(room, skipped="ab", waiting="cde")
    assert scheduler.schedule() == "bd"
    assert room.asked == list("abcde")
    room.fitting = set("ac")
    scheduler.waiting.extend("f")
    assert scheduler.schedule() == "ac"  # those that were held back come first, in their order
    assert [*scheduler.skipped_waiting, *scheduler.waiting] == list("ef")


def test_room_is_taken_in_the_order_of_priorities():
    room = Room()
    mixed(Scheduler)(room, skipped="bd", waiting="ace", policy="priority").schedule()
    assert room.asked == list("abcde")


def test_nobody_is_asked_if_no_request_needs_room():
    room = Room()
    room.needed = False
    assert mixed(Scheduler)(room, skipped="a", waiting="b").schedule() == "ab"
    assert room.asked == []


def test_requests_stay_in_line_when_a_step_fails():
    scheduler = mixed(Scheduler)(Room(), waiting="ab")
    scheduler.fails = True
    with pytest.raises(RuntimeError):
        scheduler.schedule()
    assert list(scheduler.skipped_waiting) == ["a", "b"]


def test_a_scheduler_that_asks_about_each_request_hears_of_those_without_room():
    room = Room("a", "x")
    scheduler = mixed(Asking)(room, waiting="abx")
    assert [scheduler._handle_blocked_waiting_request(request) for request in "abx"] == [True, False, False]
    assert room.asked == ["a", "b"]
    assert scheduler.schedule() == "abx"
