"""The settings of an engine: its taps and where its rows go. They travel in vLLM's `additional_config`.

vLLM and its models read entries of `additional_config`, and ask whether it is a dict. So `Settings` is the dict that
the user gave, with one entry more.

vLLM puts the entries into the key of its compile cache. The one more is a hash of what changes the compiled graph, such
as the taps. It leaves out all else, such as an address.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from capflow import limits
from capflow.buffers.policy import FALLBACKS, POLICIES_OF_WORKERS, POLICY_DEFAULT
from capflow.buffers.spool import check_root, default_root
from capflow.capture.attention import AttentionForms, grouped_forms
from capflow.capture.model import SiteShapes, grouped
from capflow.capture.router import RouterForms
from capflow.capture.site import HOOKS, Site, own_name
from capflow.divergence import ON_DIVERGENCE, ON_DIVERGENCE_DEFAULT
from capflow.errors import UsageError, explain
from capflow.protocol.routing import hub_of
from capflow_engine.hubs import HubAt

if TYPE_CHECKING:  # it needs torch
    from capflow_engine.layer.structure import Structure

SITES_DEFAULT = ("post_block:*",)
"""The patterns of the sites that carry a tap by default."""

STEER_NONE = "none"
"""In the place of patterns of sites that can be steered: no site can."""

STEERING_BANK_BYTES = 256 * limits.MIB
"""The memory of the steering bank by default: 16,384 different vectors of width 4096."""

GRAPH_KEY = "capflow"
"""The entry of `additional_config` that is capflow's."""

# Rises with every change to what a tap puts into the graph.
_GRAPH_VERSION = 6


def check_on_divergence(value: Any) -> str:
    """Return what an engine does if its ranks steer differently; raise UsageError for anything else."""
    if value not in ON_DIVERGENCE:
        raise UsageError(explain("on_divergence", got=value, expected=f"one of {', '.join(ON_DIVERGENCE)}"))
    return str(value)


class Outbound(NamedTuple):
    """What a worker does if its outbound queue is full.

    policy: block, drop or spill.
    spool_dir, spool_bytes: with `spill`, the directory and how many bytes it holds.
    spill_fallback: with `spill`, the policy if the directory is full.
    """

    policy: str = POLICY_DEFAULT
    spool_dir: str = ""
    spool_bytes: int = limits.SPOOL_BYTES_DEFAULT
    spill_fallback: str = POLICY_DEFAULT

    @property
    def blocks(self) -> bool:
        """Whether a step waits for room rather than lose rows."""
        return (self.spill_fallback if self.policy == "spill" else self.policy) == "block"

    @classmethod
    def of(cls, policy: Any, spool_dir: str | None, spool_bytes: int | None, spill_fallback: Any) -> Outbound:
        """Return the choice that options make; None is as if an option was not given. The directory becomes absolute.

        Raises UsageError for a wrong value, for a directory that cannot be written, and for an option that has no
        effect with the policy.
        """
        if policy not in POLICIES_OF_WORKERS:
            raise UsageError(explain("policy", got=policy, expected=f"one of {', '.join(POLICIES_OF_WORKERS)}"))
        options = {"spool_dir": spool_dir, "spool_bytes": spool_bytes, "spill_fallback": spill_fallback}
        if policy != "spill":
            for name, value in options.items():
                if value is not None:
                    raise UsageError(explain(name, got=f"policy {policy}", expected="policy spill with it"))
            return cls(policy)
        fallback: Any = POLICY_DEFAULT if spill_fallback is None else spill_fallback
        if fallback not in FALLBACKS:
            raise UsageError(explain("spill_fallback", got=fallback, expected=f"one of {', '.join(FALLBACKS)}"))
        size = limits.SPOOL_BYTES_DEFAULT if spool_bytes is None else spool_bytes
        if not 1 <= size <= limits.SPOOL_BYTES_MAX:
            raise UsageError(explain("spool_bytes", got=size, expected=f"1..{limits.SPOOL_BYTES_MAX}"))
        root = (Path(spool_dir) if spool_dir is not None else default_root()).absolute()
        check_root(root)
        return cls(policy, str(root), size, fallback)


@dataclass(frozen=True)
class Settings(dict[str, Any]):
    """The settings that all processes of an engine share.

    As a dict, it is the user's own `additional_config`, to which vLLM may add, and the entry `GRAPH_KEY`.

    engine: the engine's name, new at each start.
    hubs: the hubs that its workers connect to, by number.
    spares: how many of the last of them may start later. Such a hub has requests from its first answer on.
    sites: the sites that carry a tap, in order.
    fixed: the sites among them that can be captured and not steered.
    shapes: the sites among them whose rows have a shape of their own.
    attention: how attention makes its weights, of the layers with taps at `q` and `k`.
    router: how experts are chosen, of the layers with a tap at `router`.
    outbound, outbound_bytes_max: the policy and the size of each worker's outbound queue.
    staging_bytes_max: the device memory for the rows of one step.
    steering_bank_bytes: the device memory of the steering bank.
    hub_wait_s: how long the engine's start waits for the hubs; None starts without.
    capture_wait_s: how long a response over HTTP waits for the consumers at most, if its request asks it to.
    on_divergence: what the engine does if its ranks steer differently, one of `ON_DIVERGENCE`.
    shared: whether the user chose the engine's id, for several commands that start one engine.
    user: the `additional_config` that the user gave vLLM besides.
    """

    engine: str
    hubs: tuple[HubAt, ...]
    sites: tuple[Site, ...]
    spares: int = field(default=0, kw_only=True)
    fixed: tuple[Site, ...] = ()
    shapes: SiteShapes = ()
    attention: AttentionForms = ()
    router: RouterForms = ()
    outbound: Outbound = field(default_factory=Outbound)
    outbound_bytes_max: int = limits.OUTBOUND_BYTES_DEFAULT
    staging_bytes_max: int = 1024 * limits.MIB
    steering_bank_bytes: int = STEERING_BANK_BYTES
    hub_wait_s: float | None = None
    capture_wait_s: float = limits.CAPTURE_WAIT_S_DEFAULT
    on_divergence: str = ON_DIVERGENCE_DEFAULT
    shared: bool = False
    user: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.update(self.user)
        self[GRAPH_KEY] = self.compute_hash()

    def compute_hash(self) -> str:
        """Return a hash of what the taps put into the graph, and of the user's `additional_config`."""
        factors = json.dumps(
            [
                _GRAPH_VERSION,
                [str(site) for site in self.sites],
                [str(site) for site in self.fixed],
                self.steering_bank_bytes,
                dict(self.user),
            ],
            sort_keys=True,
            default=str,
        )
        return hashlib.sha256(factors.encode()).hexdigest()

    @property
    def regular(self) -> int:
        """How many hubs are not spare: the number of the first one that is."""
        return len(self.hubs) - self.spares

    def alike(self) -> dict[str, str]:
        """Return what must be equal on all nodes of an engine, as text, by the name of its option."""
        return {
            "--sites": " ".join(map(str, self.sites)),
            "--steering-bank-bytes": str(self.steering_bank_bytes),
            "--on-divergence": self.on_divergence,
            "the number of --hub": str(self.regular),
            "the number of --spare-hub": str(self.spares),
        }

    def hub_of(self, request: str) -> int:
        """Return the number of the hub that has a request, by its id outside of vLLM, while no spare hub is there."""
        return hub_of(request, self.regular)


class Tapped(NamedTuple):
    """The taps of a model.

    num_layers: how many layers it has.
    sites: the sites that carry a tap.
    fixed: the sites among them that cannot be steered.
    shapes: the sites among them whose rows have a shape of their own.
    attention: how attention makes its weights, of the layers with taps at `q` and `k`.
    router: how experts are chosen, of the layers with a tap at `router`.
    """

    num_layers: int
    sites: tuple[Site, ...]
    fixed: tuple[Site, ...]
    shapes: SiteShapes = ()
    attention: AttentionForms = ()
    router: RouterForms = ()

    @classmethod
    def of(
        cls,
        patterns: Iterable[str],
        layers: Sequence[Structure],
        steered: Sequence[str] | None = None,
    ) -> Tapped:
        """Return the taps that patterns name in a model of these layers.

        Raises UsageError as `tapped_sites` does, and for a pattern of `steered` that names no site that can be steered.

        steered: patterns of the sites that can be steered, or `none` alone; None for all that the model allows.
        """
        sites = tapped_sites(patterns, layers)
        fixed = {site: reason for site in sites if (reason := layers[site.layer].fixed.get(site.hook))}
        steerable = {site for site in sites if site not in fixed}
        if steered is not None:
            named = [] if list(steered) == [STEER_NONE] else steered
            steerable = _steered_sites(named, sites, steerable, layers, fixed)
        shapes = {site: shape for site in sites if (shape := layers[site.layer].shapes.get(site.hook))}
        compared = {site.layer for site in sites if site.hook == "q"} & {
            site.layer for site in sites if site.hook == "k"
        }
        forms = {layer: form for layer in compared if (form := layers[layer].attention) is not None}
        routed = {site.layer for site in sites if site.hook == "router"}
        routers = {layer: router for layer in routed if (router := layers[layer].router) is not None}
        captured = tuple(site for site in sites if site not in steerable)
        own = (grouped(shapes) or (), grouped_forms(forms) or (), grouped_forms(routers) or ())
        return cls(len(layers), sites, captured, *own)

    @property
    def settings(self) -> dict[str, Any]:
        """The fields of `Settings` that say them."""
        return {name: value for name, value in self._asdict().items() if name != "num_layers"}


def taps_info(taps: Tapped | Settings, ranks: int) -> dict[str, Any]:
    """Return the fields of `ModelInfo` that say a model's taps, without those that are left out.

    ranks: the number of tensor-parallel ranks.
    """
    own = {name: value for name in ("shapes", "attention", "router") if (value := getattr(taps, name))}
    return {"sites": taps.sites, "fixed": taps.fixed, **own, **({"ranks": ranks} if ranks > 1 else {})}


def _steered_sites(
    patterns: Iterable[str],
    sites: Collection[Site],
    steerable: Collection[Site],
    layers: Sequence[Structure],
    fixed: Mapping[Site, str],
) -> set[Site]:
    """Return the steerable sites that patterns name. Raises UsageError for a pattern that names none.

    fixed: why each other site cannot be steered.
    """
    chosen: set[Site] = set()
    for pattern in patterns:
        named = [site for site in tapped_sites([pattern], layers, "--steer-sites") if site in sites]
        if not named:
            do = f"tap it, too: --sites {pattern}"
            raise UsageError(explain("--steer-sites", got=pattern, expected="a tapped site", do=do))
        present = [site for site in named if site in steerable]
        if not present:
            expected = f"a site that can be steered in this model ({fixed[named[0]]})"
            raise UsageError(explain("--steer-sites", got=pattern, expected=expected))
        chosen.update(present)
    return chosen


def tapped_sites(patterns: Iterable[str], layers: Sequence[Structure], option: str = "--sites") -> tuple[Site, ...]:
    """Return the sites that patterns, `hook:layer` with `*`, name in a model of these layers, by layer.

    Raises UsageError for a pattern that names no site, or only sites that the model does not have.

    option: the option that has the patterns.
    """
    chosen: set[Site] = set()
    for pattern in patterns:
        own = own_name(pattern)
        named = [s for n in range(len(layers)) for hook in HOOKS if fnmatchcase(str(s := Site(n, hook)), own)]
        if not named:
            hooks = ", ".join(HOOKS)
            expected = f"HOOK:LAYER with a hook of {hooks} and a layer of 0..{len(layers) - 1}, or * for either"
            raise UsageError(explain(option, got=pattern, expected=expected))
        present = [site for site in named if site.hook in layers[site.layer].places]
        if not present:
            layer, hook = layers[named[-1].layer], named[-1].hook
            do = "see `capflow sites MODEL` for what this model has"
            raise UsageError(
                explain(option, got=pattern, expected=f"a site of {layer.layer} ({layer.why_not(hook)})", do=do)
            )
        chosen.update(present)
    return tuple(sorted(chosen))


def engine_arguments(settings: Settings) -> dict[str, Any]:
    """Return the arguments that make a vLLM engine a capflow engine."""
    return {
        "worker_cls": "capflow_engine.worker.worker.CaptureWorker",
        "scheduler_cls": "capflow_engine.scheduler.mixin.CaptureScheduler",
        "additional_config": settings,
    }
