"""Engines on Ray: plain actors around `capflow.AsyncLLM` on two nodes, and an application of Ray Serve.

The nodes are two raylets of this machine. Every engine reaches the hub through TCP.
"""

import json
import os
import urllib.request

import pytest

from tests.kit.engines import prompts
from tests.kit.hubs import free_port
from tests.kit.nodes import RAY_VARIABLES, keeper
from tests.kit.ray_engines import Engine
from tests.kit.sources import ROOT
from tests.kit.waiting import eventually

__all__ = ["keeper"]

ray = pytest.importorskip("ray")
serve = pytest.importorskip("ray.serve")

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(560)]

VARIABLES = {
    **RAY_VARIABLES,
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "GLOO_SOCKET_IFNAME": "lo",
}


@pytest.fixture(scope="module")
def cluster():
    """Two nodes, which this process is connected to."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        for name, value in VARIABLES.items():
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        size = {"num_cpus": 2, "object_store_memory": 100 * 2**20}
        nodes = Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False})
        nodes.add_node(**size)
        ray.init(address=nodes.address, log_to_driver=False)
        try:
            yield nodes
        finally:
            ray.shutdown()
            nodes.shutdown()


def ids(number):
    return prompts((9 + 3 * number,), seed=number)[0]["prompt_token_ids"]


def engines_of(keeper):
    return {done.engine.partition("@")[0] for done in keeper.done.values()}


def test_actors_on_two_nodes(cluster, tiny, reference, keeper):
    each = ray.remote(Engine).options(num_cpus=2)
    actors = [each.remote(tiny, keeper.address, enforce_eager=True, engine_name=f"e{number}") for number in range(2)]
    try:
        answers = ray.get([actors[n % 2].generate.remote(ids(n), f"r{n}") for n in range(6)], timeout=300)
        for number, (tokens, _) in enumerate(answers):
            keeper.hold(f"r{number}", tokens, reference)
        assert len({node for _, node in answers}) == 2
        assert engines_of(keeper) == {"e0", "e1"}
        ray.get([actor.close.remote() for actor in actors], timeout=60)
    finally:
        for actor in actors:
            ray.kill(actor)


def routes(port):
    """Return the routes that the proxy of Ray Serve knows; it learns them a moment after an application runs."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/-/routes", timeout=10) as answer:
        return json.load(answer)


def test_an_application_of_ray_serve(cluster, tiny, reference, keeper):
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    application = serve.deployment(Engine, ray_actor_options={"num_cpus": 1})
    serve.run(application.bind(tiny, keeper.address, enforce_eager=True, engine_name="served"), route_prefix="/tiny")
    try:
        eventually(lambda: "/tiny" in routes(port), 60)
        for number in range(3):
            body = json.dumps({"token_ids": ids(number), "name": f"r{number}"}).encode()
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/tiny", body, timeout=300) as answer:
                tokens, _ = json.load(answer)
            keeper.hold(f"r{number}", tokens, reference)
        assert engines_of(keeper) == {"served"}
    finally:
        serve.shutdown()
