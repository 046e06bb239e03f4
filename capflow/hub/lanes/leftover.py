"""The inboxes beside this hub's own. They belong to hubs that ran at the same time, were killed, or had other options.

Inboxes of the same consumer are opened and emptied into its own. Inboxes of other configurations are logged and left
untouched if they hold frames, and removed if they hold none.

A hub could refuse to start while another one has its inbox; then there would be nothing to adopt. But hubs that share
the load of an engine have the same consumers, and so have scripts that are started twice from one directory. With three
such hubs on one machine, all start and store into one data set. With the refusal the second and the third do not start,
and each needs a `spool_dir` of its own. The refusal would save about 125 lines, here and in `inbox` and `writer`.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from capflow import limits
from capflow.buffers.spool import InUseError, heads
from capflow.buffers.spool.report import in_use, remove
from capflow.capture.frame import FrameHeader
from capflow.errors import CapflowError
from capflow.hub.lanes.inbox import INBOXES_MAX, Checkpoint, Inbox, RequestDoneMark, read_head

logger = logging.getLogger("capflow.consumer")

# What follows the name of the consumer in the name of a directory.
_HASH = r"-[0-9a-f]{16}(\.\d+)?"
_INBOX = re.compile(r".+" + _HASH)


def take_beside(inbox: Inbox) -> list[Inbox]:
    """Open and return the other inboxes of the same consumer that no hub has open.

    An inbox that cannot be opened is logged and left untouched.
    """
    inboxes = []
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
            logger.error(
                "an inbox of an earlier hub cannot be opened; its frames do not reach the consumer: %s", e, extra=event
            )
            continue
        inboxes.append(other)
    return inboxes


def tell_of_others(inbox: Inbox, consumer: str) -> None:
    """Log which inboxes hold frames that this consumer does not get because its options changed, and what to do."""
    for place in others(inbox, consumer):
        event = {"event": "inbox_left", "consumer": consumer, "directory": str(place)}
        do = f"start a hub once with its old options and directory; `capflow spool inspect {place}` shows them"
        text = "consumer %s: frames in %s are not given to it, because its options or its directory have changed; %s"
        logger.error(text, consumer, place, do, extra=event)


def others(inbox: Inbox, consumer: str) -> Iterator[Path]:
    """Yield unused inboxes beside this one that hold frames for the same consumer with other options."""
    own = {inbox.place(number) for number in range(1, INBOXES_MAX + 1)}
    named = re.compile(re.escape(consumer) + _HASH)
    for place in sorted(inbox.root.iterdir()):
        if place not in own and named.fullmatch(place.name) and not in_use(place) and waits(place):
            yield place


def collect(root: Path) -> list[Path]:
    """Remove the inboxes below a root that no hub has and in which nothing waits; return them.

    An inbox that was written within `limits.MISSED_S` stays: its hub may be starting again.
    """
    return [place for place in sorted(root.iterdir()) if _INBOX.fullmatch(place.name) and _removed(place)]


def _removed(place: Path) -> bool:
    """Remove an inbox, unless it is used, new or needed; return whether it is gone."""
    try:
        if not _is_old(place) or in_use(place) or waits(place):
            return False
        return remove(place, lambda: not waits(place))
    except (OSError, CapflowError):  # another hub removed it, or it cannot be read
        return False


def waits(place: Path) -> bool:
    """Return whether an inbox holds rows of an unfinished request, or anything unreadable."""
    # The number of the last record, by engine and request.
    last: dict[tuple[str, str], int] = {}
    # The number of the last record with which the consumer is done, by engine and request.
    done: dict[tuple[str, str], int] = {}
    # Requests whose frames were forgotten while they ran.
    unkept: set[tuple[str, str]] = set()
    try:
        for number, head in heads(place):
            match None if head is None else read_head(head):
                case None:
                    return True
                case FrameHeader(engine=engine, requests=requests, finished=finished):
                    names = {*(part.id for part in requests), *(end.id for end in finished)}
                    last |= {(engine, name): number for name in names}
                case RequestDoneMark(engine, request, through):
                    done[engine, request] = through or number
                case Checkpoint() as checkpoint:
                    unkept = {(long.engine, long.request.id) for long in checkpoint.unkept}
                    done |= {(each.engine, each.request): each.through for each in checkpoint.done}
    except (CapflowError, msgspec.MsgspecError, KeyError):  # the last two of another version
        return True
    return bool(unkept - done.keys()) or any(number > done.get(key, 0) for key, number in last.items())


def _is_old(place: Path) -> bool:
    """Return whether a directory is this user's and was not written for a while. Raises OSError."""
    status = place.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        return False
    written = max(entry.stat().st_mtime for entry in (place, *place.iterdir()))
    return abs(time.time() - written) > limits.MISSED_S  # also when the clock was set back
