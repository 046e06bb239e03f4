"""The inboxes of a consumer that lie beside its own: left by hubs that ran at the same time as another, or that it was configured otherwise for.

The first are taken, and emptied into its own. The others no hub takes that runs as this one does: they are told of, and left alone.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

from capflow.errors import CapflowError
from capflow.inbox import INBOXES_MAX, Inbox
from capflow.spool import InUseError, heads
from capflow.spool.report import in_use

logger = logging.getLogger("capflow.consumer")

_HASH = r"-[0-9a-f]{16}(\.\d+)?"  # behind the name of the consumer, in that of a directory


def take_beside(inbox: Inbox) -> list[Inbox]:
    """Return, opened, the other inboxes of the same consumer that no hub has. What cannot be opened is left alone, and said."""
    found = []
    for number in range(1, INBOXES_MAX + 1):
        place = inbox.place(number)
        if place == inbox.directory or not place.is_dir():
            continue
        other = inbox.another()
        try:
            other.open_at(place)
        except InUseError:  # a hub beside this one
            continue
        except CapflowError as e:
            event = {"event": "inbox_left", "directory": str(place)}
            logger.error("what a hub left is not given to its consumer: %s", e, extra=event)
            continue
        found.append(other)
    return found


def tell_of_others(inbox: Inbox, consumer: str) -> None:
    """Log which inboxes hold frames for a consumer of this name that is not given them, and what to do."""
    for place in others(inbox, consumer):
        event = {"event": "inbox_left", "consumer": consumer, "directory": str(place)}
        do = f"start a hub once with the options and in the directory of then; `capflow spool inspect {place}` shows what it is"
        text = "consumer %s: frames wait in %s, which are not given to it: its options or its directory were others; %s"
        logger.error(text, consumer, place, do, extra=event)


def others(inbox: Inbox, consumer: str) -> Iterator[Path]:
    """Yield the directories beside an inbox that hold frames for a consumer of this name with other options, and that nobody has."""
    own = {inbox.place(number) for number in range(1, INBOXES_MAX + 1)}
    named = re.compile(re.escape(consumer) + _HASH)
    for place in sorted(inbox.root.iterdir()):
        if place in own or not named.fullmatch(place.name) or in_use(place):
            continue
        try:
            holds = any(head[:1] == b"F" for head in heads(place))
        except CapflowError:  # nobody can say
            holds = True
        if holds:
            yield place
