"""The runtime directory: sockets and directories of running processes. Only their user can enter it.

The name of a private socket or directory holds the process id, and the process locks it while it lives. By the lock
`collect` separates leftovers of a killed process from the files of another process with the same id.
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
"""The suffix that makes the name of the lock file from the name of its socket."""

_ALIVE = "alive"  # the lock file in a private directory
_PRIVATE = re.compile(r"[a-z]+-\d+-[0-9a-f]{6}(\.sock(\.lock)?)?")


def runtime_directory() -> Path:
    """Return this user's directory for sockets, which no other user can enter. Make it if it is missing.

    Raises CapflowError if it belongs to another user, is a link, or is open to others.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    shared = Path(f"/tmp/capflow-{os.getuid()}")  # noqa: S108  checked below
    directory = Path(base) / "capflow" if base and Path(base).is_dir() else shared
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        status = directory.lstat()
    except OSError as e:
        raise CapflowError(explain(f"directory for sockets {directory}", got=e.strerror or str(e))) from e
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise CapflowError(
            explain(
                f"directory for sockets {directory}",
                got=f"mode {stat.filemode(status.st_mode)} of user {status.st_uid}",
                expected=f"drwx------ of user {os.getuid()}",
                do="remove it, or name another address with --address",
            )
        )
    return directory


def private_name(name: str) -> str:
    """Return a name in the runtime directory that no other process uses."""
    return f"{name}-{os.getpid()}-{os.urandom(3).hex()}"


def private_directory(name: str) -> Path:
    """Make a directory of this process in the runtime directory; the caller removes it. Raises CapflowError."""
    directory = runtime_directory() / private_name(name)
    new = directory.with_name(f".{directory.name}")  # the name until the directory is locked
    try:
        new.mkdir(mode=0o700)
        alive = os.open(new / _ALIVE, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)  # stays open until the process ends
        fcntl.flock(alive, fcntl.LOCK_EX)
        new.rename(directory)
    except OSError as e:
        raise CapflowError(explain(f"directory {directory}", got=e.strerror or str(e))) from e
    return directory


def collect(directory: Path) -> list[Path]:
    """Remove the private sockets and directories of processes that ended, and return them. Everything else stays."""
    gone = []
    for path in sorted(directory.iterdir()):
        if _PRIVATE.fullmatch(path.name) is None:
            continue
        with contextlib.suppress(OSError):  # another process removes it
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
                    path.unlink()  # while locked: a process that locks a removed file tries again
                gone.append(of)
            elif path.is_socket() and not path.with_name(path.name + LOCK_SUFFIX).exists():
                path.unlink()
                gone.append(path)
    return gone


@contextlib.contextmanager
def _free(lock: Path) -> Iterator[None]:
    """Hold the lock of a process that ended. Raises OSError if the process lives."""
    fd = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)
