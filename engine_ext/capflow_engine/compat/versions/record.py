"""What `make matrix` recorded of each version of vLLM. The bounds, what is refused and what is off come from it."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from capflow_engine.compat.versions.contract import Break
from capflow_engine.compat.versions.surface import (
    ASYNC_LLM,
    BEAM_SEARCH,
    CORE,
    DRAFTS,
    GRPC,
    HTTP,
    KV_OFFLOADING,
    LORA,
    PARALLEL,
    REPLICAS,
    V2_RUNNER,
)

PATH = Path(__file__).with_name("records.json")

NEEDS = {
    "rows": CORE,
    "compiled": CORE,
    "every hook": CORE,
    "steering": CORE,
    "steering while running": CORE,
    "new weights": CORE,
    "two ranks": PARALLEL,
    "replicas": REPLICAS,
    "drafts": DRAFTS,
    "LoRA": LORA,
    "V2 runner": V2_RUNNER,
    "HTTP": HTTP,
    "gRPC": GRPC,
    "AsyncLLM": ASYNC_LLM,
    "beam search": BEAM_SEARCH,
    "KV offloading": KV_OFFLOADING,
}
"""The checks, and for each what is off where one of its tests fails. A version that fails a core one is refused."""


class Outcome(NamedTuple):
    """What a check of a version came to: how many of its tests passed and how many failed."""

    passed: int
    failed: int


class VersionRecord(NamedTuple):
    """A version of vLLM.

    built: what it ran as, for a reader.
    missing: by feature, the first name that it has not, and why; the feature's checks are not run.
    outcomes: by check, in the order of `NEEDS`; without those that were not run.
    """

    built: str
    missing: Mapping[str, tuple[str, str]]
    outcomes: Mapping[str, Outcome]

    @property
    def right(self) -> bool:
        """Whether its rows were checked and no core check failed."""
        checked = "rows" in self.outcomes and self.outcomes["rows"].passed > 0
        return checked and CORE not in {each.need for each in self.breaks()}

    def breaks(self) -> list[Break]:
        """Return the names that are missing and the checks with failed tests."""
        missing = [Break(need, *reason) for need, reason in self.missing.items()]
        return missing + [
            Break(NEEDS[check], check, f"{outcome.failed} of {sum(outcome)} tests failed")
            for check, outcome in self.outcomes.items()
            if outcome.failed
        ]


def decoded(text: str) -> dict[str, VersionRecord]:
    """Return the versions of a record, oldest first."""
    entries: dict[str, Any] = json.loads(text)
    return {
        version: VersionRecord(
            entry["built"],
            {feature: tuple(reason) for feature, reason in entry["missing"].items()},
            {check: Outcome(*entry["checks"][check]) for check in NEEDS if check in entry["checks"]},
        )
        for version, entry in sorted(entries.items(), key=lambda item: parts(item[0]))
    }


def encoded(versions: Mapping[str, VersionRecord]) -> str:
    """Return a record of versions as JSON, a version a line."""
    entries = []
    for version, tested in sorted(versions.items(), key=lambda item: parts(item[0])):
        checks = {check: tested.outcomes[check] for check in NEEDS if check in tested.outcomes}
        entry = {"built": tested.built, "missing": dict(tested.missing), "checks": checks}
        entries.append(f"  {json.dumps(version)}: {json.dumps(entry)}")
    return "{\n" + ",\n".join(entries) + "\n}\n"


def read() -> dict[str, VersionRecord]:
    """Return the versions in the file, oldest first."""
    return decoded(PATH.read_text("utf-8"))


@functools.cache
def tested() -> Mapping[str, VersionRecord]:
    """Return the versions in the file, oldest first, as they were when first asked for."""
    return read()


def bounds(versions: Mapping[str, VersionRecord]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the first accepted major and minor version, and the first that is newer than all recorded ones."""
    accepted = [parts(version)[:2] for version, each in versions.items() if each.right]
    return min(accepted), (max(accepted)[0], max(accepted)[1] + 1)


def parts(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, without what follows a plus sign."""
    return tuple(int(part) for part in plain(version).split(".") if part.isdigit())


def plain(version: str) -> str:
    """Return a version without its local part, such as `+cpu`."""
    return version.partition("+")[0]
