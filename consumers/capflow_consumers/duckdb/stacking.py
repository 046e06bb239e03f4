"""Stacks the probes of one site into few matrices, so that many probes read each row once."""

from __future__ import annotations

import numpy as np

from capflow.errors import UsageError, explain
from capflow.probes.probe import Probe, Scorer


def stacked(probes: list[Scorer]) -> list[Scorer]:
    """Return the probes of one site, with the linear probes of each pool stacked into one.

    Raises UsageError when their widths differ.
    """
    by_pool: dict[str, list[Probe]] = {}
    others: list[Scorer] = []
    for probe in probes:
        if probe.hidden_size != probes[0].hidden_size:
            expected = f"{probes[0].hidden_size}, as {probes[0].where} at the same site"
            raise UsageError(explain(f"{probe.where}: weight", got=f"{probe.hidden_size} numbers", expected=expected))
        if isinstance(probe, Probe):
            by_pool.setdefault(probe.pool, []).append(probe)
        else:
            others.append(probe)
    return others + [_stack(linear) for linear in by_pool.values()]


def _stack(probes: list[Probe]) -> Probe:
    return Probe(
        site=probes[0].site,
        names=tuple(name for probe in probes for name in probe.names),
        weight=np.concatenate([probe.weight for probe in probes]),
        bias=np.concatenate([probe.bias for probe in probes]),
        thresholds=tuple(threshold for probe in probes for threshold in probe.thresholds),
        pool=probes[0].pool,
    )
