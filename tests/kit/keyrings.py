"""Keys of a hub and its peers, for TCP."""

from __future__ import annotations

import pytest

from capflow.transport.keys import AllowList, find_key, read_key, write_key
from capflow.transport.zap import new_key
from tests.kit.hubs import Recorder, running_hub

LOOPBACK = "tcp://127.0.0.1:0"


@pytest.fixture
def keys(tmp_path, monkeypatch):
    """A directory with the keys `hub`, `gpu`, `ann` and `eve`; the hub allows gpu and ann."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("CAPFLOW_KEY", raising=False)
    directory = tmp_path / "capflow" / "keys"
    directory.mkdir(parents=True, mode=0o700)
    for name in ("hub", "gpu", "ann", "eve"):
        write_key(directory, name, new_key())
    allow(directory, "gpu", "capture", "read")
    allow(directory, "ann", "read")
    return directory


def public(name):
    return read_key(find_key(name)).public


def allow(directory, name, *rights):
    AllowList(directory).allow(public(name), rights, name)


def keyed_hub(*consumers):
    return running_hub(LOOPBACK, *(consumers or [Recorder()]), key="hub")
