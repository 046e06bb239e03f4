"""The address of a hub: the default, the valid forms, and the lock that keeps two hubs off one address.

By default a hub listens on a Unix socket in a directory that only its user can enter. TCP beyond loopback needs keys,
unless the user allows it with `insecure`. The address of a hub with a key holds its public key: `tcp://KEY@HOST:PORT`.

A process can bind a socket file while another process listens on it. So a hub locks a file beside the socket; the
system releases the lock when the process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import re
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from capflow.errors import CapflowError, UsageError, explain
from capflow.system.runtime import LOCK_SUFFIX, private_name, runtime_directory

ENVIRONMENT_VARIABLE = "CAPFLOW_HUB"
FORMS = "ipc:///ABSOLUTE/PATH, tcp://HOST:PORT or tcp://KEY@HOST:PORT"

_SOCKET_PATH_BYTES_MAX = 107  # sun_path, less its final zero
_LOCK_TRIES = 26  # `collect` holds the lock for a moment
_LOCK_PAUSE_S = 0.02  # between two tries
_PORT_MAX = 65_535
_KEYED = re.compile(r"tcp://([0-9a-f]{64})@")


def default_address() -> str:
    """Return the address in `CAPFLOW_HUB`, or else the one in the runtime directory."""
    return os.environ.get(ENVIRONMENT_VARIABLE) or f"ipc://{runtime_directory() / 'hub.sock'}"


def private_address(name: str) -> str:
    """Return an address in the runtime directory that no other process uses."""
    return f"ipc://{runtime_directory() / private_name(name)}.sock"


def check_address(address: str, *, insecure: bool = False, where: str = "address") -> str:
    """Return the address if it is valid and safe.

    Raises UsageError if it is not an address, or if it is TCP beyond loopback without a hub's key, unless `insecure`.

    where: the beginning of the error message.
    """
    scheme, separator, rest = address.partition("://")
    if not separator or scheme not in ("ipc", "tcp") or not rest:
        raise UsageError(explain(where, got=address, expected=FORMS))
    if scheme == "ipc":
        _check_path(rest, where, address)
    else:
        _check_tcp(without_key(address).removeprefix("tcp://"), where, address)
        if not insecure and hub_key(address) is None and not is_local(address):
            raise UsageError(
                explain(
                    where,
                    got=address,
                    expected="a loopback or ipc address, or keys",
                    do="see `capflow keys`; without keys everyone who reaches the address can read the captured rows; "
                    "--insecure allows that",
                )
            )
    return address


def hub_key(address: str) -> str | None:
    """Return the public key in an address; None if it has none."""
    match = _KEYED.match(address)
    return match[1] if match else None


def without_key(address: str) -> str:
    """Return the address without the key, as a socket takes it."""
    return _KEYED.sub("tcp://", address)


def with_key(address: str, public: str) -> str:
    """Return the address with the hub's public key, for its peers."""
    return f"tcp://{public}@{without_key(address).removeprefix('tcp://')}"


def is_local(address: str) -> bool:
    """Return whether only this machine can reach the address."""
    scheme, _, rest = without_key(address).partition("://")
    if scheme != "tcp":
        return True
    host = rest.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a host name or an interface may be anywhere


def is_listening(address: str, timeout_s: float = 0.25) -> bool:
    """Return whether a process listens at an address. `timeout_s` bounds the wait for a silent machine."""
    scheme, _, rest = without_key(address).partition("://")
    try:
        if scheme == "tcp":
            host, _, port = rest.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
        else:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
                peer.settimeout(timeout_s)
                peer.connect(rest)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def held(address: str) -> Iterator[None]:
    """Reserve the address against other hubs on this machine.

    Raises CapflowError if a hub listens there already, and UsageError if others can enter the socket's directory. TCP
    needs no lock: the port is exclusive.
    """
    if not address.startswith("ipc://"):
        yield
        return
    listening = Path(address.removeprefix("ipc://"))
    path = listening.with_name(listening.name + LOCK_SUFFIX)
    mode = path.parent.stat().st_mode
    if mode & 0o077:
        do = f"name a socket in a directory of your own, or run: chmod 700 {path.parent}"
        directory = f"cannot listen at {address}: its directory"
        raise UsageError(explain(directory, got=stat.filemode(mode), expected="drwx------", do=do))
    lock = _lock(path, address)
    try:
        yield
    finally:
        if listening.is_socket():
            listening.unlink(missing_ok=True)
        path.unlink(missing_ok=True)  # while locked: a process that locks a removed file tries again
        os.close(lock)


def _lock(path: Path, address: str) -> int:
    """Lock a file at the path and return its descriptor."""
    while True:
        try:
            lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as e:
            raise CapflowError(explain(f"cannot listen at {address}", got=f"{path}: {e.strerror}")) from e
        if not _flock(lock):
            os.close(lock)
            raise in_use(address)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), path.stat()):
                return lock
        os.close(lock)


def _flock(lock: int) -> bool:
    """Try to lock a file; return whether it is locked now."""
    for tried in range(_LOCK_TRIES):
        time.sleep(_LOCK_PAUSE_S if tried else 0)
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    return False


def in_use(address: str) -> CapflowError:
    """Return the error for an address at which a hub listens already."""
    return CapflowError(
        explain(f"address {address} is in use", do="stop the hub that listens there, or name another with --address")
    )


def _check_path(path: str, where: str, address: str) -> None:
    if not path.startswith("/"):
        raise UsageError(explain(where, got=address, expected="an absolute path: ipc:///ABSOLUTE/PATH"))
    if len(os.fsencode(path)) > _SOCKET_PATH_BYTES_MAX:
        raise UsageError(explain(where, got=address, expected=f"a path of at most {_SOCKET_PATH_BYTES_MAX} bytes"))
    if not Path(path).parent.is_dir():
        raise UsageError(explain(where, got=address, expected="a path in a directory that exists"))
    if Path(path).is_dir():
        raise UsageError(explain(where, got=address, expected="the path of a socket, not of a directory"))


def _check_tcp(rest: str, where: str, address: str) -> None:
    host, _, port = rest.rpartition(":")
    if not host or not port.isdecimal() or int(port) > _PORT_MAX or any(c in host for c in "/@ ;"):
        raise UsageError(explain(where, got=address, expected=f"tcp://HOST:PORT with a port of 0..{_PORT_MAX}"))
