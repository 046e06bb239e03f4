"""A writer's hidden directory under the root of a data set, and how a finished request leaves it.

    ROOT/.lock                   held while a writer starts, so that one does not take another's new directory for a dead one's
    ROOT/.partial-…/lock         held by the writer for as long as it lives, and let go by the kernel however it dies
    ROOT/.partial-…/N/           a request under way
    ROOT/.partial-…/shard~…      a shard under way; a dead writer's is sealed before its directory goes
    ROOT/.partial-…/replaced/    a request that is being overwritten, put back if the writer dies between its two renames

What always holds: a name under the root that does not begin with a dot is a whole request.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from capflow.errors import CapflowError, explain
from capflow.files import FILE_MODE, create_private, make_directory, open_regular, share_directory
from capflow.text.engine_name import name_of
from capflow_consumers.dataset import disk, layout
from capflow_consumers.dataset.names import Numbered, split
from capflow_consumers.dataset.shards.reader import PATTERN
from capflow_consumers.dataset.shards.recovery import recover

OnCollision = Literal["error", "overwrite", "suffix"]
"""What to do when a capture of a request is there, of the same engine and id. `error`: keep the old and report. `overwrite`: replace the last.
`suffix`: publish as `NAME~2`, `NAME~3`, … What another engine has of the id is left alone, and lies beside it under such a name."""

PREFIX = layout.PARTIAL_PREFIX

_TAKEN = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}
_OVERWRITE_TRIES = 10


class WorkDir:
    """Between `open` and `close`, `path` is this writer's alone.

    mode: of the files below the root.
    """

    def __init__(self, root: Path, *, fsync: bool, mode: int = FILE_MODE) -> None:
        self.root = root
        self.fsync = fsync
        self.mode = mode
        self.path = root
        self._lock = -1
        self._numbers = itertools.count()
        self._published = Numbered(root)

    def open(self) -> None:
        """Make the root and the hidden directory, and remove those of dead writers; raises OSError."""
        make_directory(self.root, self.mode)
        with _locked(self.root / disk.LOCK, self.mode):
            for stale in sorted(self.root.glob(PREFIX + "*")):
                _remove_if_dead(stale, self.root)
            self._published.look()
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=self.root))
            share_directory(self.path, self.mode)
            self._lock = create_private(self.path / "lock", os.O_RDWR, self.mode)
            fcntl.flock(self._lock, fcntl.LOCK_EX)  # a reader may look whether it is held

    def close(self, *, keep: bool = False) -> None:
        """Remove the hidden directory with every request that is under way; with `keep`, leave it to the next writer."""
        if self._lock >= 0:
            if not keep:
                shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1

    def new(self) -> Path:
        """Return the path of a directory for one request, not yet made."""
        return self.path / str(next(self._numbers))

    def published(self, name: str) -> list[Path]:
        """Return the finished requests of a name, first to last: `NAME`, `NAME~2` and so on, as far as they are there."""
        return self._published.of(name)

    def publish(self, source: Path, name: str, engine: str, on_collision: OnCollision) -> Path:
        """Give a finished request of an engine its name in one rename; return where it is. That lasts when the root is synced.

        Its name is taken by any capture of it, and is numbered on from the last. Raises OSError, and CapflowError when the
        engine has a capture of the name and `on_collision` is `error`.
        """
        found = self.published(name) or [self.root / name]
        mine = [] if on_collision == "suffix" else [path for path in found if _is_taken(path, engine, on_collision)]
        if not mine:
            target = found[-1] if _rename(source, found[-1]) else self._suffix(source, found[-1])
        elif on_collision == "error":
            do = "set on_collision to suffix or overwrite, or use another root"
            raise CapflowError(explain(f"{mine[-1]} exists already", do=do))
        else:
            target = self._overwrite(source, mine[-1], engine)
        self._published.add(target)
        return target

    def _suffix(self, source: Path, last: Path) -> Path:
        name, number = split(last.name)
        for later in itertools.count(number + 1):
            target = self.root / f"{name}~{later}"
            if _rename(source, target):
                return target
        raise AssertionError

    def _overwrite(self, source: Path, target: Path, engine: str) -> Path:
        replaced = self.path / "replaced"
        make_directory(replaced, self.mode, parents=False)
        for _ in range(_OVERWRITE_TRIES):
            if _rename(source, target):
                shutil.rmtree(replaced, ignore_errors=True)
                return target
            if not _is_taken(target, engine, "overwrite"):  # another writer took the name between two renames
                return self._suffix(source, target)
            with contextlib.suppress(FileNotFoundError):
                target.rename(replaced / target.name)
        raise CapflowError(explain(f"{target} is written by others all the time", do="use another root"))


def engine_at(path: Path) -> str | None:
    """Return the name of the engine whose request lies there; None where that cannot be read, or nothing lies there."""
    try:
        return name_of(layout.read_sidecar((path / layout.SIDECAR_NAME).read_bytes()).engine)
    except (OSError, ValueError):
        return None


def _is_taken(path: Path, engine: str, on_collision: OnCollision) -> bool:
    """Return whether a name is the engine's own; what cannot be read is nobody's to overwrite, and nobody's to lie beside."""
    owner = engine_at(path)
    if owner is None:
        return on_collision == "error" and path.exists() and (not path.is_dir() or any(path.iterdir()))
    return owner == name_of(engine)


def _rename(source: Path, target: Path) -> bool:
    """Rename a directory unless the name is taken; an empty directory does not take it."""
    try:
        source.rename(target)
    except OSError as e:
        if e.errno in _TAKEN:
            return False
        raise
    return True


def _remove_if_dead(stale: Path, root: Path) -> None:
    """Remove a hidden directory whose writer is gone, after sealing its shards and putting back what it was replacing."""
    with contextlib.suppress(FileNotFoundError):
        fd = open_regular(stale / "lock", os.O_RDWR)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        finally:
            os.close(fd)
    for shard in sorted(stale.glob(PATTERN)):
        recover(shard, root)
    for old in stale.glob("replaced/*"):
        if not (root / old.name).exists():
            old.rename(root / old.name)
    shutil.rmtree(stale)


@contextlib.contextmanager
def _locked(path: Path, mode: int) -> Iterator[None]:
    fd = create_private(path, os.O_RDWR, mode)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
