"""The ways to launch vLLM: in one process, over nodes, and by one command for each part of an engine.

A *replica* is one copy of the model. Its ranks are the product of the tensor and the pipeline parallel size; with
`--nnodes` they are on several nodes. An engine has several replicas with data parallelism. Each command of an engine
starts some of its replicas, or a part of one.

Verified with vLLM 0.32.0.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import multiprocessing
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from capflow import limits
from capflow.errors import UsageError, explain
from capflow.transport.address import without_key
from capflow_engine.hubs import HubAt
from capflow_engine.settings import Settings

logger = logging.getLogger("vllm.capflow")

# Arguments of a launch that are not fields of vLLM's `ParallelConfig`.
_BESIDE = "data_parallel_"


def in_one_process(engine_args: Any) -> Any:
    """Return a copy of an engine's arguments that has the model in one process: all of parallelism is at its default.

    What vLLM adds to its parallelism is reset too, because the names are those of its `ParallelConfig`.
    """
    from vllm.config import ParallelConfig

    names = {field.name for field in dataclasses.fields(ParallelConfig)}
    single = copy.copy(engine_args)
    for field in dataclasses.fields(engine_args):
        if field.name in names or field.name.startswith(_BESIDE):
            value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            setattr(single, field.name, value)
    return single


class Launch(NamedTuple):
    """How many commands start an engine.

    over_nodes: the ranks of a replica are on several nodes, each with a command of its own.
    by_replicas: several commands start the replicas.
    on_ray: Ray chooses the nodes of workers.
    """

    over_nodes: bool
    by_replicas: bool
    on_ray: bool = False

    @classmethod
    def of(cls, engine_args: Any, *, headless: bool = False) -> Launch:
        """Return the launch that an engine's arguments describe.

        headless: whether this command serves no HTTP.
        """
        nodes = engine_args.nnodes
        executor = engine_args.distributed_executor_backend
        ranks = engine_args.tensor_parallel_size * engine_args.pipeline_parallel_size
        chosen = executor is None and ranks > 1 and _in_placement_group()
        on_ray = chosen or "ray" in (executor, engine_args.data_parallel_backend)
        replicas = engine_args.data_parallel_size
        if on_ray:
            return cls(over_nodes=False, by_replicas=False, on_ray=True)  # one command starts all replicas
        if replicas == 1 and int(os.environ.get("VLLM_DP_SIZE") or 1) > 1:
            return cls(over_nodes=False, by_replicas=True)  # each process of a script has one replica
        here = engine_args.data_parallel_size_local
        ranked = engine_args.data_parallel_rank is not None or engine_args.data_parallel_external_lb
        parts = nodes > 1 or headless or ranked or (here is not None and here < replicas)
        return cls(nodes > replicas, replicas > 1 and parts)

    @property
    def several(self) -> bool:
        """Whether several commands start the engine."""
        return self.over_nodes or self.by_replicas

    def check(self, hubs: Sequence[HubAt], engine_id: str | None, *, hub_from: str, id_from: str) -> None:
        """Raise UsageError for options with which the commands of one engine cannot work together.

        Each node must reach the hubs. The ranks of one replica take the engine's id from their first rank; replicas
        have nothing in common that is new at each start, so the user must choose an id for them.

        hub_from, id_from: the names of the options that hubs and id come from.
        """
        for hub in hubs if self.several or self.on_ray else ():
            if not hub.address.startswith("tcp://"):
                launched = "workers that Ray places" if self.on_ray else "several commands for one engine"
                got = f"{without_key(hub.address)}, with {launched}"
                do = "give the hub such an address (`capflow run --address …`), and name it to each command with --hub"
                raise UsageError(
                    explain(hub_from, got=got, expected="tcp://HOST:PORT, which every node reaches", do=do)
                )
        if self.by_replicas and engine_id is None:
            got = "none, with data-parallel replicas that several commands start"
            do = "choose one, new at each start, and give it to all commands of this engine"
            raise UsageError(explain(id_from, got=got, expected="one", do=do))


def _in_placement_group() -> bool:
    """Return whether this process has a placement group of Ray's, in which Ray starts the workers of several ranks."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized() and ray.util.get_current_placement_group() is not None


async def before_kill(engine_client: Any, method: str) -> None:
    """Have all workers of an engine call `method`, if its replicas are Ray's actors: vLLM kills those at the end."""
    if engine_client.vllm_config.parallel_config.data_parallel_backend != "ray":
        return
    try:
        await engine_client.collective_rpc(method, timeout=round(limits.ENGINE_END_S_MAX))
    except Exception as e:  # noqa: BLE001  the engine ends, whatever its workers did
        logger.warning("capflow: the workers may have rows that they did not send: %r", e)


def end_workers() -> None:
    """Ask the workers that this process started to end.

    A worker on another node than its scheduler waits for it on a socket, which vLLM does not close when it ends the
    node: it kills the worker after a while. A signal interrupts the wait, and the worker sends its last rows.
    """
    for process in multiprocessing.active_children():
        if process.name.startswith("VllmWorker"):
            process.terminate()


def settings_of(vllm_config: Any) -> Settings:
    """Return the settings of the engine that this rank belongs to; all ranks of its replica must call it.

    On several nodes, each command makes settings with an id of its own. The id of the first rank holds, because the
    scheduler is on its node. Raises UsageError, on every rank, if the commands were given different options.
    """
    settings: Settings = vllm_config.additional_config
    if vllm_config.parallel_config.nnodes_within_dp < 2:
        return settings
    import torch.distributed
    from vllm.distributed import get_pp_group, get_tp_group

    ranks: list[Any] = [(settings.engine, settings.alike())]
    for group in (get_pp_group(), get_tp_group()):
        gathered: list[Any] = [None] * group.world_size
        torch.distributed.all_gather_object(gathered, ranks, group=group.cpu_group)
        ranks = [rank for part in gathered for rank in part]
    (engine, first), *others = ranks
    for _, other in others:
        for name, value in first.items():
            if other[name] != value:
                got, do = f"{value} and {other[name]}", "give the same to the commands of all nodes"
                raise UsageError(explain(f"{name} of one engine", got=got, expected="one value", do=do))
    return dataclasses.replace(settings, engine=engine)
