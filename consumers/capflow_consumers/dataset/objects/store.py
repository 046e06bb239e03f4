"""The objects of a data set: listed, read by ranges, and written whole.

Invariant: every failure of the store is a `StoreError`; no object that cannot be reached is taken for missing.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Callable
from typing import Any, BinaryIO, NamedTuple

import xxhash

from capflow import limits
from capflow.errors import RetryError, UsageError, explain
from capflow.extras import require
from capflow_consumers.dataset import layout
from capflow_consumers.dataset.objects.address import ObjectRoot, endpoint_in_use

# pyarrow cuts what is uploaded into parts of this size. The ETag of an object is made of their hashes.
PART_BYTES = 10 * limits.MIB
MARK_NAME = ".capflow"
"""An object that every writer puts: it shows that keys may write, and that the place is a data set."""

# Parts that are under way at once. Each takes `PART_BYTES` of memory.
_PARTS_AT_ONCE = 4
# The bytes at the end of an object that are read at once: the footer and, mostly, the index.
_TAIL_BYTES = 256 * 1024
# A smaller read reads so much: a request to the store takes longer than these bytes.
_WINDOW_BYTES = limits.MIB
_CONNECT_S = 5.0
_REQUEST_S = 15.0
_SHARDS = re.compile(re.escape(layout.SHARD_PATTERN).replace(r"\*", ".*"))
_AWS = re.compile(
    r"AWS Error (?P<code>\w+)(?: \(HTTP status (?P<status>\d+)\))? during (?P<call>\w+) operation: (?P<text>.*)",
    re.DOTALL,
)
_NOT_NAMED = re.compile(r"Unable to parse ExceptionName: (?P<code>\w+) Message: (?P<text>.*)", re.DOTALL)
_DO = {
    "ACCESS_DENIED": "allow the key s3:ListBucket, s3:GetObject, s3:PutObject and s3:AbortMultipartUpload",
    "INVALID_ACCESS_KEY_ID": "check AWS_ACCESS_KEY_ID, AWS_PROFILE and the endpoint",
    "SIGNATURE_DOES_NOT_MATCH": "check AWS_SECRET_ACCESS_KEY",
    "NETWORK_CONNECTION": "check the endpoint, and whether the store runs",
    "NO_SUCH_BUCKET": "create the bucket, or name another one",
    "QuotaExceeded": "make room in the bucket, or have a larger quota",
}


class StoreError(RetryError):
    """The store cannot be reached, or refuses a request. The same request may succeed later.

    code: what the store or pyarrow calls it; it names nothing that is captured.
    """

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class BrokenUploadError(StoreError):
    """An upload was begun and cannot be finished.

    The process must end at once, without the end of Python: there, pyarrow would wait for the upload, or complete it.
    """


class StoredObject(NamedTuple):
    """An object that was uploaded, or one that is to be compared with a file.

    etag: the hash that a store makes of `PART_BYTES` parts.
    xxh3: of all bytes.
    """

    size: int
    etag: str
    xxh3: str


class Objects:
    """The objects directly below a root."""

    def __init__(self, root: ObjectRoot) -> None:
        self.root = root

    @functools.cached_property
    def _system(self) -> Any:
        """Pyarrow's client. Raises UsageError where pyarrow has none or the environment is wrong."""
        require("files", str(self.root))
        try:
            from pyarrow import fs

            client = fs.S3FileSystem
        except ImportError as e:
            raise UsageError(explain(str(self.root), got="a pyarrow without S3", do="install pyarrow from PyPI")) from e
        options: dict[str, Any] = {"request_timeout": _REQUEST_S, "connect_timeout": _CONNECT_S}
        region = self.root.region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        if (endpoint := endpoint_in_use(self.root)) is not None:
            options["scheme"], options["endpoint_override"] = endpoint
            # Without one, the client asks the metadata service of a cloud for it.
            region = region or "us-east-1"
        if region:
            options["region"] = region
        return client(**options)

    def sizes(self) -> dict[str, int]:
        """Return the size of each shard, by name. Raises StoreError."""
        return {name: size for name, size in self._listed().items() if _SHARDS.fullmatch(name)}

    def is_dataset(self) -> bool:
        """Return whether a writer has begun a data set here. Raises StoreError."""
        return any(name == MARK_NAME or _SHARDS.fullmatch(name) for name in self._listed())

    def mark(self) -> None:
        """Put the mark of a data set. Raises StoreError when the store takes no objects."""
        try:
            with self._system.open_output_stream(self.root.key(MARK_NAME)) as stream:
                stream.write(b"a data set of capflow\n")
        except OSError as e:
            raise self.error(e) from e

    def open(self, name: str, size: int) -> ObjectFile:
        """Return an object for reading. Nothing is read yet."""
        return ObjectFile(self, name, size)

    def read(self, name: str) -> Any:
        """Return pyarrow's file of an object; None when there is none. Raises StoreError."""
        try:
            return self._system.open_input_file(self.root.key(name))
        except FileNotFoundError:
            return None
        except OSError as e:
            raise self.error(e) from e

    def put(self, name: str, file: BinaryIO, on_part: Callable[[int], None]) -> StoredObject:
        """Upload a file from its begin. It appears when all of it is there.

        on_part: called with the number of bytes of each part that is there.

        Raises StoreError when no upload was begun, and BrokenUploadError when one was.
        """
        try:
            stream = self._system.open_output_stream(self.root.key(name))
        except OSError as e:
            raise self.error(e) from e
        try:
            return self._send(file, stream, on_part)
        except OSError as e:
            error = self.error(e)
            raise BrokenUploadError(str(error), error.code) from e

    def _send(self, file: BinaryIO, stream: Any, on_part: Callable[[int], None]) -> StoredObject:
        hashes = _Hashes()
        sent = 0
        file.seek(0)
        while part := file.read(PART_BYTES):
            hashes.add(part)
            stream.write(part)
            if len(hashes.parts) % _PARTS_AT_ONCE == 0:
                stream.flush()
                on_part(hashes.size - sent)
                sent = hashes.size
        stream.close()
        on_part(hashes.size - sent)
        return hashes.stored()

    def has(self, name: str) -> bool:
        """Return whether there is an object of a name. Raises StoreError."""
        file = self.read(name)
        if file is not None:
            file.close()
        return file is not None

    def remove(self, name: str) -> None:
        """Remove an object. Raises StoreError."""
        try:
            self._system.delete_file(self.root.key(name))
        except OSError as e:
            raise self.error(e) from e

    def is_here(self, name: str, stored: StoredObject, on_part: Callable[[int], None]) -> bool:
        """Return whether an object is what was uploaded. Raises StoreError.

        on_part: called with the number of bytes that were read.

        Its size and its ETag are compared. Where the store makes ETags in another way, the object is read.
        """
        file = self.read(name)
        if file is None:
            return False
        try:
            with file:
                if file.size() != stored.size:
                    return False
                if (file.metadata() or {}).get("ETag", b"").strip(b'"').decode("latin-1") == stored.etag:
                    return True
                digest = xxhash.xxh3_64()
                while part := file.read(PART_BYTES):
                    digest.update(part)
                    on_part(len(part))
        except OSError as e:
            raise self.error(e) from e
        return digest.hexdigest() == stored.xxh3

    def _listed(self) -> dict[str, int]:
        from pyarrow import fs

        selector = fs.FileSelector(self.root.key(), recursive=False, allow_not_found=True)
        try:
            infos = self._system.get_file_info(selector)
        except OSError as e:
            raise self.error(e) from e
        return {info.base_name: info.size for info in infos if info.type == fs.FileType.File}

    def error(self, error: OSError) -> StoreError:
        """Return the error for an error of pyarrow's."""
        match = _AWS.search(str(error))
        if match is None:
            return StoreError(explain(str(self.root.path), got=str(error)), type(error).__name__)
        named = _NOT_NAMED.search(match["text"]) or match
        code = named["code"] if named["code"] != "UNKNOWN" else f"HTTP status {match['status']}"
        text = named["text"].partition(" (Request ID")[0].partition("; Details")[0].strip(" .")
        endpoint = endpoint_in_use(self.root) if code == "NETWORK_CONNECTION" else None
        place = f"{self.root.path} at {'://'.join(endpoint)}" if endpoint else str(self.root.path)
        got = f"{code} from {match['call']}: {text}"
        return StoreError(explain(place, got=got, do=_DO.get(code, "")), code)


class _Hashes:
    def __init__(self) -> None:
        self.size = 0
        self.parts: list[bytes] = []
        self._whole = xxhash.xxh3_64()

    def add(self, part: bytes) -> None:
        self.size += len(part)
        self._whole.update(part)
        self.parts.append(hashlib.md5(part, usedforsecurity=False).digest())

    def stored(self) -> StoredObject:
        whole = hashlib.md5(b"".join(self.parts), usedforsecurity=False).hexdigest()
        return StoredObject(self.size, f"{whole}-{len(self.parts)}", self._whole.hexdigest())


def stored_of(file: BinaryIO) -> StoredObject:
    """Return what a file is once it is uploaded. Raises OSError."""
    hashes = _Hashes()
    file.seek(0)
    while part := file.read(PART_BYTES):
        hashes.add(part)
    return hashes.stored()


class ObjectFile:
    """An object that is read by ranges; `size` and `slice` are those of a mapped file."""

    def __init__(self, objects: Objects, name: str, size: int) -> None:
        self.size = size
        self._objects = objects
        self._name = name
        # pyarrow's, once something was read.
        self._file: Any = None
        # Where the bytes begin that were read last, and these. It is replaced as a whole.
        self._window: tuple[int, Any] = (0, b"")

    @functools.cached_property
    def _tail(self) -> Any:
        return self._fetch(max(0, self.size - _TAIL_BYTES), min(self.size, _TAIL_BYTES))

    def slice(self, begin: int, length: int | None = None) -> Any:
        """Return a part of the object as a buffer of pyarrow's; to its end where no length is given.

        Raises StoreError, and IndexError for a part that is not within the object.
        """
        length = self.size - begin if length is None else length
        if begin < 0 or length < 0 or begin + length > self.size:
            raise IndexError(f"bytes {begin}..{begin + length} of {self.size}")
        tail_begin = self.size - min(self.size, _TAIL_BYTES)
        if begin >= tail_begin:
            return self._tail.slice(begin - tail_begin, length)
        if length >= _WINDOW_BYTES:
            return self._fetch(begin, length)
        window_begin, window = self._window
        if not window_begin <= begin <= begin + length <= window_begin + len(window):
            window_begin, window = begin, self._fetch(begin, min(_WINDOW_BYTES, self.size - begin))
            self._window = window_begin, window
        return window.slice(begin - window_begin, length)

    def _fetch(self, begin: int, length: int) -> Any:
        import pyarrow as pa

        path = self._objects.root.path / self._name
        if self._file is None:
            self._file = self._objects.read(self._name)
        if self._file is None:
            raise StoreError(explain(str(path), got="no object, and there was one"), "NO_SUCH_KEY")
        try:
            data = pa.py_buffer(self._file.read_at(length, begin))
        except OSError as e:
            raise self._objects.error(e) from e
        if data.size != length:
            got = f"{data.size} bytes from byte {begin} on"
            raise StoreError(explain(str(path), got=got, expected=str(length)), "SHORT_READ")
        return data
