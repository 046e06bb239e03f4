"""What a hub and its consumers keep of engines that are gone: nothing."""

from __future__ import annotations

import gc

import msgspec
import pytest

from capflow.capture.model import ModelInfo
from capflow.plugins.configure import ConfiguredConsumer
from capflow.testing.hub import MemoryHub
from capflow_consumers.duckdb.consumer import DuckdbConfig, DuckdbConsumer
from capflow_consumers.filesystem.consumer import FilesystemConfig, FilesystemConsumer
from tests.kit.frames import make_model
from tests.kit.waiting import eventually

ENGINES = 20
MODELS_MAX = 4  # this test's, and those of the last frame and end, which threads hold until the next


def models_alive():
    gc.collect()
    return sum(type(each) is ModelInfo and each.name == "gone" for each in gc.get_objects())


@pytest.fixture(params=["filesystem", "duckdb"])
def consumer(request, tmp_path):
    if request.param == "filesystem":
        return FilesystemConsumer(FilesystemConfig(str(tmp_path / "rows")))
    return DuckdbConsumer(DuckdbConfig(str(tmp_path / "scores.duckdb"), site="post_block:0", vectors=True))


@pytest.mark.parametrize("policy", ["block", "spill"])
def test_no_model_of_an_engine_that_is_gone_is_kept(consumer, policy, tmp_path):
    model = msgspec.structs.replace(make_model(), name="gone")
    with MemoryHub(ConfiguredConsumer.of(consumer, policy=policy, spool_dir=tmp_path)) as hub:
        for number in range(ENGINES):
            engine = hub.engine(f"e{number}", model=model)
            if number % 2:
                engine.step([("r", 4, 0, 4)])
                engine.finish("r")
                assert hub.result("r", f"e{number}").status == "ok"
            engine.lose()
            del engine
        eventually(lambda: models_alive() <= MODELS_MAX)
        (lane,) = hub.lanes
        if policy == "spill":
            eventually(lambda: lane._engines == {})  # the models of the last ones may be left until then
            hub.asked(lambda: list(lane.missed(set(), 1e9)))
            assert lane._gone == set()
            assert lane.writer._lost == {}
