"""The sockets, and the threads that drive sessions over them. Nothing else in capflow imports zmq."""

from __future__ import annotations

from capflow.transport.link import FormerLink, SchedulerLink, WorkerLink
from capflow.transport.outbox import Outbox, left_behind
from capflow.transport.sockets import Dealer, Event, Router, Waker

__all__ = ["Dealer", "Event", "FormerLink", "Outbox", "Router", "SchedulerLink", "Waker", "WorkerLink", "left_behind"]
