"""vLLM's executor on Ray: rows of workers that Ray started equal those of one process, and all of them are steered.

The nodes are two raylets of this machine. Each says to have a GPU, and the worker that takes it runs on the CPU.
"""

import contextlib
import os
import time

import pytest

from tests.kit.fronts import completion, hold_all, steered_alike
from tests.kit.hubs import configured, free_port, running_hub
from tests.kit.nodes import KIT, keeper, running
from tests.kit.rows import Keeper

__all__ = ["keeper"]

ray = pytest.importorskip("ray")

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(560)]

PLATFORM = KIT / "ray_platform"


@contextlib.contextmanager
def cluster():
    """Run two nodes, which this process is connected to."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_memory_monitor_refresh_ms", "0")
        patch.setenv("PYTHONPATH", str(PLATFORM), prepend=os.pathsep)
        nodes = Cluster()
        try:
            size = {"num_cpus": 1, "num_gpus": 1, "object_store_memory": 100 * 2**20}
            nodes.add_node(**size, include_dashboard=False)
            nodes.add_node(**size)
            ray.init(address=nodes.address, log_to_driver=False)
            yield nodes
        finally:
            ray.shutdown()
            nodes.shutdown()


class SlowKeeper(Keeper):
    """Takes a third of a second for each frame, and so has its workers wait."""

    def on_frame(self, frame):
        # The slowness itself.
        time.sleep(0.3)
        super().on_frame(frame)


@contextlib.contextmanager
def served(nodes, home, model, keeper, *arguments):
    """Serve with a worker on each node; yield the front end."""
    variables = {"RAY_ADDRESS": nodes.address, "VLLM_HOST_IP": nodes.head_node.node_ip_address, "path": PLATFORM}
    command = ["--hub", keeper.address, "--distributed-executor-backend", "ray", *arguments]
    assert ray.available_resources()["GPU"] == 2
    with running(home, model, command, **variables) as (front,):
        assert ray.available_resources().get("GPU", 0) == 0, "the workers are not Ray's"
        yield front


@pytest.mark.parametrize(
    ("arguments", "ranks"),
    [(("-tp", "2", "--enforce-eager"), {(0, 0, 0)}), (("-pp", "2"), {(0, 0, 0), (1, 0, 0)})],
    ids=["tensor parallel", "pipeline parallel"],
)
def test_workers_on_two_nodes(tiny_with_words, reference, keeper, tmp_path, arguments, ranks):
    with cluster() as nodes, served(nodes, tmp_path, tiny_with_words, keeper, *arguments) as front:
        names = sorted(each["name"] for each in ray.util.list_named_actors(all_namespaces=True))
        assert [name.rpartition("_")[2][2:] for name in names] == ["0", "1"]  # vllm_Worker_…_TP0 and so on
        assert hold_all(keeper, reference, [front]) == ranks
        steered_alike(keeper, reference, front, front)


def test_workers_send_their_last_rows_before_they_are_killed(tiny_with_words, reference, tmp_path):
    """Most frames wait in the workers when the server is told to end."""
    keeper = SlowKeeper()
    keeper.address = f"tcp://127.0.0.1:{free_port()}"
    with cluster() as nodes, running_hub(keeper.address, configured(keeper, "block", queue_bytes_max=1)) as hub:
        with served(nodes, tmp_path, tiny_with_words, keeper, "-tp", "2", "--enforce-eager") as front:
            tokens = completion(front, "r1", 1, max_tokens=40, capture_wait=False)
            assert "r1" not in keeper.done
        keeper.hold("r1", tokens, reference)
        assert keeper.done["r1"].status == "length"
        assert not hub.status()["sessions"]
