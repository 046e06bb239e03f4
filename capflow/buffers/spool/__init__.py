"""The spool: a bounded queue of records on disk that survives a restart.

A spool is a directory that one process writes at a time.

Invariants:

* Records are numbered from 1 without a gap and are read in that order.
* A durable record is read, or reported as lost by its exact number.
* A durably acknowledged record is never read again.
* A record that is not whole is never read.

After a crash the number of a record that never became durable may be used again.

**Files.** A process that writes holds `lock` with flock(2). `cursor` stores what was acknowledged. Segments hold the
records; a segment with a damaged record is renamed to `*.bad` instead of removed. In some spools `spare` takes up room
while a process writes. Other files are left untouched.

**A segment** is named `SERIAL-FIRST-SALT.spool`. SERIAL, decimal with 8 or more digits, counts the segments of the
spool. FIRST, decimal with 16 or more digits, is the lowest record number that the segment may hold. SALT is 16 random
hexadecimal digits. A segment holds items one after another, little-endian, without padding:

| bytes | field | |
|---|---|---|
| 4 | magic | `C5 F1 52 01` |
| 4 | kind | 1: a record; 2: a mark |
| 4 | head_bytes | length of the record's head; 0 in a mark |
| 4 | body_bytes | length of its body; 0 in a mark |
| 8 | id | the record's number; in a mark, every record up to this one was durable when the mark was written |
| 8 | head_xxh3 | XXH3 64-bit hash, seed 0, of the head |
| 8 | body_xxh3 | the same hash of the body |
| 8 | item_xxh3 | the same hash of the 40 bytes above, with seed = salt |
| … | head, body | the record |

If `item_xxh3` differs, the bytes are not an item, and the reader searches for the next one. The salt keeps a record
that holds the bytes of another spool from being taken for an item. If only the hash of the head or the body differs,
that one record is lost.

**Which records count.** A segment's records count if they are below the FIRST of every segment with a higher serial;
the other items are void. A writer that opens the spool, or whose sync failed, begins a new segment at the number with
which it continues. This makes later items of older segments void.

**The cursor** has two slots, at 0 and at 4096. They are written in turn and in place, so that a full disk can be
emptied. Each slot holds two equal copies of `CFCURS01`, writes, acked, synced, xxh3: 8 bytes each, and xxh3 is the hash
of the four fields before it with seed 0. The slot with the higher number of writes counts. Segments are removed only
after the cursor that frees them is durable.

**Durable.** Records up to `synced` of the cursor and up to any mark were synced with fdatasync(2), and the directory
with fsync(2) after its segments were made. At a restart, missing records among these are lost and counted. The first
missing record after them is where a crash cut the spool; no record from there on was ever reported as durable. After a
failed sync the file is not synced again, because the kernel has dropped the pages and a second sync would succeed.
Records that are not synced stay in memory, and are written again to a new segment.
"""

from capflow.buffers.spool.contents import heads, records
from capflow.buffers.spool.files import Files
from capflow.buffers.spool.place import check_root, default_root
from capflow.buffers.spool.reader import Lost, Record
from capflow.buffers.spool.spool import FullError, InUseError, Spool

__all__ = [
    "Files",
    "FullError",
    "InUseError",
    "Lost",
    "Record",
    "Spool",
    "check_root",
    "default_root",
    "heads",
    "records",
]
