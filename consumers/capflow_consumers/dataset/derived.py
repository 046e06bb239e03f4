"""What is computed from a captured request's rows: attention's weights, and the experts of its tokens."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from capflow.attention import attention_weights, check_size
from capflow.capture.positions import Positions
from capflow.capture.site import Site
from capflow.errors import UsageError, explain
from capflow.experts import ChosenExperts, chosen_experts
from capflow_consumers.dataset.rows import shown

if TYPE_CHECKING:
    from capflow.capture.attention import AttentionForm
    from capflow.capture.router import RouterForm
    from capflow_consumers.dataset.layout import Quantization


class DerivedRows(ABC):
    """A capture, finished or running, of whose rows attention's weights and the chosen experts are computed."""

    # What the rows of sites were rounded to; others are exact.
    _rounded: Mapping[Site, Quantization] = MappingProxyType({})

    @abstractmethod
    def _forms(self, name: Literal["attention", "router"]) -> Mapping[Site, Any]:
        """Return the sites that have rows, each with the form of its layer; UNSET if it is not known there."""

    def attention(
        self,
        layer: int,
        *,
        heads: Sequence[int] | int | None = None,
        positions: Any = None,
        spans: Mapping[str, tuple[int, int]] | None = None,
        sinks: npt.ArrayLike | None = None,
    ) -> npt.NDArray[np.float32]:
        """Return attention's weights `[heads, queries, keys]` float32, or their sums `[heads, queries, spans]`.

        They are computed from the rows at `q` and `k` of the layer; see `capflow.attention_weights`. The keys are those
        of positions 0 to the last query's.

        heads: the numbers of heads; None for all.
        positions: the queries, as a spec names positions, and in their order; None for all that were captured.
        spans: `(first, end)` of the positions of each span of keys.
        sinks: of attention with sinks, the logit of each query head's, `[heads]`, from the model's weights.

        Raises UsageError for rows that are missing, and for what `capflow.attention_weights` refuses; CapflowError for
        damaged rows.
        """
        capture: Any = self
        _check_layer(layer)
        where = f"{capture.path}: attention of layer {layer}"
        spec = f'{{"hooks": {{"q": [{layer}], "k": [{layer}]}}, "positions": "all"}}'
        form = _attention_form(where, self._forms("attention"), layer, spec)
        queries, places = _rows_at(capture, Site(layer, "q"), positions, where, spec)
        keys = capture[layer, "k"]
        end = int(places.max(initial=-1)) + 1
        absent = np.setdiff1d(np.arange(end), keys.positions)
        if len(absent):
            raise _missing(where, "k", absent, spec)
        if isinstance(heads, int | np.integer):
            heads = [int(heads)]
        count = queries.row_shape[0] if heads is None else np.size(heads)
        check_size((count, len(places), end if spans is None else 1), 4)
        k = keys.chosen(keys.positions < end).shaped
        return attention_weights(queries.shaped, k, form, positions=places, heads=heads, spans=spans, sinks=sinks)

    def experts(self, layer: int, *, positions: Any = None, bias: npt.ArrayLike | None = None) -> ChosenExperts:
        """Return the experts that the layer's router chose, and their weights float32, each `[tokens, top_k]`.

        They are computed from the rows at `router`; see `capflow.chosen_experts`.

        positions: the tokens, as a spec names positions, and in their order; None for all that were captured.
        bias: of a biased router, the number for each expert, `[experts]`, from the model's weights.

        Raises UsageError for rows that are missing or were rounded, and for what `capflow.chosen_experts` refuses;
        CapflowError for damaged rows.
        """
        capture: Any = self
        _check_layer(layer)
        where, site = f"{capture.path}: experts of layer {layer}", Site(layer, "router")
        spec = f'{{"hooks": {{"router": [{layer}]}}, "positions": "all"}}'
        form = _router_form(where, self._forms("router"), site, spec)
        if (rounded := self._rounded.get(site)) is not None:
            do = "capture them without quantization; of rounded logits others may be the highest"
            raise UsageError(explain(where, got=f"logits rounded to {rounded}", expected="exact ones", do=do))
        rows, _ = _rows_at(capture, site, positions, where, spec)
        return chosen_experts(rows.shaped, form, bias=bias)


def _attention_form(where: str, forms: Mapping[Site, Any], layer: int, spec: str) -> AttentionForm:
    for hook in ("q", "k"):
        if Site(layer, hook) not in forms:
            have = sorted({site.layer for site in forms if Site(site.layer, "q") in forms and site.hook == "k"})
            got = f"no rows at {Site(layer, hook)}; q and k are here of {f'layers {have}' if have else 'no layer'}"
            raise UsageError(explain(where, got=got, expected="rows at both", do=f"capture {spec}"))
    form: AttentionForm | msgspec.UnsetType = forms[Site(layer, "q")]
    if form is msgspec.UNSET:
        do = "capture it again with taps at q and k, or give capflow.attention_weights the layer's AttentionForm"
        raise UsageError(explain(where, got="a data set that does not say the scale and the window", do=do))
    return form


def _router_form(where: str, forms: Mapping[Site, Any], site: Site, spec: str) -> RouterForm:
    if site not in forms:
        have = sorted(each.layer for each in forms if each.hook == "router")
        got = f"no rows at {site}; router is here of {f'layers {have}' if have else 'no layer'}"
        raise UsageError(explain(where, got=got, expected="rows there", do=f"capture {spec}"))
    form: RouterForm | msgspec.UnsetType = forms[site]
    if form is msgspec.UNSET:
        do = "capture it again, or give capflow.chosen_experts the layer's RouterForm"
        raise UsageError(explain(where, got="a data set that does not say how they are chosen", do=do))
    return form


def _check_layer(layer: Any) -> None:
    """Raise UsageError unless a layer is a number."""
    if isinstance(layer, bool) or not isinstance(layer, int | np.integer):
        raise UsageError(explain("layer", got=layer, expected="the number of a layer, such as 5"))


def _rows_at(
    capture: Any, site: Site, positions: Any, where: str, spec: str
) -> tuple[Any, npt.NDArray[np.integer[Any]]]:
    """Return a site's rows of some positions, in their order, and these.

    positions: as a spec names them; None for all that were captured.
    where: what needs the rows, for an error.
    spec: a spec that captures them.

    Raises UsageError for positions that have no rows, and for none.
    """
    rows = capture[site]
    places = rows.positions
    if positions is not None:
        wanted = _wanted(capture, positions)
        absent = np.setdiff1d(wanted, places)
        if len(absent):
            raise _missing(where, site.hook, absent, spec)
        rows, places = rows.chosen(np.searchsorted(places, wanted)), wanted
    if not len(places):
        raise UsageError(explain(where, got="no positions", expected="one at least"))
    return rows, places


def _wanted(capture: Any, positions: Any) -> npt.NDArray[np.int64]:
    """Return the positions that a spec's `positions` names in a request; numbers in the order that they have there."""
    listed = [positions] if isinstance(positions, int | np.integer) else positions
    if isinstance(listed, list | tuple | range | np.ndarray) and all(isinstance(p, int | np.integer) for p in listed):
        length = capture.computed_length
        places = [int(p) + (capture.prompt_length if p < 0 else 0) for p in listed]
        for given, place in zip(listed, places, strict=True):
            if not 0 <= place < length:
                expected = f"from 0 to {length - 1}, or from the prompt's end, -1 to -{capture.prompt_length}"
                raise UsageError(explain("positions", got=int(given), expected=expected))
        return np.array(places, np.int64)
    runs = Positions.parse(listed, where="positions").at(capture.prompt_length).runs(0, capture.computed_length)
    return np.fromiter(itertools.chain.from_iterable(itertools.starmap(range, runs)), np.int64)


def _missing(where: str, hook: str, absent: npt.NDArray[np.int64], spec: str) -> UsageError:
    got = f"no rows at {hook} of the positions {shown(absent)}"
    expected = "the keys of all positions up to the last query's" if hook == "k" else "positions that were captured"
    return UsageError(explain(where, got=got, expected=expected, do=f"capture {spec}"))
