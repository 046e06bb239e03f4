"""How many commands start an engine, and what they need in common."""

import dataclasses

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs

from capflow.errors import UsageError
from capflow_engine.compat import model as compat_model
from capflow_engine.compat.launch import Launch, in_one_process
from capflow_engine.hubs import HubAt

TCP, IPC = HubAt("tcp://10.0.0.1:5555"), HubAt("ipc:///run/hub.sock")


def launch(headless=False, **arguments):
    return Launch.of(AsyncEngineArgs("model", **arguments), headless=headless)


@pytest.mark.parametrize(
    ("arguments", "over_nodes", "by_replicas"),
    [
        ({}, False, False),
        ({"tensor_parallel_size": 4, "pipeline_parallel_size": 2}, False, False),
        ({"data_parallel_size": 2}, False, False),
        ({"data_parallel_size": 2, "data_parallel_size_local": 2}, False, False),
        ({"data_parallel_size": 4, "data_parallel_multi_port_external_lb": True}, False, False),
        ({"nnodes": 2, "tensor_parallel_size": 2}, True, False),
        ({"nnodes": 2, "node_rank": 1, "pipeline_parallel_size": 2, "headless": True}, True, False),
        ({"nnodes": 2, "data_parallel_size": 2}, False, True),
        ({"nnodes": 4, "data_parallel_size": 2, "tensor_parallel_size": 2}, True, True),
        ({"data_parallel_size": 2, "data_parallel_size_local": 1}, False, True),
        ({"data_parallel_size": 2, "data_parallel_size_local": 0}, False, True),
        ({"data_parallel_size": 2, "data_parallel_rank": 0}, False, True),
        ({"data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_hybrid_lb": True}, False, True),
        ({"data_parallel_size": 2, "headless": True}, False, True),
    ],
    ids=str,
)
def test_how_many_commands_start_an_engine(arguments, over_nodes, by_replicas):
    assert launch(**arguments)[:2] == (over_nodes, by_replicas)


def test_a_process_of_a_script_has_one_replica(monkeypatch):
    monkeypatch.setenv("VLLM_DP_SIZE", "2")
    assert launch()[:2] == (False, True)


def test_each_node_must_reach_the_hub():
    over_nodes = launch(nnodes=2, tensor_parallel_size=2)
    over_nodes.check([TCP], None, hub_from="--hub", id_from="--engine-id")
    with pytest.raises(UsageError, match=r"--hub: got ipc:///run/hub.sock, .* expected tcp://HOST:PORT, which every"):
        over_nodes.check([TCP, IPC], None, hub_from="--hub", id_from="--engine-id")
    launch(tensor_parallel_size=2).check([IPC], None, hub_from="--hub", id_from="--engine-id")


@pytest.mark.parametrize("option", ["distributed_executor_backend", "data_parallel_backend"])
def test_workers_that_ray_places_must_reach_the_hub(option):
    on_ray = launch(tensor_parallel_size=2, **{option: "ray"})
    on_ray.check([TCP], None, hub_from="hub", id_from="engine_id")
    with pytest.raises(
        UsageError, match=r"hub: got ipc:///run/hub.sock, with workers that Ray places, expected tcp://"
    ):
        on_ray.check([IPC], None, hub_from="hub", id_from="engine_id")


def test_replicas_of_several_commands_need_an_id():
    by_replicas = launch(data_parallel_size=2, data_parallel_rank=1)
    by_replicas.check([TCP], "run-1", hub_from="hub", id_from="engine_id")
    with pytest.raises(UsageError, match=r"engine_id: got none, .* expected one; choose one, new at each start"):
        by_replicas.check([TCP], None, hub_from="hub", id_from="engine_id")
    launch(data_parallel_size=2).check([IPC], None, hub_from="hub", id_from="engine_id")


LAUNCHES = {
    "nodes": {"nnodes": 2, "node_rank": 1, "master_addr": "10.0.0.1", "pipeline_parallel_size": 2},
    "external": {"data_parallel_size": 2, "data_parallel_rank": 1, "data_parallel_external_lb": True},
    "hybrid": {"data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_hybrid_lb": True},
    "headless": {"data_parallel_size": 2, "data_parallel_size_local": 1, "data_parallel_start_rank": 1},
    "context": {"decode_context_parallel_size": 2, "tensor_parallel_size": 4},
    "ray": {"distributed_executor_backend": "ray", "tensor_parallel_size": 2},
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_model_in_one_process_has_nothing_of_its_launch(name):
    arguments = AsyncEngineArgs("model", max_model_len=64, enforce_eager=True, **LAUNCHES[name])
    expected = AsyncEngineArgs("model", max_model_len=64, enforce_eager=True)
    single = in_one_process(arguments)
    fields = [field.name for field in dataclasses.fields(arguments)]
    assert {field: getattr(single, field) for field in fields} == {field: getattr(expected, field) for field in fields}
    assert arguments.tensor_parallel_size == LAUNCHES[name].get("tensor_parallel_size", 1)


def test_the_structure_of_a_model_does_not_depend_on_its_launch(tiny, monkeypatch):
    monkeypatch.setenv("VLLM_DP_SIZE", "2")
    monkeypatch.setenv("VLLM_DP_RANK", "1")
    together = {name: value for arguments in LAUNCHES.values() for name, value in arguments.items()}
    arguments = AsyncEngineArgs(tiny, skip_tokenizer_init=True, dtype="float32")
    spread = AsyncEngineArgs(tiny, skip_tokenizer_init=True, dtype="float32", **together)
    assert compat_model.structures(spread) == compat_model.structures(arguments)
