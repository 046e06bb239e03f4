"""vLLM on Ray: rows of workers and replicas that Ray started equal those of one process, and all of them are steered.

The nodes are two raylets of this machine. Each says to have a GPU, and the worker that takes it runs on the CPU.
"""

import contextlib
import json
import os
import subprocess
import sys

import pytest

from tests.kit.fronts import completion, end_during_a_step, hold_all, steered_alike
from tests.kit.hubs import configured, free_port, running_hub
from tests.kit.nodes import KIT, RAY_VARIABLES, VARIABLES, keeper, running
from tests.kit.rows import SlowKeeper
from tests.kit.servers import environment
from tests.kit.waiting import eventually

__all__ = ["keeper"]

ray = pytest.importorskip("ray")

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(560)]

PLATFORM = KIT / "ray_platform"
WORKERS = ("--distributed-executor-backend", "ray")
TENSOR_PARALLEL = (*WORKERS, "-tp", "2", "--enforce-eager")


def replicas(nodes):
    """Return the arguments for a replica on each node, each an actor of Ray's."""
    head = nodes.head_node.node_ip_address
    size = ("--data-parallel-size", "2", "--data-parallel-size-local", "1", "--data-parallel-address", head)
    return (*size, "--data-parallel-backend", "ray", "--enforce-eager")


@contextlib.contextmanager
def cluster():
    """Run two nodes, which this process is connected to."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        for name, value in RAY_VARIABLES.items():
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", str(PLATFORM), prepend=os.pathsep)
        nodes = Cluster()
        try:
            size = {"num_cpus": 1, "num_gpus": 1, "object_store_memory": 100 * 2**20}
            nodes.add_node(**size, include_dashboard=False)
            nodes.add_node(**size, node_ip_address="127.0.0.2")
            ray.init(address=nodes.address, log_to_driver=False)
            yield nodes
        finally:
            ray.shutdown()
            nodes.shutdown()


def of_cluster(nodes):
    """Return the variables of a command on the first node."""
    return {"RAY_ADDRESS": nodes.address, "VLLM_HOST_IP": nodes.head_node.node_ip_address}


@contextlib.contextmanager
def served(nodes, home, model, keeper, *arguments):
    """Serve with a worker on each node, as the arguments divide the model; yield the front end."""
    variables = {**of_cluster(nodes), "path": PLATFORM}
    command = ["--hub", keeper.address, *arguments]
    assert ray.available_resources()["GPU"] == 2
    with running(home, model, command, **variables) as (front,):
        assert ray.available_resources().get("GPU", 0) == 0, "the workers are not Ray's"
        yield front


@pytest.mark.parametrize(
    ("arguments", "ranks"),
    [(TENSOR_PARALLEL, {(0, 0, 0)}), ((*WORKERS, "-pp", "2"), {(0, 0, 0), (1, 0, 0)})],
    ids=["tensor parallel", "pipeline parallel"],
)
def test_workers_on_two_nodes(tiny_with_words, reference, keeper, tmp_path, arguments, ranks):
    with cluster() as nodes, served(nodes, tmp_path, tiny_with_words, keeper, *arguments) as front:
        names = sorted(each["name"] for each in ray.util.list_named_actors(all_namespaces=True))
        assert [name.rpartition("_")[2][2:] for name in names] == ["0", "1"]  # vllm_Worker_…_TP0 and so on
        assert hold_all(keeper, reference, [front]) == ranks
        steered_alike(keeper, reference, front, front)


def test_replicas_on_two_nodes(tiny_with_words, reference, keeper, tmp_path):
    with cluster() as nodes, served(nodes, tmp_path, tiny_with_words, keeper, *replicas(nodes)) as front:
        assert hold_all(keeper, reference, [front]) == {(0, 0, 0), (0, 1, 0)}
        assert len({done.engine for done in keeper.done.values()}) == 1
        steered_alike(keeper, reference, front, front)


def test_a_process_with_a_placement_group_has_ray_start_its_workers():
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    def placed(**arguments):
        from vllm.engine.arg_utils import AsyncEngineArgs

        from capflow_engine.compat.launch import Launch

        return Launch.of(AsyncEngineArgs("model", **arguments)).on_ray

    with cluster():
        group = ray.util.placement_group([{"CPU": 1}, {"GPU": 1}])
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
        inside = ray.remote(num_cpus=1)(placed).options(scheduling_strategy=strategy)
        outside = ray.remote(num_cpus=1)(placed)
        asked = [inside.remote(tensor_parallel_size=2), inside.remote(), outside.remote(pipeline_parallel_size=2)]
        assert ray.get(asked, timeout=200) == [True, False, False]


@pytest.mark.parametrize("divided", ["a replica", "two replicas"])
def test_workers_send_their_last_rows_before_they_are_killed(tiny_with_words, reference, tmp_path, divided):
    """Most frames wait in the workers when the server is told to end."""
    keeper = SlowKeeper()
    keeper.address = f"tcp://127.0.0.1:{free_port()}"
    with cluster() as nodes, running_hub(keeper.address, configured(keeper, "block", queue_bytes_max=1)) as hub:
        arguments = TENSOR_PARALLEL if divided == "a replica" else replicas(nodes)
        with served(nodes, tmp_path, tiny_with_words, keeper, *arguments) as front:
            tokens = completion(front, "r1", 1, max_tokens=40, capture_wait=False)
            assert "r1" not in keeper.done
        keeper.hold("r1", tokens, reference)
        assert keeper.done["r1"].status == "length"
        # vLLM kills the schedulers of replicas before these can leave the hub.
        if divided == "two replicas":
            eventually(lambda: not hub.status()["sessions"])
        assert not hub.status()["sessions"]


def test_an_engine_that_is_told_to_end_during_a_step_loses_no_rows(tiny_with_words, reference, tmp_path):
    keeper = SlowKeeper()
    keeper.address = f"tcp://127.0.0.1:{free_port()}"
    with cluster() as nodes, running_hub(keeper.address, configured(keeper, "block", queue_bytes_max=1)):
        with served(nodes, tmp_path, tiny_with_words, keeper, *TENSOR_PARALLEL) as front:
            asked = end_during_a_step(front, keeper)
        keeper.hold("r1", asked.result(), reference)
        assert keeper.done["r1"].status == "length"


IN_PYTHON = """
import asyncio, json, sys
import capflow

model, hub, head = sys.argv[1:]
params = capflow.sampling_params(
    id="r1", capture={"hooks": {"post_block": "all"}, "positions": "all"}, max_tokens=40, temperature=0, ignore_eos=True
)

async def ask():
    replicas = {"data_parallel_size": 2, "data_parallel_size_local": 1, "data_parallel_address": head}
    sizes = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 8, "enforce_eager": True}
    async with capflow.AsyncLLM.start(
        model, hub=hub, capture_wait_s=0.5, data_parallel_backend="ray", **replicas, **sizes
    ) as llm:
        async for output in llm.generate({"prompt_token_ids": list(range(5, 25))}, params):
            pass
    print(json.dumps([*output.prompt_token_ids, *output.outputs[0].token_ids]))

asyncio.run(ask())
"""


def test_replicas_of_python_send_their_last_rows_before_they_are_killed(tiny_with_words, reference, tmp_path):
    keeper = SlowKeeper()
    keeper.address = f"tcp://127.0.0.1:{free_port()}"
    with cluster() as nodes, running_hub(keeper.address, configured(keeper, "block", queue_bytes_max=1)):
        done = subprocess.run(
            [sys.executable, "-c", IN_PYTHON, tiny_with_words, keeper.address, nodes.head_node.node_ip_address],
            env=environment(tmp_path, path=PLATFORM, **VARIABLES | of_cluster(nodes)),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        keeper.hold("r1", json.loads(done.stdout.splitlines()[-1]), reference)
