"""The set of a data set's shards: which there are, and which captures they hold.

Invariant: the packages of the extra `files` are imported with the first shard, so a data set without shards needs none.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from capflow.errors import CapflowError, RetryError
from capflow.extras import require
from capflow_consumers.dataset import layout
from capflow_consumers.dataset.capture import Damage, damaged
from capflow_consumers.dataset.disk import found_in

if TYPE_CHECKING:
    from capflow_consumers.dataset.shards.reader import LastRows, Shard, ShardCapture
    from capflow_consumers.dataset.shards.seal import Entry


class ShardSet:
    """The shards under a root, in the order in which they were begun.

    sealed_only: whether to leave out the shards that are being written.

    Damage raises no error here; a `Damage` takes the place of what cannot be read.
    """

    def __init__(self, root: PurePath, *, sealed_only: bool = False) -> None:
        self.root = root
        self.sealed_only = sealed_only
        self._shards: dict[str, Shard] = {}
        self._last: LastRows = {}
        # Shards that cannot be read at all.
        self._unread: dict[str, Damage] = {}
        # The captures of each id; None until they are asked for.
        self._by_id: dict[str, list[tuple[Shard, Entry]]] | None = None

    def refresh(self) -> None:
        """Look for shards that are new, sealed since or grown; raises OSError when the root cannot be listed."""
        root = Path(self.root)
        writers = () if self.sealed_only else root.glob(f"{layout.PARTIAL_PREFIX}*")
        paths = {path.name: path for writer in writers for path in found_in(writer, layout.SHARD_PATTERN)}
        paths |= {path.name: path for path in root.glob(layout.SHARD_PATTERN)}
        self._keep(paths)
        for name, path in paths.items():
            shard = self._shards.get(name)
            if shard is None or not shard.sealed or shard.path != path:
                self._open(name, path, shard)

    def find(self, request_id: str) -> Iterator[ShardCapture | Damage]:
        """Yield the captures of an id that the last refresh found."""
        for shard, entry in self.entries_of(request_id):
            try:
                yield shard.capture(entry)
            except RetryError:
                raise
            except CapflowError as e:
                yield Damage(shard.path, e, of_capture=True)

    def __contains__(self, request_id: str) -> bool:
        return bool(self.entries_of(request_id))

    def ids(self) -> Iterator[str]:
        """Yield the id of each capture."""
        for _, entry in self._entries():
            yield entry.request

    @property
    def damage(self) -> list[Damage]:
        """The damage of the shards, without that of captures that an index lists."""
        shards = self._shards.values()
        parts = [Damage(shard.path, error, of_capture=False) for shard in shards for error in shard.damage]
        return [*self._unread.values(), *parts]

    def verify(self) -> Iterator[Damage]:
        """Check every shard as a whole; yield the first damage of each, and the shards that cannot be read."""
        yield from self._unread.values()
        for shard in self._shards.values():
            try:
                shard.verify()
            except RetryError:
                raise
            except CapflowError as e:
                yield Damage(shard.path, e, of_capture=False)

    @property
    def nbytes(self) -> int:
        """The bytes of the shards that the last refresh found."""
        return sum(shard.file.size for shard in self._shards.values())

    def names(self) -> Collection[str]:
        """Return the names of the shards."""
        return tuple(self._shards)

    def get(self, name: str) -> Shard | None:
        """Return the shard of a name."""
        return self._shards.get(name)

    def entries_of(self, request_id: str) -> Sequence[tuple[Shard, Entry]]:
        """Return the captures of an id that the last refresh found, each with its shard."""
        if self._by_id is None:
            self._by_id = {}
            for shard, entry in self._entries():
                self._by_id.setdefault(entry.request, []).append((shard, entry))
        return self._by_id.get(request_id, ())

    def _entries(self) -> Iterator[tuple[Shard, Entry]]:
        for name in sorted(self._shards):
            yield from zip(itertools.repeat(self._shards[name]), self._shards[name].entries)

    def _keep(self, names: Collection[str]) -> None:
        """Forget the shards that are gone, and what could not be read."""
        if self._shards.keys() - names:
            self._shards = {name: shard for name, shard in self._shards.items() if name in names}
            self._by_id = None
        self._unread = {}

    def _open(self, name: str, path: Path, before: Shard | None) -> None:
        if not self._shards:
            require("files", f"shard {path}")
        from capflow_consumers.dataset.shards.reader import Shard

        shard = Shard(path, self._last)
        try:
            if before is not None and before.path == path and before.file.size == path.stat().st_size:
                return
            shard.open()
        except CapflowError as e:
            if path.parent == self.root:  # a shard that was just begun cannot be read yet
                self._unread[name] = Damage(path, e, of_capture=False)
            return
        except FileNotFoundError:  # sealed meanwhile, and moved to the root
            sealed = Path(self.root, name)
            if path != sealed and sealed.exists():
                self._open(name, sealed, before)
            return
        except OSError as e:
            self._unread[name] = Damage(path, damaged(path, e.strerror or str(e), "a shard"), of_capture=False)
            return
        self._shards[name] = shard
        self._by_id = None
