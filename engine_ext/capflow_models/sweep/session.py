"""One engine that computes the runs of sweeps: it captures the rows of unchanged prompts, and patches them into others.

The scheduler counts the bytes that the rows of running requests take in the steering bank. A request waits for room, so
any number of runs may be asked for at once.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import capflow
from capflow.capture.site import Site, layers_by_hook, refusal_of_fixed
from capflow.errors import UsageError, explain
from capflow.probes.probe import as_float32
from capflow_engine.compat import engine as compat
from capflow_engine.compat.versions.surface import FORCED_TOKENS
from capflow_models.runs.engine_session import EngineSession, unknown_argument
from capflow_models.sweep.metrics import SweepRun
from capflow_models.sweep.pairs import TokenPair
from capflow_models.sweep.parts import RowPart
from capflow_models.sweep.plan import BASELINES, BASES, DONORS, TOGETHER, RunKey

PROCESSOR = "capflow_engine.compat.measured:MeasuredLogits"
MEASURED_KEY = "capflow_measured"
MEASURED_OUT = "CAPFLOW_MEASURED_OUT"
MEASURED_FUNCTIONS = "CAPFLOW_MEASURED_FUNCTIONS"
SUBJECT = "a sweep"
"""What errors call it."""

ROWS = ".capflow-sweep-"
"""How the names of directories for captured rows begin."""

REFERENCE_BYTES_MAX = 256 << 20
"""The memory for the distributions that a group of runs is compared with."""

RESERVED = ("model", "sites", "steer_sites", "consumers", "hub", "spare_hubs", "logits_processors")
"""The arguments of `capflow.LLM` that a sweep sets: its sites, its rows, and what measures its runs."""

ROWS_BYTES_MAX = 256 << 20
"""The memory for the captured rows of a group of pairs."""

Rows = Mapping[Site, npt.NDArray[np.float32]]
"""Rows `[tokens, width]` of a prompt by site."""


class SweepSession(EngineSession):
    """A running engine of sweeps.

    out: as in `EngineSession`.
    functions: the names of the user's metrics.
    arguments: further ones of `capflow.LLM`.
    """

    def __init__(
        self, model: str, sites: Sequence[Site], out: Path, functions: Iterable[str], arguments: Mapping[str, Any]
    ) -> None:
        compat.need(FORCED_TOKENS)
        super().__init__(out, ROWS)
        self._sites = list(sites)
        # The captured rows of the present group, by pair and baseline.
        self._rows: dict[tuple[str, str], Rows] = {}
        self._names: dict[str, str] = {}
        self._group = ""
        # The mean row of each site, once they are learnt.
        self._means: dict[Site, npt.NDArray[np.float32]] = {}
        self._out = self._directory / "measured.jsonl"
        self._set(MEASURED_OUT, str(self._out.absolute()))
        self._set(MEASURED_FUNCTIONS, ",".join(functions))
        try:
            self._undo.enter_context(compat.first_runner(SUBJECT))
            own = {"logits_processors": [PROCESSOR], "consumers": [self._keeper]}
            defaults = {"sites": list(map(str, sites)), "skip_tokenizer_init": True}
            self._start(model, arguments, {**defaults, **arguments, **own})
            _check_steerable(sites, self.llm.capflow_model.fixed)
        except BaseException:
            self.close()
            raise

    def check_room(self, pairs: Sequence[TokenPair]) -> None:
        """Raise UsageError for a pair that is longer than the engine's context."""
        length_max = self.llm.llm_engine.model_config.max_model_len
        for pair in pairs:
            if len(pair.clean) + 1 > length_max:
                got = f"{len(pair.clean)} tokens and the next"
                raise UsageError(explain(f"pair {pair.id}", got=got, expected=f"at most {length_max}, max_model_len"))

    def group_size(self, pairs: Sequence[TokenPair], donors: Collection[str] = BASELINES) -> int:
        """Return how many pairs may be computed at a time, with the rows of these baselines in memory."""
        vocabulary = self.llm.llm_engine.model_config.get_vocab_size()
        length = max(len(pair.clean) for pair in pairs)
        rows = len(donors) * length * sum(map(self.llm.capflow_model.width_of, self._sites)) * 4
        size: int = max(1, min(REFERENCE_BYTES_MAX // (4 * vocabulary), ROWS_BYTES_MAX // max(1, rows)))
        return size

    def begin(self, pairs: Sequence[TokenPair], donors: Collection[str] = BASELINES) -> list[SweepRun]:
        """Compute the baselines of a group of pairs; return the runs. It replaces the group before.

        The clean runs come first: the others are compared with them.

        donors: the baselines whose rows are captured and kept.
        """
        runs: list[SweepRun] = []
        self._rows.clear()
        self._names = {pair.id: self._name() for pair in pairs}
        self._group = self._name()
        wanted = {"capture": {"hooks": layers_by_hook(self._sites), "positions": "all_prompt"}}
        for number, baseline in enumerate(BASELINES):
            names = [self._names[pair.id] if number == 0 else self._name() for pair in pairs]
            prompts = [getattr(pair, baseline) for pair in pairs]
            fields = wanted if baseline in donors else {}
            params = [self._params(pair, name, id=name, **fields) for pair, name in zip(pairs, names, strict=True)]
            measured = self._generate(prompts, params)
            runs += [run_of(RunKey(pair.id, baseline), measured[name]) for pair, name in zip(pairs, names, strict=True)]
            if baseline in donors:
                self._keep_rows(pairs, names, baseline)
        return runs

    def _keep_rows(self, pairs: Sequence[TokenPair], names: Sequence[str], baseline: str) -> None:
        """Take the captured rows of a baseline's requests, by name, into memory."""
        data = capflow.open(self.rows)
        for pair, name in zip(pairs, names, strict=True):
            self._rows[pair.id, baseline] = self._taken(data[name], self._sites)

    @staticmethod
    def _taken(request: Any, sites: Iterable[Site]) -> Rows:
        """Return the rows of a captured request, and remove its files."""
        # A copy: float32 rows are mapped from their files otherwise.
        rows = {site: np.array(as_float32(np.asarray(request[site].rows))) for site in sites}
        shutil.rmtree(Path(request.path), ignore_errors=True)
        return rows

    def rows_of(self, pair: str, baseline: str) -> Rows:
        """Return the captured rows of a pair of the present group."""
        return self._rows[pair, baseline]

    def learn_means(self, pairs: Sequence[TokenPair]) -> None:
        """Compute each site's mean row over all positions but the first of all prompts of pairs.

        The first position is left out: its row is often a hundred times as long as the others (Sun et al. 2024,
        arXiv:2402.17762). Prompts of one token count with that token.
        """
        totals: dict[Site, npt.NDArray[np.float64]] = {}
        count, size = 0, self.group_size(pairs)
        for start in range(0, len(pairs), size):
            self.begin(pairs[start : start + size])
            for rows in self._rows.values():
                length = len(rows[self._sites[0]])
                count += max(1, length - 1)
                for site, each in rows.items():
                    total = each[min(1, length - 1) :].sum(0, dtype=np.float64)
                    totals[site] = totals[site] + total if site in totals else total
        self._means = {site: (total / count).astype(np.float32) for site, total in totals.items()}

    def patched(self, keys: Sequence[RunKey], pairs: Mapping[str, TokenPair]) -> list[SweepRun]:
        """Compute patched runs of the present group in one batch."""
        names, prompts, params = [], [], []
        for key in keys:
            pair, part = pairs[key.pair], RowPart.parse(key.site)
            names.append(self._name())
            prompts.append(getattr(pair, BASES[key.direction]))
            patches = {part.site.hook: {part.site.layer: self._patch(key, part, len(prompts[-1]))}}
            params.append(self._params(pair, names[-1], steering_patches=patches))
        measured = self._generate(prompts, params)
        return [run_of(key, measured[name]) for key, name in zip(keys, names, strict=True)]

    def _patch(self, key: RunKey, part: RowPart, length: int) -> dict[str, Any]:
        """Return the patch of a run in the form of `steering_patches`.

        length: how many tokens the prompt has.
        """
        positions = list(range(length)) if key.position == TOGETHER else [key.position]
        rows = part.of(self._donated(key, part.site, positions), self.llm.capflow_model.shape_of(part.site))
        return {"positions": positions, "vector": rows} | ({"index": part.entries} if part.entries else {})

    def _donated(self, key: RunKey, site: Site, positions: Sequence[int]) -> npt.NDArray[np.float32]:
        """Return the row that a run puts in at every position, `[width]`, or one for each, `[positions, width]`."""
        if key.direction == "zero":
            return np.zeros(self.llm.capflow_model.width_of(site), np.float32)
        if key.direction == "mean":
            return self._means[site]
        rows: npt.NDArray[np.float32] = self._rows[key.pair, DONORS[key.direction]][site][positions]
        return rows

    def _params(self, pair: TokenPair, name: str, **fields: Any) -> Any:
        asked = {
            "request": name,
            "reference": self._names[pair.id],
            "tokens": [pair.answer, pair.wrong_answer],
            "group": self._group,
        }
        return capflow.sampling_params(
            max_tokens=1,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            extra_args={MEASURED_KEY: asked},
            **fields,
        )

    def _generate(self, prompts: Sequence[Sequence[int]], params: list[Any]) -> dict[str, dict[str, Any]]:
        """Run requests; return what was measured of each, by name."""
        self._out.unlink(missing_ok=True)
        tokens: list[Any] = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        self._outputs(tokens, params)
        measured = {}
        for line in self._out.read_bytes().splitlines():
            values = json.loads(line)  # it reads NaN, too
            if "error" in values:
                raise UsageError(values["error"])
            measured[values["request"]] = values
        return measured

    def _name(self) -> str:
        return f"run-{self._next()}"


def check_engine(arguments: Mapping[str, Any], where: str) -> None:
    """Raise UsageError for an argument that `capflow.LLM` does not have, or that the sweep gives itself.

    where: the option that holds the arguments.
    """
    compat.check_runner(SUBJECT)
    if not arguments:
        return
    if arguments.get("data_parallel_size") not in (None, 1):
        got = f"data_parallel_size={arguments['data_parallel_size']}"
        raise UsageError(explain(where, got=got, expected="one replica, which compares all runs", do="leave it out"))
    for name in arguments:
        if name in RESERVED:
            raise UsageError(
                explain(where, got=name, expected="an argument that a sweep does not set", do="leave it out")
            )
    if (unknown := unknown_argument(arguments)) is not None:
        name, do = unknown
        raise UsageError(explain(where, got=name, expected="an argument of capflow.LLM", do=do))


def _check_steerable(sites: Sequence[Site], fixed: Collection[Site]) -> None:
    """Raise UsageError for a site that can only be captured."""
    for site in sites:
        if site in fixed:
            raise UsageError(refusal_of_fixed("hooks", site, "patch"))


def run_of(key: RunKey, measured: Mapping[str, Any]) -> SweepRun:
    """Return a run with what was measured of it."""
    return SweepRun(
        *key,
        tuple(measured["logits"]),
        tuple(measured["logprobs"]),
        measured["kl"],
        measured["top"],
        measured.get("values", {}),
    )
