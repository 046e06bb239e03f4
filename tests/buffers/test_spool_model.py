"""The spool against a model, on a disk that loses and reorders unsynced data: its promises hold after every crash."""

from __future__ import annotations

import contextlib
import copy
import errno
import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from capflow.buffers.spool import FullError, Record, items
from tests.kit.disks import DIRECTORY, Crash, Disk
from tests.kit.stepped_spool import SteppedSpool

BYTES_MAX, UNSYNCED_BYTES_MAX = 4000, 1500
LENGTHS = st.sampled_from([0, 1, 50, 200, 300, 900])
SEEDS = st.integers(0, 2**32)


def rarely(limit):
    """Usually None, else a number up to the limit."""
    return st.one_of(st.none(), st.none(), st.none(), st.integers(0, limit))


class SpoolMachine(RuleBasedStateMachine):
    """What was appended, what was promised, and a spool that is crashed wherever it can be."""

    def __init__(self):
        super().__init__()
        self.count = 0
        # What was last appended under each number.
        self.content = {}
        # Promised: every record up to here outlives a crash.
        self.durable = 0
        # Promised: no record up to here is read again.
        self.done = 0
        self.disk = Disk()
        self.start()

    def start(self):
        self.told = []
        self.spool = SteppedSpool(
            DIRECTORY,
            bytes_max=BYTES_MAX,
            segment_bytes=700,
            unsynced_bytes_max=UNSYNCED_BYTES_MAX,
            files=self.disk,
            on_synced=self.told.append,
        )
        self.spool.open()
        self.read = self.acked = self.spool.acknowledged_through
        self.promise()

    def promise(self):
        self.durable = max(self.durable, self.spool.synced_through)
        self.done = max(self.done, self.spool.acknowledged_through)
        assert self.told == sorted(set(self.told))
        assert not self.told or self.told[-1] <= self.spool.synced_through

    def check_left(self, disk):
        """Everything promised is on the disk, in order and right, and nothing that is done with."""
        spool = SteppedSpool(DIRECTORY, bytes_max=BYTES_MAX, files=disk)
        spool.open()
        assert spool.acknowledged_through >= self.done
        expected = spool.acknowledged_through + 1
        while (record := spool.read()) is not None:
            assert isinstance(record, Record), record
            assert (record.id, record.head, bytes(record.body)) == (expected, *self.content[expected])
            expected += 1
        assert expected > self.durable
        assert spool.last >= max(self.durable, self.done)

    def crash(self, choose):
        left = self.disk.crash(choose)
        self.check_left(copy.deepcopy(left))
        self.disk = left
        self.start()

    def guarded(self, left, seed, call):
        """Run something, on a disk that stops after `left` operations; crash the machine when it did."""
        self.disk.left = left
        try:
            call()
        except Crash:
            self.promise()
            self.crash(random.Random(seed).randrange)
        else:
            self.disk.left = None
            self.promise()

    @rule(lengths=st.lists(LENGTHS, min_size=1, max_size=6), left=rarely(8), seed=SEEDS)
    def append(self, lengths, left, seed):
        def call():
            for length in lengths:
                if self.spool._unsynced and self.spool.unsynced_bytes + length + 80 > UNSYNCED_BYTES_MAX:
                    return  # it would wait for its thread
                self.count += 1
                head, body = b"%d" % self.count, (b"%d." % self.count * length)[:length]
                number = self.spool.last + 1
                self.content[number] = (head, body)
                with contextlib.suppress(FullError):
                    assert self.spool.append(head, body) == number

        self.guarded(left, seed, call)

    @rule(left=rarely(12), seed=SEEDS)
    def work(self, left, seed):
        self.guarded(left, seed, self.spool._work)

    @rule(count=st.integers(1, 5))
    def read_some(self, count):
        for _ in range(count):
            record = self.spool.read()
            if record is None and self.spool._reader.failure is not None:  # it is put off, and not lost
                self.spool._reader.again_at = 0.0
                record = self.spool.read()
            if record is None:
                assert self.read == self.spool.last
                return
            self.read += 1
            assert isinstance(record, Record), record
            assert (record.id, record.head, bytes(record.body)) == (self.read, *self.content[self.read])

    @precondition(lambda self: self.read > self.acked)
    @rule(data=st.data())
    def acknowledge(self, data):
        self.acked = data.draw(st.integers(self.acked + 1, self.read))
        self.spool.acknowledge(self.acked)
        self.promise()

    @rule(sync=rarely(0), write=rarely(0), read=rarely(0), code=st.sampled_from([errno.EIO, errno.ENOSPC]))
    def fail_next(self, sync, write, read, code):
        self.disk.fail_sync = None if sync is None else code
        self.disk.fail_write = None if write is None else code
        self.disk.fail_read = None if read is None else code

    @rule(seed=SEEDS)
    def lose_power(self, seed):
        self.crash(random.Random(seed).randrange)

    @precondition(lambda self: not any(inode.forgot for inode in self.disk.now.values()))
    @rule()
    def kill(self):
        """The page cache outlives the process; but if a sync failed, the next process cannot know that it did."""
        self.disk.kill()
        self.check_left(copy.deepcopy(self.disk))
        self.start()

    @rule()
    def close_and_open(self):
        self.disk.fail_sync = self.disk.fail_write = self.disk.fail_read = None
        self.spool._closing = True
        self.spool._work()
        assert not self.spool._unsynced
        self.durable, last = self.spool.last, self.spool.last
        self.spool._release()
        self.disk.locked = False
        self.start()
        assert (self.spool.last, self.spool.acknowledged_through) == (last, self.acked)

    @invariant()
    def stays_in_its_bounds(self):
        assert (
            self.spool.nbytes <= BYTES_MAX + UNSYNCED_BYTES_MAX + 20 * items.HEADER_BYTES
        )  # marks, and records that are written again, come on top
        assert self.spool.unsynced_bytes <= UNSYNCED_BYTES_MAX or len(self.spool._unsynced) == 1


SETTINGS = {"deadline": None, "stateful_step_count": 60, "suppress_health_check": list(HealthCheck)}


def test_promises_hold_through_crashes():
    run_state_machine_as_test(SpoolMachine, settings=settings(max_examples=100, **SETTINGS))


@pytest.mark.long
def test_promises_hold_through_very_many_crashes():
    run_state_machine_as_test(SpoolMachine, settings=settings(max_examples=2000, **SETTINGS))
