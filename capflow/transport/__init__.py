"""The sockets, and the threads that drive sessions over them. Nothing else in capflow imports zmq."""

from __future__ import annotations

from capflow.transport.formerlink import FormerLink
from capflow.transport.outbox import Outbox, left_behind
from capflow.transport.schedulerlink import SchedulerLink
from capflow.transport.sockets import Dealer, Event, Received, Router, Waker
from capflow.transport.taplink import TapLink
from capflow.transport.workerlink import Staged, WorkerLink
from capflow.transport.zap import new_key

__all__ = [
    "Dealer",
    "Event",
    "FormerLink",
    "Outbox",
    "Received",
    "Router",
    "SchedulerLink",
    "Staged",
    "TapLink",
    "Waker",
    "WorkerLink",
    "left_behind",
    "new_key",
]
