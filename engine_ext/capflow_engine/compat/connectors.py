"""The KV connectors of vLLM: which may run with capflow, and how far they may load.

A connector keeps cache blocks outside of the prefix cache, and loads them for later requests. It may run only if its
keys are `Request.block_hashes`: capflow makes these differ where requests are steered differently. A loaded token is
not computed, so it has no row: a connector loads no more than a request may read from the prefix cache.

A key that a connector has taken is forgotten when the request's steering changes from there on. Verified with vLLM
0.32.0.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from capflow.errors import UsageError, explain
from capflow_engine.compat import cache

ALLOWED = "OffloadingConnector"

_BY_TOKENS = "finds blocks by their tokens, so a request could get blocks that were steered for another"
_BY_REQUEST = "takes the blocks of a request from another engine, which may have steered it differently"
_NOT_TRIED = "was not tested with capflow"
_REASONS = {
    "ExampleConnector": _BY_TOKENS,
    "ExampleHiddenStatesConnector": _BY_TOKENS,
    "FlexKVConnectorV1": _BY_TOKENS,
    "HF3FSKVConnector": _BY_TOKENS,
    "LMCacheConnectorV1": _BY_TOKENS,
    "LMCacheMPConnector": _BY_TOKENS,
    "MoRIIOConnector": _BY_REQUEST,
    "MooncakeConnector": _BY_REQUEST,
    "NixlConnector": _BY_REQUEST,
    "NixlPullConnector": _BY_REQUEST,
    "NixlPushConnector": _BY_REQUEST,
    "DecodeBenchConnector": "brings blocks that nothing computed",
}
_DO = f"leave it out, or use {ALLOWED} (--kv-offloading-size)"

_SPEC_DEFAULT = "CPUOffloadingSpec"

SPECS = {_SPEC_DEFAULT}
"""The kinds of memory of `ALLOWED` that were tested. Others may share blocks with other engines."""


def check_arguments(engine_args: Any) -> None:
    """Raise UsageError for engine arguments with a KV connector that may not run."""
    config = getattr(engine_args, "kv_transfer_config", None)
    if getattr(engine_args, "kv_offloading_size", None) is not None:
        _check("--kv-offloading-size", _offloading(getattr(engine_args, "kv_offloading_backend", "native")), {})
    elif config is not None:
        read = config.get if isinstance(config, dict) else functools.partial(getattr, config)
        _check("--kv-transfer-config", read("kv_connector", None), read("kv_connector_extra_config", None) or {})


def check_config(vllm_config: Any) -> None:
    """Raise UsageError for a configuration with a KV connector that may not run."""
    config = vllm_config.kv_transfer_config
    if config is not None:
        _check("--kv-transfer-config", config.kv_connector, config.kv_connector_extra_config or {})


def _offloading(backend: Any) -> str:
    """Return the connector that vLLM takes for `--kv-offloading-size`."""
    if backend != "native":
        return "LMCacheMPConnector"
    simple = os.environ.get("VLLM_USE_SIMPLE_KV_OFFLOAD", "0") not in ("", "0")
    return "SimpleCPUOffloadConnector" if simple else ALLOWED


def _check(flag: str, name: Any, extra: dict[str, Any]) -> None:
    thing = f"{flag} is not supported with {name}"
    if name != ALLOWED:
        raise UsageError(explain(f"{thing}: it {_REASONS.get(str(name), _NOT_TRIED)}", do=_DO))
    spec = extra.get("spec_name", _SPEC_DEFAULT)
    if spec not in SPECS:
        raise UsageError(explain(f"{thing} and {spec}: it {_NOT_TRIED}", do=f"leave out spec_name: {_SPEC_DEFAULT}"))
    from vllm.platforms import current_platform

    if spec == _SPEC_DEFAULT and current_platform.is_cpu():
        raise UsageError(explain(f"{thing} on a CPU: vLLM offloads from GPUs only", do="leave it out"))
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

    if not hasattr(OffloadingConnector, "_max_loadable_tokens"):
        raise UsageError(explain(f"{thing} of this vLLM: its loads cannot be limited", do="use vLLM 0.32"))


def limit_loads(scheduler: Any) -> None:
    """Make a scheduler's connector load no more than requests may read from the prefix cache."""
    connector = scheduler.connector
    if connector is not None:
        connector._max_loadable_tokens = functools.partial(
            _loadable, connector._max_loadable_tokens, scheduler.block_size
        )


def _loadable(inner: Any, block_size: int, request: Any, num_computed_tokens: int) -> int | None:
    """Return how many tokens may be loaded behind the computed ones; None for any number."""
    bound: int | None = inner(request, num_computed_tokens)
    readable = cache.readable(request)
    if readable is None:
        return bound
    loadable = max(0, readable - readable % block_size - num_computed_tokens)
    return loadable if bound is None else min(bound, loadable)


def follow_forks(scheduler: Any, request: Any) -> None:
    """Have the connector of a scheduler forget its keys of a request's blocks when these get others."""
    if scheduler.connector is not None:
        request.capflow_forked = functools.partial(_forget, scheduler.connector.scheduler, request.request_id)


def _forget(connector: Any, key: str, position: int) -> None:
    """Forget the keys of the chunks of a request that end behind a position."""
    state = connector._req_status.get(key)
    if state is not None:
        for group, held in zip(connector.config.kv_group_configs, state.group_states, strict=True):
            del held.offload_keys[position // group.tokens_per_chunk :]
