"""One engine that runs the cells of an experiment, and the three passes that measure a cell.

* *Answer*: the arm answers the prompt. The rows at the gate's probe are captured, and scored in float64.
* *Forced*: the arm generates the baseline's answer instead of its own, step by step, and each step's distribution is
  compared with the baseline's there (`capflow_engine.compat.forced`). Gates act as they do in an answer.
* *Text*: the model without steering reads prompt and answer: their log probabilities, and the second probe's rows.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

import capflow
from capflow.capture.site import Site
from capflow.errors import CapflowError, explain
from capflow.probes.probe import Probe, as_float32
from capflow_engine.compat import engine as compat
from capflow_engine.compat.versions.surface import FORCED_TOKENS
from capflow_models.experiment.arms import (
    POSITIONS,
    Directions,
    Setting,
    check_room,
    fields_of,
    instance_of,
    prompt_of,
)
from capflow_models.experiment.file import Experiment
from capflow_models.experiment.fits import Fitter
from capflow_models.experiment.prompts import LabelledPrompt
from capflow_models.experiment.records import ROWS
from capflow_models.runs.engine_session import EngineSession, unknown_argument
from capflow_models.vllm_model import VLLMSteerableModel

PROCESSOR = "capflow_engine.compat.forced:ForcedTokens"
FORCED_KEY = "capflow_forced"
FORCED_OUT = "CAPFLOW_FORCED_OUT"

REFERENCE_BYTES_MAX = 256 << 20
"""The memory for the baseline's distributions that a group of forced requests is compared with."""


class ArmAnswer(msgspec.Struct, frozen=True):
    """An answer of a pass.

    positions, scores: of the gate's probe.
    """

    text: str
    tokens: list[int]
    prompt_tokens: int
    finish: str
    positions: list[int]
    scores: list[float]
    actions: list[dict[str, Any]]
    ttft_ms: float | None
    tpot_ms: float | None
    tokens_per_s: float | None
    cached_tokens: int | None


_ACCEPTED_S_MAX = 30.0


class Session(EngineSession):
    """A running engine of an experiment. out: as in `EngineSession`."""

    def __init__(
        self,
        experiment: Experiment,
        out: Path,
        sites: Sequence[str],
        gates: Sequence[str] = (),
        directions: Directions | None = None,
    ) -> None:
        super().__init__(out, ROWS)
        self._experiment = experiment
        self._directions = directions
        self._out = self._directory / "forced.jsonl"
        try:
            self._start_with(sites, gates)
            self._check_accepted()
        except BaseException:
            self.close()
            raise

    def _start_with(self, sites: Sequence[str], gates: Sequence[str]) -> None:
        experiment = self._experiment
        arguments: dict[str, Any] = {"disable_log_stats": False, "sites": list(sites), **experiment.engine}
        if "kl" in experiment.metrics and self._directions is not None:
            compat.need(FORCED_TOKENS)
            self._undo.enter_context(compat.first_runner("the metric kl"))
            self._set(FORCED_OUT, str(self._out.absolute()))
            arguments.setdefault("logits_processors", [PROCESSOR])
        arguments["consumers"] = [self._keeper, *gates]
        self._start(experiment.general.model, experiment.engine, arguments)

    def _check_accepted(self) -> None:
        """Raise CapflowError unless the hub takes the engine's rows: its gates would never act."""
        name = self.llm.capflow_settings.engine
        until = time.monotonic() + _ACCEPTED_S_MAX
        while True:
            status = self._hub_status()
            if is_accepted(status, name):
                return
            if time.monotonic() >= until:
                got = "; ".join(status["problems"]) or "no session of the engine"
                raise CapflowError(explain("the hub does not take the engine", got=got, expected="its rows"))
            time.sleep(0.1)

    def check_hub(self) -> None:
        """Raise CapflowError if the hub names a problem: a gate that does not work would look like one that is shut."""
        check_status(self._hub_status())

    def _hub_status(self) -> dict[str, Any]:
        with self.llm.capflow_settings.hubs[0].client() as client:
            return client.status()

    def check_room(self, settings: Sequence[Setting], prompts: Sequence[LabelledPrompt]) -> None:
        """Raise UsageError for a prompt that leaves no room for its answer."""
        tokenizer = self.llm.get_tokenizer()
        length_max = self.llm.llm_engine.model_config.max_model_len
        check_room(self._experiment, settings, prompts, lambda text: len(tokenizer.encode(text)), length_max)

    # What a fit needs.

    def fitter(self) -> Fitter:
        """Return this engine as what fits need."""
        return Fitter(VLLMSteerableModel(self.llm, rows=self.rows), self.prompt_rows)

    def prompt_rows(self, texts: Sequence[str], site: Site) -> list[npt.NDArray[np.float32]]:
        """Return the rows of each text at a site, without steering."""
        wanted = {"hooks": {site.hook: [site.layer]}, "positions": "all_prompt"}
        names = [f"fit.{self._next()}" for _ in texts]
        params = [capflow.sampling_params(id=name, capture=wanted, max_tokens=1, temperature=0.0) for name in names]
        self._outputs(list(texts), params)
        data = capflow.open(self.rows)
        return [as_float32(np.asarray(data[name][site].rows)) for name in names]

    # The passes.

    def answers(self, setting: Setting, prompts: Sequence[LabelledPrompt], seed: int) -> list[ArmAnswer]:
        """Return the answers of one setting to prompts, in one batch."""
        general, directions = self._experiment.general, self._directions
        assert directions is not None
        probe = directions.probe
        params = [
            capflow.sampling_params(
                id=self._id(setting, prompt, seed, "a"),
                max_tokens=general.max_tokens,
                temperature=general.temperature,
                top_p=general.top_p,
                seed=seed,
                ignore_eos=general.ignore_eos,
                **self._captures(setting, scored=True),
                **fields_of(setting, self._experiment, directions),
            )
            for prompt in prompts
        ]
        if general.prefix_cache == "reset":
            self.llm.reset_prefix_cache()
        outputs = self._outputs([prompt_of(setting, self._experiment, p.prompt) for p in prompts], params)
        data = capflow.open(self.rows) if probe is not None else None
        rate = _rate(outputs)
        return [
            _answer(output, None if data is None else data[self._id(setting, prompt, seed, "a")], probe, rate)
            for output, prompt in zip(outputs, prompts, strict=True)
        ]

    def forced(
        self,
        baseline: Setting,
        prompts: Sequence[LabelledPrompt],
        tokens: Mapping[str, Sequence[int]],
        turns: Sequence[tuple[Setting, LabelledPrompt]],
        seed: int,
    ) -> dict[tuple[str, str], list[float]]:
        """Return KL(baseline || setting) at each of the baseline's tokens, by the setting's name and the prompt's id.

        tokens: the baseline's answers, by the prompt's id.
        turns: the settings and prompts that are measured.
        """
        size = self.llm.llm_engine.model_config.get_vocab_size() * 4 * self._experiment.general.max_tokens
        count = max(1, REFERENCE_BYTES_MAX // size)
        results: dict[tuple[str, str], list[float]] = {}
        for start in range(0, len(prompts), count):
            group = f"group-{self._next()}"
            chunk = {prompt.id for prompt in prompts[start : start + count]}
            mine = [(setting, prompt) for setting, prompt in turns if prompt.id in chunk]
            if not mine:
                continue
            self._out.unlink(missing_ok=True)
            first = [(baseline, prompt) for prompt in prompts[start : start + count]]
            for part in (first, [(s, p) for s, p in mine if s.name != baseline.name]):
                self._force(part, tokens, baseline, seed, group)
            results.update(self._kl(mine, tokens, seed))
        return results

    def texts(self, cells: Sequence[tuple[LabelledPrompt, Sequence[int]]]) -> list[tuple[list[float], float | None]]:
        """Return, for each prompt and answer, the negative log probabilities of the answer's tokens and its score.

        The model reads them without steering. The score is the second probe's mean over the answer's rows.
        """
        assert self._directions is not None
        probe = self._directions.held_out
        extra: dict[str, Any] = {}
        if probe is not None:
            extra["capture"] = {"hooks": {probe.site.hook: [probe.site.layer]}, "positions": "all_prompt"}
        tokenizer = self.llm.get_tokenizer()
        starts = [tokenizer.encode(prompt.prompt) for prompt, _ in cells]
        names = [f"text.{self._next()}" for _ in cells]
        nll = "perplexity" in self._experiment.metrics
        if nll:
            extra["prompt_logprobs"] = 0
        params = [
            capflow.sampling_params(
                id=name, max_tokens=1, temperature=0.0, detokenize=False,
                **extra,
            )
            for name in names
        ]  # fmt: skip
        texts = [{"prompt_token_ids": [*start, *tokens]} for start, (_, tokens) in zip(starts, cells, strict=True)]
        outputs = self._outputs(texts, params)
        data = capflow.open(self.rows) if probe is not None else None
        results = []
        for name, start, output, (_, tokens) in zip(names, starts, outputs, cells, strict=True):
            losses = [
                -output.prompt_logprobs[len(start) + number][token].logprob for number, token in enumerate(tokens)
            ] if nll else []  # fmt: skip
            score = None
            if probe is not None and data is not None:
                rows = data[name][probe.site].rows[len(start) :]
                score = float(scores_of(probe, np.asarray(rows)).mean())
            results.append((losses, score))
        return results

    def _force(
        self,
        part: Sequence[tuple[Setting, LabelledPrompt]],
        tokens: Mapping[str, Sequence[int]],
        baseline: Setting,
        seed: int,
        group: str,
    ) -> None:
        assert self._directions is not None
        params = [
            capflow.sampling_params(
                id=self._id(setting, prompt, seed, "f"),
                max_tokens=len(tokens[prompt.id]),
                temperature=0.0,
                ignore_eos=True,
                detokenize=False,
                extra_args={
                    FORCED_KEY: {
                        "tokens": list(tokens[prompt.id]),
                        "request": self._id(setting, prompt, seed, "f"),
                        "group": group,
                        "reference": self._id(baseline, prompt, seed, "f"),
                    }
                },
                **self._captures(setting, scored=False),
                **fields_of(setting, self._experiment, self._directions),
            )
            for setting, prompt in part
        ]
        if part:
            outputs = self._outputs([prompt_of(s, self._experiment, p.prompt) for s, p in part], params)
            for output, (_, prompt) in zip(outputs, part, strict=True):
                assert list(output.outputs[0].token_ids) == list(tokens[prompt.id]), "a forced answer has its tokens"

    def _kl(
        self, turns: Sequence[tuple[Setting, LabelledPrompt]], tokens: Mapping[str, Sequence[int]], seed: int
    ) -> dict[tuple[str, str], list[float]]:
        values: dict[tuple[str, int], float] = {}
        for line in self._out.read_bytes().splitlines():
            measured = json.loads(line)  # it reads NaN, too
            values[measured["request"], measured["position"]] = measured["kl"]
        return {
            (setting.name, prompt.id): [
                values[self._id(setting, prompt, seed, "f"), position] for position in range(len(tokens[prompt.id]))
            ]
            for setting, prompt in turns
        }

    def _captures(self, setting: Setting, *, scored: bool) -> dict[str, Any]:
        """Return the field `capture` of a setting's requests: rows for the scores, and for a gate in the hub."""
        probe = self._directions.probe if self._directions is not None else None
        if probe is None:
            return {}
        spec = {
            "hooks": {probe.site.hook: [probe.site.layer]},
            "positions": POSITIONS[self._experiment.gate.positions],
        }
        specs = {"filesystem": spec} if scored else {}
        instance = instance_of(setting)
        if setting.kind == "gated_async" and instance is not None:
            specs[instance] = spec
        return {"capture": specs} if specs else {}

    def _id(self, setting: Setting, prompt: LabelledPrompt, seed: int, stage: str) -> str:
        return f"{setting.name}.{prompt.number}.{seed}.{stage}"


def is_accepted(status: Mapping[str, Any], engine: str) -> bool:
    """Return whether a hub has a session with a worker of an engine. It has none if it refused the engine's sites."""
    return any((each["role"], each["engine"]) == ("worker", engine) for each in status["sessions"])


def check_status(status: Mapping[str, Any]) -> None:
    """Raise CapflowError if a hub names a problem."""
    if problems := status["problems"]:
        raise CapflowError(explain("the hub", got="; ".join(problems), expected="gates and consumers that work"))


def check_engine(experiment: Experiment) -> None:
    """Raise UsageError with the line for a key of [engine] that is no argument of `capflow.LLM`.

    With the metric `kl`, a model runner that cannot measure it is refused, too.
    """
    if "kl" in experiment.metrics:
        compat.check_runner("the metric kl")
    if not experiment.engine:
        return
    if (unknown := unknown_argument(experiment.engine)) is not None:
        name, do = unknown
        raise experiment.wrong(("engine", name), got=name, expected="an argument of capflow.LLM", do=do)


def scores_of(probe: Probe, rows: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return the scores of rows `[n, hidden_size]` in float64, `[n]`."""
    scores: npt.NDArray[np.float64] = as_float32(rows).astype(np.float64) @ probe.weight[0] + float(probe.bias[0])
    return scores


@contextmanager
def fitting(experiment: Experiment, out: Path, sites: Sequence[str]) -> Iterator[Fitter]:
    """Start an engine for fits, with these sites."""
    with Session(experiment, out, sites) as session:
        yield session.fitter()


def _rate(outputs: Sequence[Any]) -> float | None:
    """Return the generated tokens a second of a batch, from its first request in the queue to its last token."""
    metrics = [output.metrics for output in outputs]
    if any(each is None for each in metrics):
        return None
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    took = max(each.last_token_ts for each in metrics) - min(each.queued_ts for each in metrics)
    return tokens / took if took > 0 else None


def _answer(output: Any, capture: Any, probe: Probe | None, rate: float | None) -> ArmAnswer:
    sample, metrics = output.outputs[0], output.metrics
    positions: list[int] = []
    scores: list[float] = []
    if capture is not None and probe is not None and probe.site in capture:
        captured = capture[probe.site]
        positions = [int(position) for position in captured.positions]
        scores = scores_of(probe, np.asarray(captured.rows)).tolist()
    count = len(sample.token_ids)
    actions = getattr(output.steering_applied, "actions", msgspec.UNSET)
    return ArmAnswer(
        sample.text,
        list(sample.token_ids),
        len(output.prompt_token_ids),
        str(sample.finish_reason),
        positions,
        scores,
        [] if actions is msgspec.UNSET else [msgspec.to_builtins(action) for action in actions],
        None if metrics is None else 1e3 * metrics.first_token_latency,
        None if metrics is None or count < 2 else 1e3 * (metrics.last_token_ts - metrics.first_token_ts) / (count - 1),
        rate,
        output.num_cached_tokens,
    )
