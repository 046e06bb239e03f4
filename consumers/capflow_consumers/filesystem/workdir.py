"""A writer's hidden directory under the root of a data set, and how a finished request leaves it.

    ROOT/.lock                   held while a writer starts, so that it does not remove another's new directory
    ROOT/.partial-…/lock         held by the writer while it lives; the kernel releases it however the writer dies
    ROOT/.partial-…/N/           a request under way
    ROOT/.partial-…/shard~…      a shard under way; a dead writer's is sealed before its directory is removed
    ROOT/.partial-…/replaced/    an overwritten request; it is put back if the writer dies between two renames

Invariant: a name under the root that does not begin with a dot is a whole request, or a sealed shard.
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
from capflow.extras import require
from capflow.files import FILE_MODE, create_private, make_directory, open_regular, share_directory
from capflow.text.engine_name import name_of
from capflow_consumers.dataset import disk, layout
from capflow_consumers.dataset.names import Numbered, split

OnCollision = Literal["error", "overwrite", "suffix"]
"""What to do when the same engine has a capture of the same id.

`error`: keep the old capture and report an error.
`overwrite`: replace the last capture.
`suffix`: publish as `NAME~2`, `NAME~3` and so on.

A capture of another engine with the same id stays, and the new one lies beside it under such a name.
"""

PREFIX = layout.PARTIAL_PREFIX

_TAKEN = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}
_OVERWRITE_TRIES = 10


class WorkDir:
    """A writer's directory; between `open` and `close`, `path` is this writer's alone.

    fsync: whether requests are synced to disk; used by the stores.
    mode: of the files below the root.
    lock: the descriptor of the lock file; negative while there is none.
    """

    def __init__(self, root: Path, *, fsync: bool, mode: int = FILE_MODE) -> None:
        self.root = root
        self.fsync = fsync
        self.mode = mode
        self.path = root
        self.lock = -1
        self._numbers = itertools.count()
        self._published = Numbered(root)

    def open(self) -> None:
        """Make the root and the hidden directory, and clean up those of dead writers; raises OSError."""
        make_directory(self.root, self.mode)
        with _locked(self.root / disk.LOCK, self.mode):
            for stale in sorted(self.root.glob(PREFIX + "*")):
                _remove_if_dead(stale, self.root)
            self._published.look()
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=self.root))
            share_directory(self.path, self.mode)
            self.lock = create_private(self.path / "lock", os.O_RDWR, self.mode)
            fcntl.flock(self.lock, fcntl.LOCK_EX)  # may wait a moment for a reader that tests the lock

    def close(self, *, keep: bool = False) -> None:
        """Remove the hidden directory with every request under way.

        keep: leave the directory to the next writer instead.
        """
        if self.lock >= 0:
            if not keep:
                shutil.rmtree(self.path, ignore_errors=True)
            os.close(self.lock)
            self.lock = -1

    def new(self) -> Path:
        """Return the path of a directory for one request; it is not made yet."""
        return self.path / str(next(self._numbers))

    def published(self, name: str) -> list[Path]:
        """Return the finished requests of a name that exist, first to last: `NAME`, `NAME~2` and so on."""
        return self._published.of(name)

    def publish(self, source: Path, name: str, engine: str, on_collision: OnCollision) -> Path:
        """Give a finished request its name in one rename; return its path.

        The rename is durable once the root is synced.

        name: the slug of its id. Where another capture has it, numbers continue from the last.
        engine: the id of its engine.

        Raises OSError, and CapflowError when the engine has a capture of the name and `on_collision` is `error`.
        """
        there = self.published(name)
        paths = there or [self.root / name]
        taken = [] if on_collision == "suffix" else [path for path in there if _is_taken(path, engine, on_collision)]
        if not taken:
            target = paths[-1] if _rename(source, paths[-1]) else self._suffix(source, paths[-1])
        elif on_collision == "error":
            do = "set on_collision to suffix or overwrite, or use another root"
            raise CapflowError(explain(f"{taken[-1]} exists already", do=do))
        else:
            target = self._overwrite(source, taken[-1], engine)
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
            if not _is_taken(target, engine, "overwrite"):  # another writer's request has the name now
                return self._suffix(source, target)
            with contextlib.suppress(FileNotFoundError):
                target.rename(replaced / target.name)
        raise CapflowError(explain(f"{target} is rewritten by others all the time", do="use another root"))


def engine_at(path: Path) -> str | None:
    """Return the name of the engine whose request lies at a path; None where no sidecar can be read."""
    try:
        return name_of(layout.read_sidecar((path / layout.SIDECAR_NAME).read_bytes()).engine)
    except (OSError, ValueError):
        return None


def _is_taken(path: Path, engine: str, on_collision: OnCollision) -> bool:
    """Return whether a name is taken by the engine's own capture.

    A path without a readable sidecar is nobody's: `error` counts it as taken, `overwrite` does not replace it.
    """
    owner = engine_at(path)
    if owner is None:
        return on_collision == "error" and path.exists() and (not path.is_dir() or any(path.iterdir()))
    return owner == name_of(engine)


def _rename(source: Path, target: Path) -> bool:
    """Rename a directory; return False when the name is taken. An empty directory does not take it."""
    try:
        source.rename(target)
    except OSError as e:
        if e.errno in _TAKEN:
            return False
        raise
    return True


def _remove_if_dead(stale: Path, root: Path) -> None:
    """Remove a dead writer's directory, after sealing its shards and putting back what it was replacing."""
    with contextlib.suppress(FileNotFoundError):
        fd = open_regular(stale / "lock", os.O_RDWR)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        finally:
            os.close(fd)
    for shard in sorted(stale.glob(layout.SHARD_PATTERN)):
        require("files", f"shard {shard}")
        from capflow_consumers.dataset.shards.recovery import recover

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
