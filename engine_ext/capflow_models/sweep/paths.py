"""Path patching: the effect of one head, or MLP, on another place along the direct path alone.

A *sender* has the rows of the other prompt in a first run, in which every later attention and MLP that is *frozen* adds
to the stream what it adds in the unchanged run. The *receiver*, such as the queries of a later head, reads the sender's
change and nothing that others made of it. Its rows are captured, and a second run has them in their place, with all
else free (Wang et al. 2023, arXiv:2211.00593, which freezes heads and leaves MLPs free; Goldowsky-Dill et al. 2023,
arXiv:2304.05969).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import capflow
from capflow.capture.site import Site, layers_by_hook
from capflow_models.sweep.metrics import SweepRun
from capflow_models.sweep.pairs import TokenPair
from capflow_models.sweep.parts import Frozen, Path, RowPart
from capflow_models.sweep.plan import BASES, TOGETHER, RunKey
from capflow_models.sweep.session import Rows, SweepSession, run_of


class PathSession(SweepSession):
    """A running engine of path patching. The rows of both baselines are in memory: `begin` is given both.

    frozen: what is frozen behind each sender.
    """

    def __init__(self, frozen: Frozen, *args: Any) -> None:
        self._frozen = frozen
        super().__init__(*args)

    def patched(self, keys: Sequence[RunKey], pairs: Mapping[str, TokenPair]) -> list[SweepRun]:
        """Compute the first run of each sender in one batch, then the second run of each key in another."""
        received = self._received(keys, pairs)
        names, prompts, params = [], [], []
        for key in keys:
            pair, path = pairs[key.pair], Path.parse(key.site)
            site, shape = path.receiver.site, self.llm.capflow_model.shape_of(path.receiver.site)
            prompts.append(getattr(pair, BASES[key.direction]))
            rows = path.receiver.of(received[key.pair, key.direction, path.sender][site], shape)
            patch = {"positions": list(range(len(prompts[-1]))), "vector": rows}
            patch |= {"index": path.receiver.entries} if path.receiver.entries else {}
            names.append(self._name())
            params.append(self._params(pair, names[-1], steering_patches={site.hook: {site.layer: patch}}))
        measured = self._generate(prompts, params)
        return [run_of(key, measured[name]) for key, name in zip(keys, names, strict=True)]

    def _received(self, keys: Sequence[RunKey], pairs: Mapping[str, TokenPair]) -> dict[tuple[str, str, RowPart], Rows]:
        """Return the rows of the receivers in the first run of each sender, by pair, direction and sender."""
        wanted: dict[tuple[str, str, RowPart], set[Site]] = {}
        for key in keys:
            path = Path.parse(key.site)
            wanted.setdefault((key.pair, key.direction, path.sender), set()).add(path.receiver.site)
        names, prompts, params = [], [], []
        for (name, direction, sender), sites in wanted.items():
            pair, base = pairs[name], BASES[direction]
            positions = list(range(len(pair.clean)))
            patches: dict[str, dict[int, Any]] = {}
            for site in self._frozen.behind(sender.site):
                patch = {"positions": positions, "vector": self.rows_of(name, base)[site]}
                patches.setdefault(site.hook, {})[site.layer] = patch
            key = RunKey(name, direction, str(sender), TOGETHER)
            patches.setdefault(sender.site.hook, {})[sender.site.layer] = self._patch(key, sender, len(positions))
            names.append(self._name())
            prompts.append(getattr(pair, base))
            capture = {"hooks": layers_by_hook(sorted(sites)), "positions": "all_prompt"}
            params.append(self._params(pair, names[-1], id=names[-1], capture=capture, steering_patches=patches))
        self._generate(prompts, params)
        data = capflow.open(self.rows)
        return {
            place: self._taken(data[name], sites) for (place, sites), name in zip(wanted.items(), names, strict=True)
        }
