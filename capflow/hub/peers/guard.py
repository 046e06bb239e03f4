"""The guard: what each peer of a hub may do, and which peers it does not listen to for a while.

It belongs to the hub's thread. A hub with a key knows its peers by their keys, and asks the allow-list about each
message, and about every peer when the list has changed, so that a revoked key is sent nothing from then on; the hub's
own key has every right. A hub without a key lets everyone do everything, except that off loopback nobody steers.

A peer that breaks the protocol `limits.OFFENCES_MAX` times within `limits.OFFENCE_WINDOW_S` is ignored for
`limits.IGNORED_S`. It is known by its key, and without one by its connection.
"""

from __future__ import annotations

from dataclasses import dataclass

from capflow import limits
from capflow.buffers.newest import keep_newest
from capflow.errors import explain
from capflow.transport.keys import RIGHTS, AllowList

ACTIONS_OFF = explain(
    "actions are off",
    got="a hub without keys, off loopback",
    expected="one that only this machine can reach, for anyone could send them",
    do="give it a key with --key",
)


class Guard:
    """Who may do what.

    own: the hub's public key, "" without one.
    allowed: its list.
    local: whether only this machine reaches it.
    """

    def __init__(self, own: str = "", allowed: AllowList | None = None, *, local: bool = True) -> None:
        self.own = own
        self.offences = Offences()
        self._allowed = allowed
        self._local = local

    @property
    def version(self) -> int:
        """Which state of the allow-list this is; 0 without one."""
        return 0 if self._allowed is None else self._allowed.version

    def refresh(self) -> None:
        """Look whether the allow-list has changed."""
        if self._allowed is not None:
            self._allowed.refresh()

    def admits(self, public: str) -> bool:
        """Return whether a key may connect, by the list as it is now."""
        self.refresh()
        return self.allows(public)

    def allows(self, public: str) -> bool:
        """Return whether a key may stay connected, by the list at the last `refresh`."""
        return public == self.own or (self._allowed is not None and self._allowed.find(public) is not None)

    def refusal(self, user: str, *rights: str) -> str | None:
        """Return why a user may not do what any of these rights allows; None when it may."""
        if self._allowed is None:
            return ACTIONS_OFF if "steer" in rights and len(rights) == 1 and not self._local else None
        if user == self.own:
            return None
        entry = self._allowed.find(user)
        if entry is None:
            return explain(f"key {user}", got="one that is not allowed", do=_allow(user, "NAME", rights[:1]))
        if entry.rights.intersection(rights):
            return None
        wanted = [right for right in RIGHTS if right in entry.rights or right == rights[0]]
        return explain(
            f"key {entry.name}",
            got=f"the right to {' and '.join(r for r in RIGHTS if r in entry.rights)}",
            expected=f"the right to {' or '.join(rights)}",
            do=_allow(user, entry.name, wanted),
        )


def _allow(public: str, name: str, rights: list[str] | tuple[str, ...]) -> str:
    return f"on the hub's machine: capflow keys allow {public} --name {name} --rights {','.join(rights)}"


@dataclass
class _Offender:
    """A peer that broke the protocol."""

    # When the window began in which offences are counted.
    since: float
    # The number of offences in the window.
    count: int = 0
    ignored_until: float = 0.0


class Offences:
    """The peers that broke the protocol lately: at most `limits.SESSIONS_MAX`; the oldest is forgotten first."""

    def __init__(self) -> None:
        # The offenders, by key or by connection.
        self._offenders: dict[bytes | str, _Offender] = {}

    def ignored(self, who: bytes | str, now: float) -> bool:
        """Return whether a peer is not listened to."""
        offender = self._offenders.get(who)
        return offender is not None and now < offender.ignored_until

    def note(self, who: bytes | str, now: float) -> int:
        """Note an offence; return how many there were in the window.

        From `limits.OFFENCES_MAX` on the peer is ignored.
        """
        offender = self._offenders.pop(who, None)
        if offender is None or now - offender.since > limits.OFFENCE_WINDOW_S:
            offender = _Offender(now)
        offender.count += 1
        if offender.count >= limits.OFFENCES_MAX:
            offender.ignored_until = now + limits.IGNORED_S
            offender.since = -limits.OFFENCE_WINDOW_S  # after that, counting starts from zero
        self._offenders[who] = offender
        keep_newest(self._offenders, limits.SESSIONS_MAX)
        return offender.count
