"""The address of a data set in an object store: `s3://BUCKET/PREFIX`, with `?endpoint=URL&region=NAME` where needed.

Everything else comes from the environment, as other programs read it: keys, profiles, `AWS_ENDPOINT_URL_S3`,
`AWS_ENDPOINT_URL`, `AWS_REGION`.

Invariant: an address holds no secret. So it may be logged, stored and shown.
"""

from __future__ import annotations

import os
import re
from pathlib import PurePath, PurePosixPath
from urllib.parse import parse_qsl, urlsplit

import msgspec

from capflow import limits
from capflow.errors import UsageError, explain

SCHEME = "s3"
KEY_BYTES_MAX = 900
# S3 takes 10,000 parts of an object; pyarrow's have 10 MiB.
OBJECT_BYTES_MAX = 64 * 1024 * limits.MIB

# A `Path` that was made of a URL has one slash left.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/{1,2}(?!/)(.*)", re.DOTALL)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")
_ENDPOINT = re.compile(r"(https?):/{1,2}([A-Za-z0-9._-]+|\[[0-9A-Fa-f:]+\])(:[0-9]{1,5})?/?")
_REGION = re.compile(r"[A-Za-z0-9-]{1,64}")
_BAD_IN_KEYS = re.compile(r"[\x00-\x1f\x7f?#%\\*]")

_EXPECTED = "s3://BUCKET/PREFIX, or the path of a directory"
_DO = {
    "file": "leave out file://",
    "gs": "use the store's S3 endpoint: s3://BUCKET/PREFIX?endpoint=https://storage.googleapis.com",
    "gcs": "use the store's S3 endpoint: s3://BUCKET/PREFIX?endpoint=https://storage.googleapis.com",
    "az": "use a gateway that speaks S3, or mount the container as a directory",
    "abfs": "use a gateway that speaks S3, or mount the container as a directory",
    "abfss": "use a gateway that speaks S3, or mount the container as a directory",
}


class ObjectPath(PurePosixPath):
    """The path of an object, `s3://BUCKET/KEY`; it is no file of this machine."""

    __slots__ = ()

    def __str__(self) -> str:
        return f"{SCHEME}://{super().__str__()}"


class ObjectRoot(msgspec.Struct, frozen=True):
    """The place of a data set.

    prefix: of the keys, without a slash at either end; may be empty.
    endpoint: `http://HOST:PORT` or `https://…`; empty for that of the environment, or AWS's.
    region: empty for that of the environment.
    """

    bucket: str
    prefix: str
    endpoint: str = ""
    region: str = ""

    def __str__(self) -> str:
        query = "&".join(f"{name}={value}" for name in ("endpoint", "region") if (value := getattr(self, name)))
        return f"{self.path}?{query}" if query else str(self.path)

    @property
    def path(self) -> ObjectPath:
        """The path of the data set, without the query."""
        return ObjectPath(self.bucket, self.prefix)

    def key(self, name: str = "") -> str:
        """Return `BUCKET/PREFIX/NAME`, by which pyarrow knows an object."""
        return "/".join(filter(None, (self.bucket, self.prefix, name)))


def is_url(path: str | PurePath) -> bool:
    """Return whether a path is a URL, of whatever scheme."""
    return _URL.fullmatch(str(path)) is not None


def parse(path: str | PurePath, where: str) -> ObjectRoot:
    """Return the root that a URL names. Raises UsageError, which begins with `where` and shows no secret."""
    text = str(path)
    match = _URL.fullmatch(text)
    if match is None:
        raise UsageError(explain(where, got=text, expected=_EXPECTED))
    scheme, rest = match[1].lower(), match[2]
    place, _, query = rest.partition("?")
    bucket, _, prefix = place.partition("/")
    if "@" in bucket:
        do = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
        raise UsageError(explain(where, got=f"{scheme}://…@…, with a key", expected="no key in the URL", do=do))
    if scheme != SCHEME:
        raise UsageError(explain(where, got=f"{scheme}://…", expected=_EXPECTED, do=_DO.get(scheme, "")))
    if not _BUCKET.fullmatch(bucket):
        expected = "a bucket's name: 3 to 63 letters, digits, dots, hyphens"
        raise UsageError(explain(where, got=f"{SCHEME}://{place}", expected=expected))
    prefix = prefix.rstrip("/")
    parts = prefix.split("/") if prefix else []
    if _BAD_IN_KEYS.search(prefix) or {"", ".", ".."} & set(parts) or len(prefix.encode()) > KEY_BYTES_MAX:
        expected = f"a prefix of at most {KEY_BYTES_MAX} bytes, without empty parts, `.`, `..`, ? # % * \\ or controls"
        raise UsageError(explain(where, got=f"{SCHEME}://{place}", expected=expected))
    return ObjectRoot(bucket, prefix, **_options(query, where))


def _options(query: str, where: str) -> dict[str, str]:
    options = dict(parse_qsl(query, keep_blank_values=True))
    if unknown := options.keys() - {"endpoint", "region"}:
        # The value may be a secret.
        raise UsageError(explain(f"{where}: ?{min(unknown)}=…", expected="endpoint or region"))
    if "endpoint" in options:
        options["endpoint"] = endpoint_of(options["endpoint"], f"{where}: endpoint")
    if not _REGION.fullmatch(options.get("region", "x")):
        raise UsageError(explain(f"{where}: region", got=options["region"], expected="a name such as eu-central-1"))
    return options


def endpoint_of(text: str, where: str) -> str:
    """Return an endpoint as `SCHEME://HOST[:PORT]`; raises UsageError, which shows no secret."""
    match = _ENDPOINT.fullmatch(text)
    if match is None:
        got = "one with a key" if "@" in text else text
        raise UsageError(explain(where, got=got, expected="http://HOST:PORT or https://HOST[:PORT]"))
    return f"{match[1]}://{match[2]}{match[3] or ''}"


def endpoint_in_use(root: ObjectRoot) -> tuple[str, str] | None:
    """Return the scheme and the address of the endpoint of a root; None for AWS's own. Raises UsageError."""
    endpoint = root.endpoint
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        if not endpoint and (value := os.environ.get(name)):
            endpoint = endpoint_of(value, name)
    if not endpoint:
        return None
    parts = urlsplit(endpoint)
    return parts.scheme, parts.netloc
