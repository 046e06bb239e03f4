"""An engine that several commands start: rows equal those of one process, and all commands steer alike.

The nodes are processes of this machine that reach each other and the hub through TCP.
"""

import pytest

from tests.kit.engines import Reference, save_tiny, save_words
from tests.kit.fronts import hold_all, steered_alike
from tests.kit.hubs import free_port
from tests.kit.nodes import keeper, running, started

__all__ = ["keeper"]

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(560)]


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """A tiny mixture of experts with a tokenizer: vLLM has external load balancing for no other models."""
    directory = save_tiny(tmp_path_factory.mktemp("mixtral"), "mixtral")
    save_words(directory)
    return directory


def over_nodes(keeper, *arguments):
    """Return the arguments of two nodes that share one replica."""
    each = ["--hub", keeper.address, "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    each += arguments
    return [*each, "--node-rank", "0"], [*each, "--node-rank", "1", "--headless"]


def by_replicas(keeper, size, *each):
    """Return the arguments of commands that start the replicas of one engine."""
    common = ["--hub", keeper.address, "--engine-id", "run-1", "--enforce-eager", "--data-parallel-size", str(size)]
    common += ["--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(free_port())]
    return [[*common, *map(str, own)] for own in each]


@pytest.mark.parametrize(
    ("arguments", "ranks"),
    [(("-tp", "2", "--enforce-eager"), {(0, 0, 0)}), (("-pp", "2"), {(0, 0, 0), (1, 0, 0)})],
    ids=["tensor parallel", "pipeline parallel"],
)
def test_a_replica_over_two_nodes(tiny_with_words, reference, keeper, tmp_path, arguments, ranks):
    with running(tmp_path, tiny_with_words, *over_nodes(keeper, *arguments)) as (first, _):
        assert hold_all(keeper, reference, [first]) == ranks


def test_nodes_with_different_options_refuse_to_start(tiny_with_words, keeper, tmp_path):
    head, other = over_nodes(keeper, "-tp", "2", "--enforce-eager")
    with started(tmp_path, tiny_with_words, head, [*other, "--sites", "post_block:1"]) as nodes:
        for node in nodes:
            assert node.process.wait(200) != 0
    for node in nodes:
        assert (
            "--sites of one engine: got post_block:0 post_block:1 post_block:2 post_block:3 and post_block:1,"
            in node.log
        )
        assert "expected one value; give the same to the commands of all nodes" in node.log


def test_a_headless_replica(tiny_with_words, reference, keeper, tmp_path):
    """The first command has the only front end, which shares out the requests."""
    own = ["--data-parallel-size-local", 1], ["--data-parallel-size-local", 1, "--data-parallel-start-rank", 1]
    each = by_replicas(keeper, 2, own[0], [*own[1], "--headless"])
    with running(tmp_path, tiny_with_words, *each) as (first, _):
        assert hold_all(keeper, reference, [first]) == {(0, 0, 0), (0, 1, 0)}
        assert len({done.engine for done in keeper.done.values()}) == 1


def test_replicas_with_a_load_balancer_of_the_user(experts, keeper, tmp_path):
    each = by_replicas(keeper, 2, ["--data-parallel-rank", 0], ["--data-parallel-rank", 1])
    reference = Reference(experts)
    with running(tmp_path, experts, *each) as (first, second):
        assert hold_all(keeper, reference, [first, second]) == {(0, 0, 0), (0, 1, 0)}
        steered_alike(keeper, reference, first, second)


def test_a_load_balancer_of_each_node(experts, keeper, tmp_path):
    """The first command has a front end for two replicas; the second has one replica."""
    own = ["--data-parallel-size-local", 2, "--data-parallel-hybrid-lb"], ["--data-parallel-rank", 2]
    each = by_replicas(keeper, 3, [*own[0], "--data-parallel-start-rank", 0], own[1])
    reference = Reference(experts)
    with running(tmp_path, experts, *each) as (first, second):
        assert {rank[1] for rank in hold_all(keeper, reference, [first, second])} >= {0, 2}
        steered_alike(keeper, reference, first, second)
