"""`capflow.cache`: the rows of some prompts as arrays, in one call.

The prompts run as usual requests, and their rows go to files. Those of an engine with a `filesystem` consumer stay in
its data set. For a model that is given by name, an engine runs once and keeps its rows in a directory of its own, which
goes away with the cache.
"""

from __future__ import annotations

import itertools
import math
import reprlib
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

import capflow
from capflow.capture.dtypes import DTYPES
from capflow.capture.frame import mask_of
from capflow.capture.model import ModelInfo
from capflow.capture.site import Site, hook_named, layers_by_hook, site_named
from capflow.capture.spec import CaptureSpec, Wanted
from capflow.errors import CapflowError, UsageError, explain
from capflow.text.notebook import html_table
from capflow.text.tabular import Tabular
from capflow_engine.request.params import sampling_params

if TYPE_CHECKING:
    import pyarrow as pa
    import torch

    from capflow.experts import ChosenExperts

_STORE = "filesystem"


class _Rows(NamedTuple):
    """Rows `[n, *shape]` of a prompt at a site, their positions `[n]` and token ids `[n]`."""

    rows: npt.NDArray[Any]
    positions: npt.NDArray[np.int64]
    token_ids: npt.NDArray[np.int32]


class ActivationCache(Tabular):
    """The rows of some prompts.

    `cache["post_block:12"]` is an array `[prompts, rows, hidden_size]`, in the order of the prompts and of their
    positions. At a hook with rows of another shape the array has that: `cache["heads:12"]` is `[prompts, rows, heads,
    head_dim]`. Prompts with fewer rows than others are filled up with NaN at the end; `positions` says where.
    `cache["blocks.12.hook_resid_post"]` and `cache[12, "post_block"]` are the same site. `cache.stack("post_block")`
    has a hook's layers as one array.

    model: the engine's model.
    wanted: what was asked for, by site. Only that is in the cache, also if the consumer keeps more.
    captures: each prompt's capture, as a data set has it.
    outputs: vLLM's outputs, with the answers.
    """

    def __init__(
        self, model: ModelInfo, wanted: Wanted, captures: Sequence[Any], outputs: Sequence[Any], kept: Any = None
    ) -> None:
        self.model, self.wanted = model, wanted
        self.captures, self.outputs = tuple(captures), tuple(outputs)
        # The directory of the rows, which exists as long as this does; None if it is the user's.
        self._kept = kept

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites, by layer."""
        return tuple(sorted(self.wanted))

    def __repr__(self) -> str:
        hooks = ", ".join(f"{hook} of {len(layers)} layers" for hook, layers in layers_by_hook(self.sites).items())
        return f"<cache of {len(self)} prompts: {hooks or 'no rows'}>"

    def __len__(self) -> int:
        return len(self.captures)

    def __iter__(self) -> Iterator[Site]:
        return iter(self.sites)

    def __contains__(self, site: object) -> bool:
        return site_named(site, self.wanted) in self.wanted

    def __getitem__(self, site: tuple[int, str] | str) -> npt.NDArray[Any]:
        """Return a site's rows `[prompts, rows, *shape]`, in the stored dtype; raise UsageError without rows."""
        return _filled([self._rows(capture, site).rows for capture in self.captures], np.nan)

    def positions(self, site: tuple[int, str] | str) -> npt.NDArray[np.int64]:
        """Return the position of each row of a site, `[prompts, rows]`; -1 where a prompt has none."""
        return _filled([self._rows(capture, site).positions for capture in self.captures], -1)

    def stack(self, hook: str) -> npt.NDArray[Any]:
        """Return a hook's rows `[layers, prompts, rows, *shape]`, by layer.

        Raises UsageError without rows, and for layers whose rows have different shapes.
        """
        sites = [site for site in self.sites if site.hook == hook_named(hook)]
        if not sites:
            have = ", ".join(layers_by_hook(self.sites))
            raise UsageError(explain("hook", got=hook, expected=f"a hook of the cache: {have}"))
        shapes = {self.model.shape_of(site): site for site in reversed(sites)}
        if len(shapes) > 1:
            got = " and ".join(f"{list(shape)} at {site}" for shape, site in sorted(shapes.items(), key=lambda e: e[1]))
            raise UsageError(explain("hook", got=f"rows of {got}", expected="one shape", do="take site by site"))
        return np.stack([self[site] for site in sites])

    def torch(self, site: tuple[int, str] | str) -> torch.Tensor:
        """Return a site's rows as a tensor `[prompts, rows, *shape]`, in the model's dtype."""
        import torch

        rows = self[site]
        if rows.dtype.name == "bfloat16":
            return torch.from_numpy(rows.view(np.uint16)).view(torch.bfloat16)
        return torch.from_numpy(rows)

    def attention(
        self,
        layer: int,
        prompt: int = 0,
        *,
        heads: Sequence[int] | int | None = None,
        positions: Any = None,
        spans: Mapping[str, tuple[int, int]] | None = None,
        sinks: npt.ArrayLike | None = None,
    ) -> npt.NDArray[np.float32]:
        """Return a prompt's attention weights `[heads, queries, keys]` float32, or sums `[heads, queries, spans]`.

        They are computed from the layer's rows at `q` and `k`: `capflow.cache(llm, prompts, hooks=["q:5", "k:5"])`.

        layer, heads, positions, spans, sinks: as in the data set's `capture.attention`.
        prompt: the number of the prompt.

        Raises UsageError for rows that are missing, and for what `capflow.attention_weights` refuses.
        """
        capture, positions = self._asked(prompt, Site(layer, "q"), positions)
        made: npt.NDArray[np.float32] = capture.attention(
            layer, heads=heads, positions=positions, spans=spans, sinks=sinks
        )
        return made

    def experts(
        self, layer: int, prompt: int = 0, *, positions: Any = None, bias: npt.ArrayLike | None = None
    ) -> ChosenExperts:
        """Return the experts of a prompt's tokens, and their weights float32, each `[tokens, top_k]`.

        They are computed from the layer's rows at `router`: `capflow.cache(llm, prompts, hooks=["router:5"])`.

        layer, positions, bias: as in the data set's `capture.experts`.
        prompt: the number of the prompt.

        Raises UsageError for rows that are missing, and for what `capflow.chosen_experts` refuses.
        """
        capture, positions = self._asked(prompt, Site(layer, "router"), positions)
        made: ChosenExperts = capture.experts(layer, positions=positions, bias=bias)
        return made

    def _asked(self, prompt: int, site: Site, positions: Any) -> tuple[Any, Any]:
        """Return a prompt's capture, and these positions; for None, those that were asked for at a site."""
        if not isinstance(prompt, int) or not 0 <= prompt < len(self):
            raise UsageError(explain("prompt", got=prompt, expected=f"a number from 0 to {len(self) - 1}"))
        capture = self.captures[prompt]
        if positions is None and site in self.wanted:
            positions = self._rows(capture, site).positions
        return capture, positions

    def to_arrow(self) -> pa.Table:
        """Return a table with a line for each row.

        Columns: `prompt` (its number), `layer`, `hook`, `position`, `token_id`, `row` (a flat list of float32).
        `to_pandas` and `to_polars` give the same; DuckDB takes it as it is: `duckdb.from_arrow(…)`.
        """
        import pyarrow as pa

        one = len({self.model.width_of(site) for site in self.sites}) == 1
        return pa.concat_tables(
            pa.table(_columns(number, site, self._rows(capture, site), fixed=one))
            for number, capture in enumerate(self.captures)
            for site in self.sites
        )

    def _rows(self, capture: Any, site: tuple[int, str] | str) -> _Rows:
        """Return the wanted rows of a prompt at a site; raise UsageError for another site."""
        wanted = site_named(site, self.wanted)
        want = self.wanted.get(wanted)
        if want is None:
            raise UsageError(explain("site", got=str(wanted), expected=f"one of {', '.join(map(str, self.sites))}"))
        if wanted not in capture:  # the prompt has none of the positions
            nothing = np.empty((0, *self.model.shape_of(wanted)), DTYPES[self.model.dtype])
            return _Rows(nothing, np.empty(0, np.int64), np.empty(0, np.int32))
        stored = capture[wanted]
        rows = _Rows(stored.shaped, stored.positions, stored.token_ids)
        runs = want.positions.at(capture.prompt_length).runs(0, capture.computed_length)
        chosen = mask_of(tuple(itertools.chain.from_iterable(runs)), 0, capture.computed_length)[rows.positions]
        return rows if chosen.all() else _Rows(rows.rows[chosen], rows.positions[chosen], rows.token_ids[chosen])

    def _repr_html_(self) -> str:
        cells = [
            (hook, ", ".join(map(str, layers)), " x ".join(map(str, self[layers[0], hook].shape)))
            for hook, layers in layers_by_hook(self.sites).items()
        ]
        return html_table(["hook", "layers", "prompts x rows x shape of a row"], cells, repr(self))


def cache(
    llm: Any,
    prompts: Any,
    *,
    hooks: Any = "post_block",
    positions: Any = "all_prompt",
    max_tokens: int = 1,
    engine: Mapping[str, Any] | None = None,
    **fields: Any,
) -> ActivationCache:
    """Return the rows of prompts at hook points.

    llm: a `capflow.LLM` with a `filesystem` consumer, or the name of a model, for which an engine runs once.
    prompts: texts, or lists of token ids; one, or several.
    hooks: a hook with all its layers, a list of hooks and sites, or the layers of each hook, as in a spec.
    positions: as in a spec.
    max_tokens: how many tokens are generated; their rows are captured if `positions` has them.
    engine: arguments of `capflow.LLM` for a model that is given by name.
    fields: further arguments of `capflow.sampling_params`, for instance `steering_vectors`.

    Raises UsageError for wrong arguments, and CapflowError if rows are missing.
    """
    if isinstance(llm, str):
        return _of_model(llm, prompts, dict(engine or {}), hooks, positions, max_tokens, fields)
    if engine is not None:
        raise UsageError(explain("engine", got="arguments for an engine that runs", expected="none", do="remove it"))
    given, spec = _asked(prompts, hooks, positions, fields)
    wanted = spec.resolve(llm.capflow_model.sites, num_layers=llm.capflow_model.num_layers, where="cache")
    settings = {"temperature": 0.0, "max_tokens": max_tokens} | fields
    names = [uuid.uuid4().hex for _ in given]
    parameters = [sampling_params(id=name, capture={_STORE: spec}, **settings) for name in names]
    outputs = llm.generate(given, parameters, use_tqdm=False)
    return ActivationCache(llm.capflow_model, wanted, _captures(names, outputs), outputs)


def _asked(prompts: Any, hooks: Any, positions: Any, fields: Mapping[str, Any]) -> tuple[list[Any], CaptureSpec]:
    """Return prompts in vLLM's form, and the spec; raise UsageError for what no model makes valid."""
    if own := sorted({"id", "capture", "n"} & set(fields)):
        raise UsageError(explain(own[0], got=fields[own[0]], expected="none: a cache has one request for each prompt"))
    return _listed(prompts), CaptureSpec.parse({"hooks": _layers(hooks), "positions": positions}, where="cache")


def _of_model(
    model: str, prompts: Any, engine: dict[str, Any], hooks: Any, positions: Any, max_tokens: int, fields: Any
) -> ActivationCache:
    given, _ = _asked(prompts, hooks, positions, fields)
    sampling_params(**{"max_tokens": max_tokens} | fields)
    kept = tempfile.TemporaryDirectory(prefix="capflow-cache-", ignore_cleanup_errors=True)
    consumers = [f"{_STORE}:root={Path(kept.name)},capture=requests"]
    settings = {"sites": [f"{hook}:*" for hook in _layers(hooks)], "consumers": consumers} | engine
    try:
        with capflow.LLM(str(capflow.demo_model()) if model == "demo" else model, **settings) as llm:
            made = cache(llm, given, hooks=hooks, positions=positions, max_tokens=max_tokens, **fields)
    except UsageError as e:
        if "sites" in engine:
            raise
        raise UsageError(str(e).replace("--sites: ", "cache.hooks: ", 1)) from e
    return ActivationCache(made.model, made.wanted, made.captures, made.outputs, kept)


def _captures(names: Sequence[str], outputs: Sequence[Any]) -> list[Any]:
    """Return the captures of requests; raise CapflowError unless all their rows are in files of this machine."""
    opened: dict[str, Any] = {}
    captures: list[Any] = []
    for name, output in zip(names, outputs, strict=True):
        results = output.capture_results
        result = results.get(_STORE)
        if result is None:
            others = "; ".join(f"{consumer}: {other.error or other.status}" for consumer, other in results.items())
            do = 'start the engine with capflow.LLM(…, consumers=["filesystem:root=DIR,capture=requests"])'
            raise CapflowError(explain("cache", got=others or "no result", expected=f"rows from {_STORE}", do=do))
        if result.status != "ok":
            got, expected = result.error or result.status, f"every row of request {name}"
            raise CapflowError(explain("cache", got=got, expected=expected))
        path = str(result.payload["path"])
        if "stored" in result.payload:
            do = "read it with capflow.open, or use a consumer whose root is a directory"
            raise CapflowError(explain("cache", got=f"rows in an object store, {path}", do=do))
        root = path.rpartition("/")[0]
        if root not in opened:
            opened[root] = capflow.open(root)
        captures.append(opened[root][name])
    return captures


def _listed(prompts: Any) -> list[Any]:
    """Return prompts in vLLM's form; raise UsageError for another form."""
    some = [prompts] if isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable) else list(prompts)
    if some and not isinstance(prompts, int) and _are_tokens(some):
        some = [some]
    if not some or not all(isinstance(prompt, str | Mapping) or _are_tokens(prompt) for prompt in some):
        got = reprlib.repr(prompts) if some else "none"
        raise UsageError(explain("prompts", got=got, expected="a text or a list of token ids, or several"))
    return [
        prompt if isinstance(prompt, str | Mapping) else {"prompt_token_ids": [int(token) for token in prompt]}
        for prompt in some
    ]


def _are_tokens(prompt: Any) -> bool:
    return isinstance(prompt, Sequence | np.ndarray) and all(isinstance(token, int | np.integer) for token in prompt)


def _layers(hooks: Any) -> dict[str, Any]:
    """Return the layers of each hook, as a spec has them."""
    if isinstance(hooks, Mapping):
        return dict(hooks)
    layers: dict[str, Any] = {}
    for name in [hooks] if isinstance(hooks, str) else hooks:
        hook = hook_named(name)
        if hook is not None:
            layers[hook] = "all"
            continue
        site = Site.parse(str(name), "hooks")
        if layers.setdefault(site.hook, []) != "all":
            layers[site.hook].append(site.layer)
    return layers


def _filled(parts: Sequence[npt.NDArray[Any]], nothing: float) -> npt.NDArray[Any]:
    """Return arrays `[n, …]` as one, `[parts, largest n, …]`, filled up at the end."""
    most = max(len(part) for part in parts)
    array = np.full((len(parts), most, *parts[0].shape[1:]), nothing, parts[0].dtype)
    for line, part in zip(array, parts, strict=True):
        line[: len(part)] = part
    return array


def _columns(number: int, site: Site, rows: Any, *, fixed: bool) -> dict[str, Any]:
    import pyarrow as pa

    count, width = len(rows.rows), math.prod(rows.rows.shape[1:])
    ends = np.arange(0, (count + 1) * width, width, dtype=np.int32)
    flat = pa.array(np.ascontiguousarray(rows.rows, np.float32).ravel())
    return {
        "prompt": pa.array(np.full(count, number, np.int32)),
        "layer": pa.array(np.full(count, site.layer, np.int32)),
        "hook": pa.array([site.hook] * count, pa.string()),
        "position": pa.array(rows.positions),
        "token_id": pa.array(rows.token_ids),
        "row": pa.FixedSizeListArray.from_arrays(flat, width) if fixed else pa.ListArray.from_arrays(ends, flat),
    }
