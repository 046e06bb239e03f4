"""Fixtures of the hub's tests."""

import pytest

from capflow import limits


@pytest.fixture
def replaced_at_once(monkeypatch):
    """A hub takes a peer for gone at once when a new boot of it comes, and need not wait until it is silent."""
    monkeypatch.setattr(limits, "NAME_KEPT_S", 0.0)
