"""The scheduler: virtual time, and tasks that run one at a time, in an order that a seed chooses.

A task is a greenlet that stands for a thread. It gives up its turn only at scheduling points: where it waits, and where
it calls `point`. So two runs with the same seed make the same steps. A process is a group of tasks that are killed
together.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque

import greenlet
import xxhash

TRACE_KEPT = 400  # lines, for a report


class Killed(BaseException):
    """The process of this task was killed."""


class LivelockError(AssertionError):
    """The run made too many steps, or took too much virtual time."""


class Process:
    """A group of tasks with its own monotonic clock.

    deaths_in: the number of scheduling points until it is killed; None: never.
    """

    def __init__(self, world, name):
        self.world, self.name = world, name
        self.dead = False
        self.tasks = []
        self.deaths_in = None
        self.clock_offset = world.choose.uniform(1, 10_000)
        # Called when it is killed, before any of its tasks unwinds.
        self.on_kill = []

    def spawn(self, target, name, *args):
        """Start a task."""
        task = Task(self, name, target, args)
        self.tasks.append(task)
        self.world.make_ready(task)
        return task

    def kill(self):
        """End every task where it stands."""
        if self.dead:
            return
        self.dead = True
        self.world.trace(f"kill {self.name}")
        for call in self.on_kill:
            call()
        for task in self.tasks:
            if not task.done and task is not self.world.current:
                self.world.make_ready(task)


class Task:
    """One virtual thread. woken: what `block` returns: whether it was woken, and not by its timeout."""

    def __init__(self, process, name, target, args):
        self.process, self.name = process, name
        self.number = next(process.world.numbers)
        self.done = False
        self.error = None
        self.ready = False
        self.woken = False
        # The number of the wait that it is in: a timer of another one is void.
        self.wait = 0
        # Tasks that join this one.
        self.waiters = []
        self._target, self._args = target, args
        self.greenlet = greenlet.greenlet(self._run, process.world.main)

    def _run(self):
        world = self.process.world
        try:
            if not self.process.dead:
                self._target(*self._args)
        except (Killed, greenlet.GreenletExit):
            pass
        except BaseException as e:  # noqa: BLE001  it is reported at the end of the run
            self.error = e
            world.failures.append((self, e))
        finally:
            self.done = True
            for waiter in self.waiters:
                world.make_ready(waiter)


class Scheduler:
    """Virtual time and its tasks.

    switches: the probability that a scheduling point gives the turn to another task.
    step_s: the time that a step takes.
    """

    def __init__(self, seed, *, steps_max=400_000, seconds_max=3600.0):
        self.choose = random.Random(seed)
        self.numbers = itertools.count()
        self.main = greenlet.getcurrent()
        self.now = 0.0
        self.wall_offset = 1.7e9
        self.steps = 0
        self.steps_max, self.seconds_max = steps_max, seconds_max
        # A number of steps, after which `run` returns.
        self.stop_at = None
        self.switches = self.choose.choice([0.02, 0.1, 0.3])
        self.step_s = self.choose.choice([1e-6, 1e-5, 2e-4])
        # How likely a task that is woken waits some more.
        self.late = self.choose.choice([0.0, 0.02, 0.1])
        self.current = None
        # The process of tasks that belong to none; it is never killed.
        self.outside = Process(self, "world")
        self.failures = []
        self.lines = deque(maxlen=TRACE_KEPT)
        self.on_line = None
        self._digest = xxhash.xxh3_64()
        self._ready = []
        self._timers = []
        self._orders = itertools.count()

    # For anyone.

    @property
    def process(self):
        """The process of the task that runs."""
        return self.current.process if self.current is not None else self.outside

    @property
    def digest(self):
        """A number that two runs have in common when they made the same steps."""
        return self._digest.intdigest()

    def trace(self, line):
        """Note what happens."""
        self._digest.update(line.encode())
        self.lines.append((self.steps, self.now, self.current, line))
        if self.on_line is not None:
            self.on_line(self.steps, self.now, self.current, line)

    def at(self, seconds, call):
        """Call something that does not wait, that many seconds from now."""
        self.at_time(self.now + max(0.0, seconds), call)

    def at_time(self, when, call):
        """Call something that does not wait, then; what is for the same time is called in order."""
        heapq.heappush(self._timers, (when, next(self._orders), call))

    def make_ready(self, task):
        """Let a task go on."""
        if not task.ready and not task.done:
            task.ready = True
            self._ready.append(task)

    # For tasks.

    def point(self, label=""):
        """Perhaps let another task run; raises Killed when the process was killed."""
        process = self.process
        self.steps += 1
        self.now += self.step_s
        if process.deaths_in is not None and not process.dead:
            process.deaths_in -= 1
            if process.deaths_in <= 0:
                self.trace(f"die at {label}")
                process.kill()
        if process.dead:
            raise Killed
        if self.current is not None and (self.choose.random() < self.switches or self.steps > self.steps_max):
            self.make_ready(self.current)
            self._switch()

    def block(self, seconds=None):
        """Wait to be woken, for at most so long; return whether it was."""
        task = self.current
        assert task is not None, "only a task may wait"
        if task.process.dead:
            raise Killed
        task.woken = False
        task.wait += 1
        wait = task.wait
        if seconds is not None:

            def time_out():
                if task.wait == wait:
                    self.make_ready(task)

            self.at(seconds, time_out)
        self._switch()
        task.wait += 1
        return task.woken

    def wake(self, task):
        """Wake a task that is in `block`, now or a little later."""
        task.woken = True
        if self.late and self.choose.random() < self.late:
            wait = task.wait

            def later():
                if task.wait == wait:
                    self.make_ready(task)

            self.at(self.choose.expovariate(20.0), later)
        else:
            self.make_ready(task)

    def sleep(self, seconds):
        """Wait for so long."""
        self.point("sleep")
        self.block(max(0.0, seconds))

    def _switch(self):
        task = self.current
        self.main.switch()
        assert self.current is task
        if task.process.dead:
            raise Killed

    # For the owner.

    def run(self, until):
        """Run tasks until something holds, or nobody has anything to do."""
        while not until():
            if self.stop_at is not None and self.steps >= self.stop_at:
                return
            if self._ready:
                self.steps += 1
                self.now += self.step_s
                if self.steps > self.steps_max or self.now > self.seconds_max:
                    raise LivelockError(f"{self.steps} steps, {self.now:.0f} s")
                index = self.choose.randrange(len(self._ready)) if len(self._ready) > 1 else 0
                task = self._ready[index]
                self._ready[index] = self._ready[-1]
                self._ready.pop()
                self._resume(task)
            elif self._timers:
                when, _, call = heapq.heappop(self._timers)
                self.now = max(self.now, when)
                call()
                while self._timers and self._timers[0][0] <= self.now:
                    heapq.heappop(self._timers)[2]()
            else:
                return

    def _resume(self, task):
        task.ready = False
        self.current = task
        self._digest.update(b"%d %d" % (task.number, self.steps))
        try:
            if task.process.dead and task.greenlet:
                task.greenlet.throw(Killed)
            else:
                task.greenlet.switch()
        finally:
            self.current = None
        if len(task.process.tasks) > 64:
            task.process.tasks = [each for each in task.process.tasks if not each.done]
