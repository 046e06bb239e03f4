"""The spool: a bounded queue of records on disk, which a restart finds as it was left.

A spool is a directory that one process writes at a time. Invariant: records are numbered from 1 without a gap and
read in that order; one that was said to be durable is read, or said to be lost by its exact number; one that was acknowledged
durably is never read again; a record that is not whole is never read. The number of a record that never became durable may
be given again after a crash.

**Files.** `lock` is held with flock(2) while a process writes. `cursor` says what was acknowledged. Segments hold
the records; a segment is renamed to `*.bad` instead of removed when a damaged record was found in it. `spare`, in some spools, takes up room while a
process writes. Anything else is left alone.

**A segment** is named `SERIAL-FIRST-SALT.spool`: serial, decimal, 8 digits or more, counts the segments of the spool; first, decimal, 16 digits
or more, is the lowest record number that it may hold; salt is 16 hexadecimal digits at random. It holds items, one after another,
little-endian, without padding:

| bytes | field | |
|---|---|---|
| 4 | magic | `C5 F1 52 01` |
| 4 | kind | 1: a record; 2: a mark |
| 4 | head_bytes | length of the record's head; 0 in a mark |
| 4 | body_bytes | length of its body; 0 in a mark |
| 8 | id | the record's number; in a mark, every record up to this one was durable when the mark was written |
| 8 | head_xxh3 | XXH3 64-bit hash, seed 0, of the head |
| 8 | body_xxh3 | the same of the body |
| 8 | item_xxh3 | the same of the 40 bytes above, seed = salt |
| … | head, body | the record |

An item whose `item_xxh3` differs is none, and the next one is searched for: the salt keeps a record that holds the bytes of another
spool from being taken for an item. With a good one but a bad head or body, the record is lost, and only it.

**Which records count.** A segment holds records below the `FIRST` of every segment with a higher serial; what else is in it is void. So a
writer that opens the spool, or whose sync failed, begins a new segment at the number that it goes on with, and void is whatever lay
behind it.

**The cursor** has two slots, at 0 and at 4096, which are written in turn and in place, so that a full disk can be emptied. Each holds two equal
copies of `CFCURS01`, writes, acked, synced, xxh3 (8 bytes each, the last the hash of the four before, seed 0); the slot with the
higher number of writes holds. Segments are removed only when the cursor that frees them is durable.

**Durable.** Records up to `synced` of the cursor and up to any mark were synced with fdatasync(2), and the directory with fsync(2) after its segments
were made. At a restart, what is missing of these is lost, and counted; the first that is missing behind them is where the crash cut, and nothing
from there on was ever said to be durable. After a failed sync the file is not synced again: what it took from the page cache is gone,
and a second sync would succeed. The records that were not synced are kept in memory until then, and are written to a new segment.
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
