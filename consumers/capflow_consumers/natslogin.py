"""How capflow shows a NATS server who it is, and makes sure of whom it talks to."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any, NamedTuple

from capflow.errors import UsageError, explain


class NatsLogin(NamedTuple):
    """Paths of files, empty for none; all but `creds` are PEM.

    creds: a JWT and a seed (https://docs.nats.io/using-nats/developer/connecting/creds). tls_ca: certificates that may vouch for a server.
    tls_cert, tls_key: capflow's own.
    """

    creds: str = ""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""

    def options(self, where: str) -> dict[str, Any]:
        """Return what `nats.connect` is given; raises UsageError naming the option whose file is not what it should be."""
        given: dict[str, Any] = {}
        if self.creds:
            text = _text(self.creds, f"{where}.creds")
            if "BEGIN NATS USER JWT" not in text or "BEGIN USER NKEY SEED" not in text:
                expected = "a credentials file with a JWT and a seed, as nsc writes it"
                raise UsageError(explain(f"{where}.creds", got=self.creds, expected=expected))
            given["user_credentials"] = self.creds
        if self.tls_ca or self.tls_cert or self.tls_key:
            given["tls"] = self._context(where)
        return given

    def _context(self, where: str) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH)
        if self.tls_ca:
            text = _text(self.tls_ca, f"{where}.tls_ca")
            try:
                context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cadata=text)
            except (ssl.SSLError, ValueError) as e:
                raise UsageError(explain(f"{where}.tls_ca", got=self.tls_ca, expected="certificates in PEM")) from e
        if bool(self.tls_cert) != bool(self.tls_key):
            missing, there = ("tls_key", "tls_cert") if self.tls_cert else ("tls_cert", "tls_key")
            raise UsageError(explain(f"{where}.{missing}", got="nothing", expected=f"a file, as there is a {there}"))
        if self.tls_cert:
            for name, path in (("tls_cert", self.tls_cert), ("tls_key", self.tls_key)):
                _text(path, f"{where}.{name}")
            try:
                context.load_cert_chain(self.tls_cert, self.tls_key, password="")
            except (ssl.SSLError, ValueError) as e:
                got, expected = f"{self.tls_cert} and {self.tls_key}", "a certificate and its key in PEM, not encrypted"
                raise UsageError(explain(f"{where}.tls_cert", got=got, expected=expected)) from e
        return context


def _text(path: str, where: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as e:
        got = f"{path}: {e.strerror if isinstance(e, OSError) else 'not text'}"
        raise UsageError(explain(where, got=got, expected="a file that can be read")) from e
