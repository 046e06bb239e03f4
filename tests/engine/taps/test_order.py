"""Taps before one module run in the order of the forward pass: a gate is scored before it acts."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from capflow.capture.site import Site
from capflow_engine.layer.parts import Slot
from capflow_engine.layer.structure import HookPlace
from capflow_engine.steering.budget import Size
from capflow_engine.taps import step as step_module
from capflow_engine.taps.bank import Bank
from capflow_engine.taps.tables import Tables
from capflow_engine.taps.widths import Widths

pytestmark = pytest.mark.engine


class Core(nn.Module):
    def forward(self, query, key, value):
        return query


def test_queries_are_tapped_before_keys_and_keys_before_values(monkeypatch):
    from capflow_engine.worker.worker import WorkerCapture

    layer, cpu, seen = nn.Module(), torch.device("cpu"), []
    layer.core = Core()
    arguments = {"q": Slot(0, "query"), "k": Slot(1, "key"), "v": Slot(2, "value")}
    owned = sorted(
        ((Site(0, hook), layer, HookPlace("core", (slot,))) for hook, slot in arguments.items()),
        key=lambda each: each[0],
    )
    sites = [site for site, *_ in owned]
    sizes = {"sites": 3, "tokens": 1, "rows": 1, "hidden": 4, "dtype": torch.float32}
    worker = SimpleNamespace(
        widths=Widths.uniform(4, 3),
        tables=Tables(device=cpu, resident=False, **sizes),
        bank=Bank(Size(1, 1, 1), {site: n for n, site in enumerate(sites)}, 4, cpu),
        device=cpu,
        runner=SimpleNamespace(get_model=lambda: layer),
    )
    WorkerCapture._install(worker, owned)
    step = SimpleNamespace(plan=SimpleNamespace(idle=False), tap=lambda n, *_: seen.append(sites[n].hook))
    monkeypatch.setattr(step_module, "current", step)
    layer.core(*torch.zeros(3, 2, 4))
    assert sites != [Site(0, hook) for hook in arguments]
    assert seen == list(arguments)
