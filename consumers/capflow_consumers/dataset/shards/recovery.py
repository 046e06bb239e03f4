"""What a dead writer left of a shard: its whole requests are sealed, and it is kept where some of what was promised cannot be read.

    ROOT/shard~N-….parquet              every request that is whole
    ROOT/.damaged-shard~N-….parquet     the file as it was found, where more than a torn end is wrong with it

What always holds: only what lies behind the last whole commit, and has no commit that was written to its end, is thrown away.
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
_COMMIT_END_BYTES = 8  # behind a commit's sidecar, and a row where rows are not compressed


def recover(path: Path, root: Path) -> None:
    """Seal what a dead writer left of a shard: every request in it that is whole. Raises OSError."""
    shard = Shard(path)
    whole: list[Entry] = []
    lost: list[str] = []
    try:
        shard.map()
        shard.scan()
    except CapflowError as e:
        if _has_commit(shard.file, _COMMIT_END_BYTES):
            lost.append(str(e))
    else:
        lost += map(str, shard.damage)
        room = _COMMIT_END_BYTES + (0 if shard.kind.compressed else shard.kind.row_bytes)
        if _has_commit(shard.file.slice(shard.end), room):
            lost.append(f"{path}: a commit behind byte {shard.end} cannot be read")
    for entry in shard.entries:
        try:
            shard.capture(entry).verify_rows()
        except CapflowError as e:
            lost.append(f"request {entry.request} is not kept: {e}")
        else:
            whole.append(entry)
    if not lost:
        publish(path, shard.end, whole, root, sync=True)
    else:
        kept = root / f"{DAMAGED_PREFIX}{path.name}"
        for what in lost:
            logger.error("%s", what)
        if whole:
            copy = _copy(shard, whole)
            publish(copy.path, copy.end, [Entry(*request) for request in copy.requests], root, sync=True)
        path.rename(kept)
        disk.sync(root)
        logger.error("%s is damaged, and kept as %s; delete it when nothing is to be had of it", path.name, kept)
    logger.info("%s has %d requests that a writer left who did not seal it", root / path.name, len(whole))


def publish(path: Path, end: int, entries: Sequence[Entry], root: Path, *, sync: bool) -> None:
    """Seal a shard and give it its name under the root; one without requests is removed. Raises OSError."""
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
    """Return a shard of the same name that has these requests only, in a directory beside it; raises OSError."""
    directory = shard.path.parent / _COPIES_NAME
    directory.mkdir(0o700, exist_ok=True)
    copy = ShardFile(directory / shard.path.name, shard.kind, stat.S_IMODE(shard.path.stat().st_mode))
    copy.path.unlink(missing_ok=True)
    copy.create()
    try:
        for entry in entries:
            *batches, commit = (decode(shard.file, place, shard.kind, shard.schema) for place in entry.batches)
            for batch in batches:
                rows = [] if batch.rows is None else [batch.rows]
                copy.put(EncodedBatch(rows, batch.positions, batch.token_ids, batch.hashes, batch.page))
            assert commit.sidecar is not None
            copy.commit(entry.request, entry.engine, commit.sidecar)
    finally:
        copy.close()
    return copy


def _has_commit(data: Any, room: int) -> bool:
    """Return whether bytes that cannot be decoded hold a commit that was written to its end: a sidecar, and as much behind it as follows one."""
    return any(data.size - end >= room for end, _ in layout.sidecars_within(data))
