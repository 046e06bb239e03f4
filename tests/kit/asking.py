"""Clients that ask for an action on a thread of their own, and wait for its outcome."""

from __future__ import annotations

import contextlib
import threading

from capflow.errors import CapflowError
from capflow.transport.client import Client
from tests.kit.waiting import eventually


def ask(address, action, outcomes):
    """Ask for an action; put the outcome, or the error, into a list."""
    try:
        with Client(address) as client:
            outcomes.append(client.act(action, 20))
    except CapflowError as e:
        outcomes.append(e)


@contextlib.contextmanager
def asking(address, action):
    """Have a client ask for an action; the block has the list that the outcome, or the error, is put into."""
    outcomes = []
    thread = threading.Thread(target=ask, args=(address, action, outcomes))
    thread.start()
    try:
        yield outcomes
    finally:
        thread.join(30)


def came(link):
    """Wait until an action waits in a scheduler's link, and leave it there."""
    seen = []
    eventually(lambda: link.actions(lambda act: bool(seen.append(act))) or seen)
