"""Recovery of a shard whose writer died: its whole requests are sealed, and a damaged file is kept.

    ROOT/shard~N-….parquet              every request that is whole
    ROOT/.damaged-shard~N-….parquet     the file as it was, where more than a torn end is wrong with it

Invariant: nothing is deleted but bytes after the last whole commit, and these only if they hold no complete commit.
"""

from __future__ import annotations

import logging
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from capflow.errors import CapflowError
from capflow_consumers.dataset import disk, layout
from capflow_consumers.dataset.shards import seal
from capflow_consumers.dataset.shards.file import EncodedBatch, ShardFile
from capflow_consumers.dataset.shards.reader import Shard
from capflow_consumers.dataset.shards.seal import Entry
from capflow_consumers.dataset.shards.stream import decode

logger = logging.getLogger("capflow.consumer")

DAMAGED_PREFIX = ".damaged-"

_COPIES_NAME = "copies"
# The bytes after a commit's sidecar, with a row before them where rows are not compressed.
_COMMIT_END_BYTES = 8


def recover(path: Path, root: Path) -> None:
    """Seal every whole request in the shard of a dead writer. Raises OSError."""
    shard = Shard(path)
    whole: list[Entry] = []
    problems: list[str] = []
    try:
        shard.map()
        shard.scan()
    except CapflowError as e:
        if _has_commit(shard.file, _COMMIT_END_BYTES):
            problems.append(str(e))
    else:
        problems += map(str, shard.damage)
        room = _COMMIT_END_BYTES + (0 if shard.kind.compressed else shard.kind.bytes_of(shard.kind.commit_width))
        if _has_commit(shard.file.slice(shard.end), room):
            problems.append(f"{path}: a commit after byte {shard.end} cannot be read")
    for entry in shard.entries:
        try:
            shard.capture(entry).verify_rows()
        except CapflowError as e:
            problems.append(f"request {entry.request} is lost: {e}")
        else:
            whole.append(entry)
    if not problems:
        publish(path, shard.end, whole, root, sync=True)
    else:
        kept = root / f"{DAMAGED_PREFIX}{path.name}"
        for problem in problems:
            logger.error("%s", problem)
        if whole:
            copy = _copy(shard, whole)
            publish(copy.path, copy.end, copy.requests, root, sync=True)
        path.rename(kept)
        disk.sync(root)
        logger.error("%s is damaged, and kept as %s; delete that when it is of no use", path.name, kept)
    logger.info("%s has %d requests of a writer that did not seal it", root / path.name, len(whole))


def publish(path: Path, end: int, entries: Sequence[Entry], root: Path, *, sync: bool) -> None:
    """Seal a shard and move it to the root. A shard without requests is removed. Raises OSError."""
    if not entries:
        path.unlink()
        return
    seal.seal(path, end, entries)
    if sync:
        disk.sync(path)
    path.rename(root / path.name)
    if sync:
        disk.sync(root)


def _copy(shard: Shard, entries: Sequence[Entry]) -> ShardFile:
    """Copy some requests to a new shard of the same name, in a directory beside the old one; raises OSError."""
    path = Path(shard.path)
    directory = path.parent / _COPIES_NAME
    directory.mkdir(0o700, exist_ok=True)
    copy = ShardFile(directory / path.name, shard.kind, stat.S_IMODE(path.stat().st_mode))
    copy.path.unlink(missing_ok=True)
    copy.create()
    try:
        for entry in entries:
            *batches, commit = (decode(shard.file, place, shard.kind, shard.schema) for place in entry.batches)
            for batch in batches:
                rows = [] if batch.rows is None else [batch.rows]
                copy.put(EncodedBatch(rows, *batch[:3], (batch.page,), batch.width, batch.scales))
            assert commit.sidecar is not None
            copy.commit(entry.request, entry.engine, commit.sidecar)
    finally:
        copy.close()
    return copy


def _has_commit(data: Any, room: int) -> bool:
    """Return whether bytes that cannot be decoded hold a commit that was written to its end.

    room: how many bytes follow the sidecar of a commit.
    """
    return any(data.size - end >= room for end, _ in layout.sidecars_within(data))
