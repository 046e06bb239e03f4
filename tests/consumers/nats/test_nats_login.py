"""TLS and credentials, against a real server that asks for them."""

from __future__ import annotations

import asyncio
import base64
import binascii
import datetime as dt
import ipaddress
import json
import time

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID

from capflow.errors import CapflowError, UsageError
from capflow_consumers.nats import link as natslink
from capflow_consumers.nats.consumer import NatsConfig, NatsConsumer
from capflow_consumers.nats.login import NatsLogin
from tests.kit.frames import make_frame
from tests.kit.natsd import natsd
from tests.kit.streams import SITE, done, kinds, opened


def certificate(directory, name, authority=None):
    """Write a certificate and its key, signed by an authority or by itself; return the paths and the signer."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    signer, issuer = authority or (key, subject)
    now = dt.datetime.now(dt.UTC)
    alternatives = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    builder = x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - dt.timedelta(hours=1))
    builder = builder.not_valid_after(now + dt.timedelta(days=1)).add_extension(alternatives, critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=authority is None, path_length=None), critical=True)
    paths = directory / f"{name}.pem", directory / f"{name}.key"
    pem = serialization.Encoding.PEM
    paths[0].write_bytes(builder.sign(signer, hashes.SHA256()).public_bytes(pem))
    plain = serialization.NoEncryption()
    paths[1].write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    return str(paths[0]), str(paths[1]), (key, subject)


@pytest.fixture
def tls(tmp_path):
    """A server that speaks TLS only and asks for a certificate; with capflow's options for it."""
    ca, _, authority = certificate(tmp_path, "ca")
    cert, key, _ = certificate(tmp_path, "server", authority)
    mine, my_key, _ = certificate(tmp_path, "capflow", authority)
    options = {"tls_ca": ca, "tls_cert": mine, "tls_key": my_key}
    with natsd(tmp_path, f'tls {{ cert_file: "{cert}", key_file: "{key}", ca_file: "{ca}", verify: true }}') as server:
        server.login = NatsLogin(**options).options("test")
        yield server, options


OPERATOR, ACCOUNT, USER, SEED = 14 << 3, 0, 20 << 3, 18 << 3  # what keys begin with (https://github.com/nats-io/nkeys)


def spelled(*parts):
    raw = b"".join(parts)
    return base64.b32encode(raw + binascii.crc_hqx(raw, 0).to_bytes(2, "little")).decode().rstrip("=")


def key_pair(kind):
    """Return a new key, its public half and its seed as NATS spells them."""
    key = Ed25519PrivateKey.generate()
    head = bytes([SEED | kind >> 5, (kind & 31) << 3])
    return key, spelled(bytes([kind]), key.public_key().public_bytes_raw()), spelled(head, key.private_bytes_raw())


def token(signer, issuer, subject, claims):
    """Return a JWT of NATS.

    https://docs.nats.io/running-a-nats-service/configuration/securing_nats/auth_intro/jwt defines them.
    """
    body = {"jti": subject, "iat": int(time.time()), "iss": issuer, "sub": subject, "name": subject[:4]}
    parts = [{"typ": "JWT", "alg": "ed25519-nkey"}, body | {"nats": claims | {"version": 2}}]
    signed = b".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in parts)
    return (signed + b"." + base64.urlsafe_b64encode(signer.sign(signed)).rstrip(b"=")).decode()


@pytest.fixture
def accounts(tmp_path):
    """A server that lets in who has credentials of its operator's account, and such a file."""
    operator, operator_key, _ = key_pair(OPERATOR)
    account, account_key, _ = key_pair(ACCOUNT)
    _, system_key, _ = key_pair(ACCOUNT)
    _, user_key, seed = key_pair(USER)
    every = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1)
    stored = dict.fromkeys(("mem_storage", "disk_storage", "streams", "consumer"), -1)
    limits = every | {"wildcards": True}
    tokens = {
        account_key: token(operator, operator_key, account_key, {"type": "account", "limits": limits | stored}),
        system_key: token(operator, operator_key, system_key, {"type": "account", "limits": limits}),
    }
    preload = "\n".join(f'{key}: "{made}"' for key, made in tokens.items())
    own = token(operator, operator_key, operator_key, {"type": "operator"})
    config = f'operator: "{own}"\nsystem_account: {system_key}\nresolver: MEMORY\nresolver_preload: {{\n{preload}\n}}'
    claims = {"type": "user", "subs": -1, "data": -1, "payload": -1, "pub": {}, "sub": {}}
    jwt = token(account, account_key, user_key, claims)
    path = tmp_path / "capflow.creds"
    path.write_text(
        f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
    )
    with natsd(tmp_path, config) as server:
        server.login = NatsLogin(creds=str(path)).options("test")
        yield server, path


def forward(server, name, **options):
    with opened(server, name, sites=[str(SITE)], **options) as consumer:
        consumer.on_frame(make_frame([("r1", 4, 0, 4)], [SITE]))
        assert consumer.on_request_done(done()).status == "ok"
    assert kinds(server.messages(name)) == {"opened": 1, "rows": 1, "done": 1}


def test_tls_on_both_sides(tls):
    server, options = tls
    forward(server, "SAFE", **options)


@pytest.mark.parametrize("missing", ["tls_ca", "tls_cert"])
def test_without_its_certificates_it_is_not_let_in_or_does_not_go_in(tls, missing):
    server, options = tls
    given = {k: v for k, v in options.items() if k != missing and (missing, k) != ("tls_cert", "tls_key")}
    with pytest.raises(CapflowError, match="expected a NATS server that admits capflow"):
        forward(server, "UNSAFE", **given)


def test_credentials(accounts):
    server, path = accounts
    forward(server, "OURS", creds=str(path))


def test_without_credentials_or_with_others_it_is_not_let_in(accounts, tmp_path):
    server, path = accounts
    with pytest.raises(CapflowError, match="expected a NATS server that admits capflow"):
        forward(server, "OURS")
    _, _, stranger = key_pair(USER)
    text = path.read_text()
    seed = next(line for line in text.splitlines() if line.startswith("SU"))
    path.write_text(text.replace(seed, stranger))
    with pytest.raises(CapflowError, match="expected a NATS server that admits capflow") as raised:
        forward(server, "OURS", creds=str(path))
    assert stranger not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"creds": "gone"}, "creds: got .*gone: No such file"),
        ({"creds": "text"}, "creds: got .*text, expected a credentials file with a JWT and a seed"),
        ({"creds": "torn"}, "creds: got .*torn, expected a credentials file with a JWT and a seed"),
        ({"tls_ca": "text"}, "tls_ca: got .*text, expected certificates in PEM"),
        ({"tls_ca": "bytes"}, "tls_ca: got .*bytes: not text"),
        ({"tls_cert": "text"}, "tls_key: got nothing, expected a file, as tls_cert is given"),
        ({"tls_key": "text"}, "tls_cert: got nothing, expected a file, as tls_key is given"),
        ({"tls_cert": "text", "tls_key": "text"}, "tls_cert: got .*, expected a certificate and its key in PEM"),
    ],
)
def test_files_that_are_none_are_named_before_anything_starts(tmp_path, options, message):
    (tmp_path / "text").write_text("hello\n")
    sections = (
        "-----BEGIN NATS USER JWT-----\na.b.c\n------END NATS USER JWT------\n"
        "-----BEGIN USER NKEY SEED-----\n{}\n------END USER"
    )
    (tmp_path / "torn").write_text(sections.format(key_pair(USER)[2][:-9] + "AAAAAAAAA"))
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    paths = {name: str(tmp_path / file) for name, file in options.items()}
    with pytest.raises(UsageError, match=f"consumers.nats.{message}"):
        NatsConsumer(NatsConfig("S", **paths)).check()


def test_a_client_that_takes_no_notice_of_its_end_is_not_waited_for():
    cancelled = []

    async def stubborn():
        while True:
            try:
                # What this client is: stuck.
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.append(1)
                if len(cancelled) == 3:
                    raise

    async def quick():
        return 7

    with pytest.raises(TimeoutError):
        asyncio.run(natslink._within(stubborn(), 0.05))
    assert len(cancelled) == 3
    assert asyncio.run(natslink._within(quick(), 5)) == 7
