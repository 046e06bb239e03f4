"""`threading`, `time`, `queue` and the other sources of waiting and randomness of the product, on a scheduler.

While `installed` is entered, they replace Python's own in every loaded module of the product.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import queue
import sys
import threading
import time
import types
import uuid
from collections import deque

PRODUCT = ("capflow", "capflow_consumers")


class Lock:
    """A lock; with `again`, one that its holder may take again."""

    def __init__(self, world, *, again=False):
        self._world, self._again = world, again
        self._holder, self._times = None, 0
        self._waiting = deque()

    def acquire(self, blocking=True, timeout=-1):
        """Take the lock, waiting for it."""
        world, task = self._world, self._world.current
        if self._holder is task and task is not None and self._again:
            self._times += 1
            return True
        if self._holder is None and task is not None:
            world.point("lock")
        while self._holder is not None:
            if not blocking or task is None:
                assert task is not None, "the owner of the world may not wait"
                return False
            self._waiting.append(task)
            world.block(None if timeout < 0 else timeout)
            if task in self._waiting:
                self._waiting.remove(task)
            if self._holder is not None and timeout >= 0:
                return False
        self._holder, self._times = task, 1
        return True

    def release(self):
        """Give the lock back."""
        self._times -= 1
        if self._times:
            return
        self._holder = None
        while self._waiting:
            task = self._waiting.popleft()
            if not task.done:
                self._world.wake(task)
                break

    def locked(self):
        """Return whether someone has it."""
        return self._holder is not None

    def __enter__(self):
        self.acquire()

    def __exit__(self, *_):
        self.release()


class Condition:
    """A condition variable."""

    def __init__(self, world, lock=None):
        self._world = world
        self._lock = lock or Lock(world, again=True)
        self.acquire, self.release = self._lock.acquire, self._lock.release
        self._waiting = []

    def __enter__(self):
        self._lock.acquire()

    def __exit__(self, *_):
        self._lock.release()

    def wait(self, timeout=None):
        """Wait to be notified; return whether it was."""
        task, lock = self._world.current, self._lock
        self._waiting.append(task)
        times, lock._times = lock._times, 1
        lock.release()
        try:
            return self._world.block(timeout)
        finally:
            if task in self._waiting:
                self._waiting.remove(task)
            if not task.process.dead:
                lock.acquire()
                lock._times = times

    def wait_for(self, predicate, timeout=None):
        """Wait until something holds; return what it came to."""
        until = None if timeout is None else self._world.now + timeout
        while not (result := predicate()):
            left = None if until is None else until - self._world.now
            if left is not None and left <= 0:
                break
            self.wait(left)
        return result

    def notify(self, n=1):
        """Wake some of those who wait."""
        for task in self._waiting[:n]:
            self._world.wake(task)
        del self._waiting[:n]

    def notify_all(self):
        """Wake all who wait."""
        self.notify(len(self._waiting))


class Event:
    """A flag to wait for."""

    def __init__(self, world):
        self._changed, self._set = Condition(world), False

    def is_set(self):
        """Return whether it is set."""
        return self._set

    def set(self):
        """Set it."""
        self._set = True
        self._changed.notify_all()

    def clear(self):
        """Clear it."""
        self._set = False

    def wait(self, timeout=None):
        """Wait until it is set; return whether it is."""
        self._changed._world.point("event")
        if not self._set:
            with self._changed:
                self._changed.wait_for(lambda: self._set, timeout)
        return self._set


class Thread:
    """A thread of the process of whoever makes it."""

    def __init__(self, world, target=None, name=None, args=(), kwargs=None, daemon=None):
        self._world, self._target, self._args = world, target, args
        assert not kwargs
        self.name, self.daemon = name or "thread", daemon
        self._task = None
        self._process = world.process

    @property
    def ident(self):
        """Its number, None before it runs."""
        return None if self._task is None else self._task.number + 1

    def start(self):
        """Begin."""
        self._task = self._process.spawn(self._target, self.name, *self._args)
        self._task.thread = self
        self._world.point("start")

    def is_alive(self):
        """Return whether it runs."""
        return self._task is not None and not self._task.done

    def join(self, timeout=None):
        """Wait for its end."""
        world = self._world
        until = None if timeout is None else world.now + timeout
        while self.is_alive():
            left = None if until is None else until - world.now
            if left is not None and left <= 0:
                return
            self._task.waiters.append(world.current)
            world.block(left)
            if world.current in self._task.waiters:
                self._task.waiters.remove(world.current)


class Queue:
    """`queue.SimpleQueue` and `queue.Queue` without a bound."""

    def __init__(self, world):
        self._items, self._changed = deque(), Condition(world)

    def put(self, item, block=True, timeout=None):
        """Put something in."""
        self._items.append(item)
        self._changed.notify()

    put_nowait = put

    def get(self, block=True, timeout=None):
        """Take the oldest out, waiting for it; raises queue.Empty."""
        self._changed._world.point("queue")
        if not self._items and block:
            with self._changed:
                self._changed.wait_for(lambda: self._items, timeout)
        if not self._items:
            raise queue.Empty
        return self._items.popleft()

    def get_nowait(self):
        """Take the oldest out; raises queue.Empty."""
        return self.get(block=False)

    def empty(self):
        """Return whether nothing is in it."""
        return not self._items

    def qsize(self):
        """Return how much is in it."""
        return len(self._items)


class _Overlay(types.ModuleType):
    """A module, of which some names mean something else."""

    def __init__(self, module, **names):
        super().__init__(module.__name__)
        self.__dict__.update(names, _module=module)

    def __getattr__(self, name):
        return getattr(self.__dict__["_module"], name)


def overlays(world):
    """Return what to put in the place of what."""
    choose = world.choose

    def uuid4():
        return uuid.UUID(int=choose.getrandbits(128), version=4)

    def monotonic():
        return world.now + world.process.clock_offset

    def wall_ns():
        return int((world.now + world.wall_offset) * 1e9)

    class Future(concurrent.futures.Future):
        def __init__(self):
            super().__init__()
            self._condition = Condition(world)

    def bound(kind):
        return lambda *args, **kwargs: kind(world, *args, **kwargs)

    def simple():
        return Queue(world)

    def bounded(maxsize=0):
        assert not maxsize
        return Queue(world)

    def current_thread():
        return getattr(world.current, "thread", None)

    def urandom(count):
        return choose.randbytes(count)

    lock = bound(Lock)

    def again():
        return Lock(world, again=True)

    threads = {
        "Thread": bound(Thread),
        "Lock": lock,
        "RLock": again,
        "Condition": bound(Condition),
        "Event": bound(Event),
        "current_thread": current_thread,
    }
    queues = {"SimpleQueue": simple, "Queue": bounded}
    times = {
        "monotonic": monotonic,
        "perf_counter": monotonic,
        "sleep": world.sleep,
        "time": lambda: wall_ns() / 1e9,
        "time_ns": wall_ns,
    }
    overlaid = {
        threading: _Overlay(threading, **threads),
        queue: _Overlay(queue, **queues),
        time: _Overlay(time, **times),
        uuid: _Overlay(uuid, uuid4=uuid4),
        os: _Overlay(os, urandom=urandom),
        concurrent.futures.Future: Future,
    }
    for module, names in ((threading, threads), (queue, queues), (time, times)):
        overlaid |= {getattr(module, name): value for name, value in names.items()}
    overlaid[uuid.uuid4], overlaid[os.urandom] = uuid4, urandom
    return overlaid


@contextlib.contextmanager
def installed(world):
    """Make the product run on a scheduler."""
    instead, changed = {id(old): (old, new) for old, new in overlays(world).items()}, []
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in PRODUCT or module is None:
            continue
        for attribute, value in list(vars(module).items()):
            pair = instead.get(id(value))
            if pair is not None:
                changed.append((module, attribute, value))
                setattr(module, attribute, pair[1])
    try:
        yield
    finally:
        for module, attribute, value in changed:
            setattr(module, attribute, value)
