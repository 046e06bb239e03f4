"""The runtime directory: the sockets and directories of running processes, which only their user can enter.

What a process has there for itself has its number in its name and is locked for as long as the process lives, so
that `collect` tells what a killed process left from what another process with the same number uses.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from capflow.errors import CapflowError, explain

LOCK_SUFFIX = ".lock"
"""Behind the name of a socket, in that of the file that its process locks."""

_ALIVE = "alive"  # in a private directory, locked by its process
_PRIVATE = re.compile(r"[a-z]+-\d+-[0-9a-f]{6}(\.sock(\.lock)?)?")


def runtime_directory() -> Path:
    """Return this user's directory for sockets, made if need be, which no other user can enter.

    Raises CapflowError when it belongs to someone else, is a link, or is open to others.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    directory = Path(base) / "capflow" if base and Path(base).is_dir() else Path(f"/tmp/capflow-{os.getuid()}")  # noqa: S108  checked below
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        found = directory.lstat()
    except OSError as e:
        raise CapflowError(explain(f"directory for sockets {directory}", got=e.strerror or str(e))) from e
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise CapflowError(
            explain(
                f"directory for sockets {directory}",
                got=f"mode {stat.filemode(found.st_mode)} of user {found.st_uid}",
                expected=f"drwx------ of user {os.getuid()}",
                do="remove it, or name another address with --address",
            )
        )
    return directory


def private_name(name: str) -> str:
    """Return a name in the runtime directory that no other process has."""
    return f"{name}-{os.getpid()}-{os.urandom(3).hex()}"


def private_directory(name: str) -> Path:
    """Make a directory in the runtime directory that is this process's own; its maker removes it. Raises CapflowError."""
    directory = runtime_directory() / private_name(name)
    new = directory.with_name(f".{directory.name}")  # until it is locked
    try:
        new.mkdir(mode=0o700)
        alive = os.open(new / _ALIVE, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)  # open until the process ends
        fcntl.flock(alive, fcntl.LOCK_EX)
        new.rename(directory)
    except OSError as e:
        raise CapflowError(explain(f"directory {directory}", got=e.strerror or str(e))) from e
    return directory


def collect(directory: Path) -> list[Path]:
    """Remove the private sockets and directories of processes that are gone; return them. Everything else stays."""
    gone = []
    for path in sorted(directory.iterdir()):
        if _PRIVATE.fullmatch(path.name) is None:
            continue
        with contextlib.suppress(OSError):  # another process collects it
            if path.is_dir():
                with _free(path / _ALIVE):
                    shutil.rmtree(path)
                gone.append(path)
            elif path.name.endswith(LOCK_SUFFIX):
                of = path.with_name(path.name.removesuffix(LOCK_SUFFIX))
                if of.exists() and not of.is_socket():
                    continue
                with _free(path):
                    of.unlink(missing_ok=True)
                    path.unlink()  # before it is let go: whoever locks a file that is gone tries again
                gone.append(of)
            elif path.is_socket() and not path.with_name(path.name + LOCK_SUFFIX).exists():
                path.unlink()
                gone.append(path)
    return gone


@contextlib.contextmanager
def _free(lock: Path) -> Iterator[None]:
    """Hold the lock of a process that is gone. Raises OSError when the process lives."""
    fd = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)
