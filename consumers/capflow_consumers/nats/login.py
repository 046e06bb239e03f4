"""Authentication of capflow at a NATS server, and of the server: credentials and TLS."""

from __future__ import annotations

import base64
import binascii
import re
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from capflow.errors import UsageError, explain

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_SECTION = r"-+BEGIN {}-+\s+(\S+)\s+-+END"
_SEED_BYTES = 36


class NatsLogin(NamedTuple):
    """Paths of files, empty for none; all but `creds` are PEM.

    creds: a JWT and a seed (https://docs.nats.io/using-nats/developer/connecting/creds).
    tls_ca: certificates that may sign a server's certificate.
    tls_cert: capflow's own certificate.
    tls_key: its key.
    """

    creds: str = ""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""

    def options(self, where: str) -> dict[str, Any]:
        """Return the arguments of `nats.connect`. Raises UsageError that names the option with an invalid file.

        where: the consumer's name, for errors.
        """
        arguments: dict[str, Any] = {}
        if self.creds:
            self._credentials(where)
            arguments["user_jwt_cb"] = lambda: self._credentials(where)[0]
            arguments["signature_cb"] = lambda nonce: base64.b64encode(self._credentials(where)[1].sign(nonce.encode()))
        if self.tls_ca or self.tls_cert or self.tls_key:
            arguments["tls"] = self._context(where)
        return arguments

    def _credentials(self, where: str) -> tuple[bytes, Ed25519PrivateKey]:
        """Read the JWT and the key. The file is read at each use: it may be renewed while the consumer runs."""
        text = _text(self.creds, f"{where}.creds")
        jwt, seed = (re.search(_SECTION.format(name), text) for name in ("NATS USER JWT", "USER NKEY SEED"))
        if jwt is None or seed is None or (key := _key(seed[1])) is None:
            expected = "a credentials file with a JWT and a seed, as nsc writes it"
            raise UsageError(explain(f"{where}.creds", got=self.creds, expected=expected))
        return jwt[1].encode(), key

    def _context(self, where: str) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH)
        if self.tls_ca:
            text = _text(self.tls_ca, f"{where}.tls_ca")
            try:
                context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cadata=text)
            except (ssl.SSLError, ValueError) as e:
                raise UsageError(explain(f"{where}.tls_ca", got=self.tls_ca, expected="certificates in PEM")) from e
        if bool(self.tls_cert) != bool(self.tls_key):
            missing, other = ("tls_key", "tls_cert") if self.tls_cert else ("tls_cert", "tls_key")
            raise UsageError(explain(f"{where}.{missing}", got="nothing", expected=f"a file, as {other} is given"))
        if self.tls_cert:
            for name, path in (("tls_cert", self.tls_cert), ("tls_key", self.tls_key)):
                _text(path, f"{where}.{name}")
            try:
                context.load_cert_chain(self.tls_cert, self.tls_key, password="")
            except (ssl.SSLError, ValueError) as e:
                got, expected = f"{self.tls_cert} and {self.tls_key}", "a certificate and its key in PEM, not encrypted"
                raise UsageError(explain(f"{where}.tls_cert", got=got, expected=expected)) from e
        return context


def _key(seed: str) -> Ed25519PrivateKey | None:
    """Return the key of a NATS seed: base32 of a two-byte prefix, the key and a CRC-16. None if it is invalid."""
    # Installed by the extra `nats`.
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    try:
        raw = base64.b32decode(seed + "=" * (-len(seed) % 8))
    except binascii.Error:
        return None
    if len(raw) != _SEED_BYTES or binascii.crc_hqx(raw[:-2], 0) != int.from_bytes(raw[-2:], "little"):
        return None
    return Ed25519PrivateKey.from_private_bytes(raw[2:-2])


def _text(path: str, where: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as e:
        got = f"{path}: {e.strerror if isinstance(e, OSError) else 'not text'}"
        raise UsageError(explain(where, got=got, expected="a readable text file")) from e
