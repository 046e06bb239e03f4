"""The sockets, and the threads that drive sessions over them. Nothing else in capflow imports zmq."""

from __future__ import annotations

from capflow.transport.link import SchedulerLink, Staged, WorkerLink
from capflow.transport.sockets import Dealer, Event, Received, Router, Waker
from capflow.transport.zap import new_key

__all__ = ["Dealer", "Event", "Received", "Router", "SchedulerLink", "Staged", "Waker", "WorkerLink", "new_key"]
