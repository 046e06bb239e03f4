"""The rates of actions: how many a hub takes of one sender and for one request."""

from __future__ import annotations

from capflow import limits
from capflow.errors import explain

_KEPT_MAX = 4096


class _Bucket:
    """So many actions at once, and so many each second."""

    def __init__(self, per_s: float, at_once: float) -> None:
        self._per_s, self._at_once = per_s, at_once
        # For each name, what is left and when; the least recently used first.
        self._left: dict[str, tuple[float, float]] = {}

    def take(self, name: str, now: float) -> bool:
        """Take one action; return False if there is none left."""
        left, since = self._left.pop(name, (self._at_once, now))
        left = min(self._at_once, left + (now - since) * self._per_s)
        self._left[name] = (left - 1 if left >= 1 else left), now
        if len(self._left) > _KEPT_MAX:
            del self._left[next(iter(self._left))]
        return left >= 1


class ActionRates:
    """The rates of the actions that come through one hub.

    limited: the number of actions that were refused, by `sender` and `request`.
    """

    def __init__(self) -> None:
        self.limited = {"sender": 0, "request": 0}
        self._senders = _Bucket(limits.ACTIONS_PER_S_MAX, limits.ACTIONS_AT_ONCE_MAX)
        self._requests = _Bucket(limits.REQUEST_ACTIONS_PER_S_MAX, limits.REQUEST_ACTIONS_AT_ONCE_MAX)

    def refusal(self, sender: str, request: str, now: float) -> str | None:
        """Return why an action is refused; None if it is taken."""
        do = "send fewer; a Steer replaces the one before it, so only the latest matters"
        if not self._senders.take(sender, now):
            self.limited["sender"] += 1
            expected = f"at most {limits.ACTIONS_PER_S_MAX:,} a second from one sender"
            return explain("actions", got="more", expected=expected, do=do)
        if request and not self._requests.take(request, now):
            self.limited["request"] += 1
            expected = f"at most {limits.REQUEST_ACTIONS_PER_S_MAX:,} a second for one request"
            return explain("actions", got="more", expected=expected, do=do)
        return None
