"""Slugs: the one directory name of a request id.

What always holds: a slug is a plain name of lower-case ASCII (never `.`, `..`, empty, hidden or with a separator), so it
cannot leave the directory it is put in; two different ids have different slugs, also where a file system ignores case.
An id that is such a name already is its own slug. Every other id ends in `~` and a hash of the whole id; no id that is its
own slug holds a `~`.
"""

from __future__ import annotations

import base64
import hashlib
import re

LENGTH_MAX = 100

_READABLE_LENGTH_MAX = 60
_HASH_BYTES = 15  # 24 characters of base32, without padding
_OWN_SLUG = re.compile(r"[a-z0-9](?:[a-z0-9._-]*[a-z0-9])?")
_OTHER = re.compile(r"[^a-z0-9]+")


def slug(request_id: str) -> str:
    """Return the directory name of a request id, at most `LENGTH_MAX` characters."""
    if len(request_id) <= LENGTH_MAX and _OWN_SLUG.fullmatch(request_id):
        return request_id
    digest = hashlib.blake2b(request_id.encode("utf-8", "surrogatepass"), digest_size=_HASH_BYTES).digest()
    readable = _OTHER.sub("-", request_id[:_READABLE_LENGTH_MAX].lower()).strip("-")
    return f"{readable or 'request'}~{base64.b32encode(digest).decode().lower()}"
