"""Keys: the identity of a peer on TCP, and its rights at a hub.

A key is a CURVE25519 pair. Its public half, 64 hexadecimal digits, identifies the peer to the hub. Keys are in one
directory that only their owner can enter:

| file | content |
|---|---|
| `NAME.key` | a pair, in two lines `public HEX` and `secret HEX` |
| `allowed` | the keys that may connect to the hub, a line `PUBLIC RIGHTS NAME` each; `#` begins a comment |

Invariants: a file or directory that another user can read or write is refused, not repaired. No message, representation
or address holds a secret.

Why these are not the certificates of `zmq.auth`: `create_certificates` leaves the secret readable by everyone (0644
with the usual umask) and overwrites an existing key. Its certificates have no rights, and existing keys would have to
be made again.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from capflow import limits
from capflow.errors import CapflowError, UsageError, explain
from capflow.files import make_directory, whole_file
from capflow.transport.address import hub_key

logger = logging.getLogger("capflow.keys")

ENVIRONMENT_VARIABLE = "CAPFLOW_KEY"
RIGHTS: tuple[str, ...] = ("capture", "read", "steer")
"""The rights: `capture`, be an engine; `read`, ask for results and status; `steer`, act on running requests."""

_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{limits.KEY_NAME_LENGTH_MAX - 1}}}")
_HEX = re.compile(r"[0-9a-f]{64}")
_NAME_EXPECTED = f"1..{limits.KEY_NAME_LENGTH_MAX} letters, digits, '.', '_' and '-'"
_ALLOWED = "allowed"


@dataclass(frozen=True)
class KeyPair:
    """A key: `public` and `secret`, 64 hexadecimal digits each."""

    public: str
    secret: str = field(repr=False)


class Allowed(NamedTuple):
    """A key that may connect, with its rights and its owner's name."""

    public: str
    rights: frozenset[str]
    name: str


def directory() -> Path:
    """Return the directory of a user's keys: `capflow/keys` in `XDG_CONFIG_HOME`, or else in `~/.config`."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "capflow" / "keys"


def key_directory(path: Path) -> Path:
    """Return the directory, made if it is missing. Raises UsageError if others can enter it."""
    try:
        make_directory(path)
    except OSError as e:
        expected, do = "one that can be made", "set XDG_CONFIG_HOME to a directory that you can write to"
        raise CapflowError(
            explain(f"directory of keys {path}", got=e.strerror or str(e), expected=expected, do=do)
        ) from e
    check_directory(path)
    return path


def check_directory(path: Path) -> None:
    """Raise UsageError if others can enter a directory of keys."""
    _check_private(path, path.stat(), "drwx------", "700")


def find_key(key: str) -> Path:
    """Return the file of a key: `key` is a path if it has a slash, else a name in the user's directory."""
    if "/" in key:
        return Path(key).absolute()
    return directory() / f"{key.removesuffix('.key')}.key"


def read_key(path: Path, *, where: str = "--key") -> KeyPair:
    """Return the key in a file. Raises UsageError if there is none, or if others can read the file."""
    text = _read_private(path, where)
    fields = dict(line.split(maxsplit=1) for line in text.splitlines() if len(line.split()) == 2)
    public, secret = fields.get("public", "").strip(), fields.get("secret", "").strip()
    if not _HEX.fullmatch(public) or not _HEX.fullmatch(secret):
        raise UsageError(explain(where, got=str(path), expected="a file that `capflow keys new` made"))
    return KeyPair(public, secret)


def write_key(where: Path, name: str, pair: KeyPair) -> Path:
    """Write a key to a new file that only its owner can read; return its path. Raises UsageError if the file exists."""
    if not _NAME.fullmatch(name):
        raise UsageError(explain("name of a key", got=name, expected=_NAME_EXPECTED))
    path = where / f"{name}.key"
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileExistsError as e:
        do = "choose another name, or remove the file if nothing uses it"
        raise UsageError(explain(f"key {path}", got="a file that exists", do=do)) from e
    except OSError as e:
        expected, do = "a file that can be written", f"check the room and the permissions of {path.parent}"
        raise CapflowError(explain(f"key {path}", got=e.strerror or str(e), expected=expected, do=do)) from e
    with os.fdopen(handle, "w", encoding="ascii") as file:
        os.fchmod(handle, 0o600)  # whatever the umask
        file.write(f"public {pair.public}\nsecret {pair.secret}\n")
    return path


def peer_key(address: str, key: str | None) -> KeyPair | None:
    """Return this peer's key for the hub at an address: the one named, or else that of `CAPFLOW_KEY`.

    None if the address has no hub key. Raises UsageError if a key is needed and missing, or named and not needed.
    """
    path = peer_key_path(address, key)
    return None if path is None else read_key(path, where="--key" if key is not None else ENVIRONMENT_VARIABLE)


def peer_key_path(address: str, key: str | None) -> Path | None:
    """Return the path of the key that `peer_key` reads; the path may be sent to other processes, the key may not."""
    if hub_key(address) is None:
        if key is not None:
            expected = "an address with the hub's key, tcp://KEY@HOST:PORT, as the hub prints it"
            raise UsageError(explain("--key", got=f"the address {address}", expected=expected))
        return None
    named = key or os.environ.get(ENVIRONMENT_VARIABLE)
    if not named:
        do = f"make one with `capflow keys new NAME`, and name it with --key or {ENVIRONMENT_VARIABLE}"
        raise UsageError(
            explain("--key", got="none", expected="a key, because this hub admits only peers with one", do=do)
        )
    return find_key(named)


def parse_rights(text: str, *, where: str = "--rights") -> frozenset[str]:
    """Return the rights in a text, separated by commas. Raises UsageError for an unknown right, and for none."""
    rights = frozenset(part.strip() for part in text.split(","))
    if not rights <= set(RIGHTS):
        raise UsageError(explain(where, got=text, expected=f"some of {','.join(RIGHTS)}"))
    return rights


class AllowList:
    """The keys that may connect to a hub: the file `allowed` beside its key, read again after each change.

    A missing file, or one that others can write, allows nobody. An invalid line is skipped. Both are logged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path / _ALLOWED
        # How often the file was read.
        self.version = 0
        # The entries by public key; `refresh` replaces them.
        self._entries: dict[str, Allowed] = {}
        # The state of the file when it was read; None if it was missing.
        self._seen: tuple[int, ...] | None = (-1,)

    def find(self, public: str) -> Allowed | None:
        """Return the entry of a key, as it was at the last `refresh`."""
        return self._entries.get(public)

    def refresh(self) -> None:
        """Read the file again if it has changed."""
        try:
            now = self.path.stat()
            seen = (now.st_mtime_ns, now.st_size, now.st_ino, now.st_mode, now.st_uid)
        except OSError:
            seen = None
        if seen == self._seen:
            return
        self._seen = seen
        self.version += 1
        self._entries = {}
        if seen is None:
            logger.warning("nobody may connect: no file %s; see `capflow keys allow`", self.path)
            return
        try:
            text = _read_private(self.path, "allow-list")
        except CapflowError as e:
            logger.error("nobody may connect: %s", e)
            return
        self._entries = {entry.public: entry for entry in _entries(text, self.path)}

    def entries(self) -> list[Allowed]:
        """Return all entries, by name."""
        self.refresh()
        return sorted(self._entries.values(), key=lambda entry: (entry.name, entry.public))

    def allow(self, public: str, rights: Iterable[str], name: str) -> None:
        """Allow a key to connect with these rights, which replace its earlier ones.

        Raises UsageError if the key or the name is not valid, or if another key has the name.
        """
        if not _HEX.fullmatch(public):
            raise UsageError(explain("key", got=public, expected="the 64 digits that `capflow keys new` prints"))
        if not _NAME.fullmatch(name):
            raise UsageError(explain("--name", got=name, expected=_NAME_EXPECTED))
        with self._changing() as entries:
            if any(entry.name == name and entry.public != public for entry in entries.values()):
                do = f"choose another name, or revoke it first: capflow keys revoke {name}"
                raise UsageError(explain("--name", got=f"{name}, which another key has", do=do))
            entries[public] = Allowed(public, frozenset(rights), name)

    def revoke(self, who: str) -> Allowed:
        """Forbid a key to connect, by its name or itself; return its entry. Raises UsageError if there is none."""
        with self._changing() as entries:
            for entry in entries.values():
                if who in (entry.name, entry.public):
                    return entries.pop(entry.public)
            names = ", ".join(sorted(entry.name for entry in entries.values())) or "nobody"
            raise UsageError(explain("key", got=who, expected=f"one that is allowed: {names}"))

    @contextlib.contextmanager
    def _changing(self) -> Iterator[dict[str, Allowed]]:
        """Yield the entries to change, then write the whole file; one writer at a time."""
        handle = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            text = _read_private(self.path, "allow-list") if self.path.exists() else ""
            entries = {entry.public: entry for entry in _entries(text, self.path)}
            yield entries
            lines = [f"{e.public} {','.join(r for r in RIGHTS if r in e.rights)} {e.name}\n" for e in entries.values()]
            head = "# PUBLIC-KEY RIGHTS NAME; `capflow keys allow` and `revoke` write this file\n"
            with whole_file(self.path) as file:
                file.write("".join([head, *lines]).encode("ascii"))
        finally:
            os.close(handle)


def _entries(text: str, path: Path) -> Iterator[Allowed]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        fields = line.split()
        try:
            public, rights, name = fields
            if _HEX.fullmatch(public) and _NAME.fullmatch(name):
                yield Allowed(public, parse_rights(rights), name)
                continue
        except ValueError:  # UsageError is a ValueError
            pass
        logger.error("%s", explain(f"{path}:{number}", got=line, expected="PUBLIC-KEY RIGHTS NAME; it allows nobody"))


def _read_private(path: Path, where: str) -> str:
    """Return the text of a file. Raises UsageError unless only its owner can read it and enter its directory."""
    try:
        check_directory(path.parent)
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise UsageError(explain(where, got=f"{path}, which is not a file", expected="a file"))
            _check_private(path, status, "-rw-------", "600")
            return file.read(limits.KEY_FILE_BYTES_MAX).decode("ascii", "replace")
    except OSError as e:
        do = "make a key with `capflow keys new NAME`"
        raise UsageError(explain(where, got=f"{path}: {e.strerror}", expected="a file of keys", do=do)) from e


def _check_private(path: Path, status: os.stat_result, expected: str, mode: str) -> None:
    if status.st_mode & 0o077:
        raise UsageError(
            explain(str(path), got=stat.filemode(status.st_mode), expected=expected, do=f"run: chmod {mode} {path}")
        )
    if os.getuid() not in (0, status.st_uid):
        raise UsageError(explain(str(path), got=f"a file of user {status.st_uid}", expected=f"one of {os.getuid()}"))
