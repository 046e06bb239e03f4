"""Where a hub listens: the default, what may be asked for, and the lock that keeps two hubs off one address.

By default a hub listens on a Unix socket in a directory that only its user can enter. TCP off loopback needs keys, unless the
user says `insecure`. The address of a hub that has a key names its public half: `tcp://KEY@HOST:PORT`.

A socket file can be bound over while another process listens on it, so a hub holds a lock on a file
beside it for as long as it lives; the lock goes with the process, however that ends.
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
_LOCK_TRIES = 6  # for a lock, this long after one another: `collect` holds it for a moment
_LOCK_PAUSE_S = 0.02
_PORT_MAX = 65_535
_KEYED = re.compile(r"tcp://([0-9a-f]{64})@")


def default_address() -> str:
    """Return the address that `CAPFLOW_HUB` names, or else the one in the runtime directory."""
    return os.environ.get(ENVIRONMENT_VARIABLE) or f"ipc://{runtime_directory() / 'hub.sock'}"


def private_address(name: str) -> str:
    """Return an address in the runtime directory that no other process has."""
    return f"ipc://{runtime_directory() / private_name(name)}.sock"


def check_address(address: str, *, insecure: bool = False, where: str = "address") -> str:
    """Return the address if it is one, and one that is safe to use.

    Raises UsageError for anything else, and for TCP off loopback without a hub's key unless `insecure`.
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
                    do="see `capflow keys`; without them anyone who reaches this one can read what is captured, and "
                    "--insecure allows it all the same",
                )
            )
    return address


def hub_key(address: str) -> str | None:
    """Return the public key that an address names, None when it names none."""
    found = _KEYED.match(address)
    return found[1] if found else None


def without_key(address: str) -> str:
    """Return the address as a socket takes it."""
    return _KEYED.sub("tcp://", address)


def with_key(address: str, public: str) -> str:
    """Return the address with the hub's public key, as its peers need it."""
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
        return False  # a name or an interface: it may be anywhere


def is_listening(address: str, timeout_s: float = 0.25) -> bool:
    """Return whether anything listens at an address, which is known at once where nothing does; a machine that is silent is given so long."""
    scheme, _, rest = without_key(address).partition("://")
    try:
        if scheme == "tcp":
            host, _, port = rest.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
        else:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as found:
                found.settimeout(timeout_s)
                found.connect(rest)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def held(address: str) -> Iterator[None]:
    """Hold the address against other hubs on this machine.

    Raises CapflowError when a hub listens there already, and UsageError for a socket in a directory that others can enter. TCP
    needs no lock: the port is one.
    """
    if not address.startswith("ipc://"):
        yield
        return
    listening = Path(address.removeprefix("ipc://"))
    path = listening.with_name(listening.name + LOCK_SUFFIX)
    mode = path.parent.stat().st_mode
    if mode & 0o077:
        do = f"name a socket in a directory of your own, or run: chmod 700 {path.parent}"
        what = f"cannot listen at {address}: its directory"
        raise UsageError(explain(what, got=stat.filemode(mode), expected="drwx------", do=do))
    lock = _lock(path, address)
    try:
        yield
    finally:
        if listening.is_socket():
            listening.unlink(missing_ok=True)
        path.unlink(missing_ok=True)  # before it is let go: whoever locks a file that is gone tries again
        os.close(lock)


def _lock(path: Path, address: str) -> int:
    """Return the descriptor of a file at the path that this process has locked."""
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
    """Lock a file; return whether no other process has it locked."""
    for tried in range(_LOCK_TRIES):
        time.sleep(_LOCK_PAUSE_S if tried else 0)
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    return False


def in_use(address: str) -> CapflowError:
    """Return the error that says that someone listens at the address already."""
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
