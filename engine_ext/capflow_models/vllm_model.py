"""A steerable model over vLLM: `capflow.LLM` runs jobs in one batch, each request with steering of its own."""

from __future__ import annotations

import math
import shutil
import tempfile
import uuid
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import capflow
from capflow.capture.site import HOOKS, Site, layers_by_hook
from capflow.errors import CapflowError, UsageError, explain
from capflow.steering.feature import SetFeature
from capflow.steering.request import Steering
from capflow_engine.llm.llm import LLM
from capflow_engine.request.params import sampling_params
from capflow_models.model import Completion, Job, Prompt, Rows, SteerableModel

_PROBABILITIES_ALL = -1


class VLLMSteerableModel(SteerableModel):
    """A model that vLLM runs.

    model: a directory or a name that vLLM loads, or a `capflow.LLM`, which `close` leaves open.
    rows: for a `capflow.LLM`, the root of its `filesystem` consumer, which `last_rows` reads. A model that is opened
        by name has a consumer of its own.
    arguments: further arguments of `capflow.LLM`, such as `sites`, and those of vLLM.

    The tapped sites can be steered. A model that is opened by name taps every site by default, so that a specification
    for one back end also runs on the other.
    """

    other_hooks = "open the model with sites=[HOOK:LAYER] to tap others"

    def __init__(self, model: str | LLM, *, rows: str | Path | None = None, **arguments: Any) -> None:
        self._close = lambda: None
        if isinstance(model, str):
            if rows is not None:
                raise UsageError(explain("rows", got=str(rows), expected="no rows for a model that is opened by name"))
            rows = tempfile.mkdtemp(prefix="capflow-rows-")
            remove = weakref.finalize(self, shutil.rmtree, rows, ignore_errors=True)
            keeper = f"filesystem:root={rows},capture=requests,fsync=false"
            self.llm = LLM(
                model, **{"consumers": [keeper], "sites": ["*:*"], "max_logprobs": _PROBABILITIES_ALL, **arguments}
            )
            llm = self.llm

            def close() -> None:
                llm.close()
                remove()

            self._close = close
        else:
            self.llm = model
        self._rows = None if rows is None else Path(rows)
        super().__init__(self.llm.capflow_model, self.llm.steering)

    @property
    def hooks(self) -> tuple[str, ...]:
        """The hooks at which at least one layer is tapped."""
        tapped = {site.hook for site in self.info.sites}
        return tuple(hook for hook in HOOKS if hook in tapped)

    @property
    def length_max(self) -> int:
        """The engine's `max_model_len`."""
        return int(self.llm.llm_engine.model_config.max_model_len)

    def close(self) -> None:
        """Stop the engine if this model opened it."""
        self._close()

    def run(self, jobs: Sequence[Job]) -> list[Completion]:
        """Return the answers to jobs, in order. They run in one batch as far as the engine has room."""
        parameters = [
            sampling_params(
                max_tokens=job.sampling.max_new_tokens,
                temperature=job.sampling.temperature,
                top_p=job.sampling.top_p,
                seed=job.sampling.seed,
                ignore_eos=job.sampling.ignore_eos,
                detokenize=self._has_words,
                **_fields(job.steering),
            )
            for job in jobs
        ]
        outputs = self.llm.generate([_vllm_prompt(job.prompt) for job in jobs], parameters, use_tqdm=False)
        return [
            Completion(
                output.outputs[0].text if self._has_words else "",
                tuple(output.outputs[0].token_ids),
                tuple(output.prompt_token_ids),
            )
            for output in outputs
        ]

    def _logprobs(self, prompts: Sequence[Prompt], steering: Steering) -> npt.NDArray[np.float32]:
        parameters = [
            sampling_params(
                max_tokens=1,
                temperature=0.0,
                logprobs=_PROBABILITIES_ALL,
                detokenize=False,
                ignore_eos=True,
                **_fields(steering),
            )
            for _ in prompts
        ]
        outputs = self.llm.generate([_vllm_prompt(prompt) for prompt in prompts], parameters, use_tqdm=False)
        first = [output.outputs[0].logprobs[0] for output in outputs]
        rows = np.full((len(first), max(max(each) for each in first) + 1), -math.inf, np.float32)
        for row, each in zip(rows, first, strict=True):
            for token, entry in each.items():
                row[token] = entry.logprob
        return rows

    def _token_logprobs(self, prompts: Sequence[Prompt], steering: Steering) -> list[npt.NDArray[np.float32]]:
        ids = [self.token_ids(prompt) for prompt in prompts]
        parameters = [
            sampling_params(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, **_fields(steering))
            for _ in ids
        ]
        outputs = self.llm.generate([_vllm_prompt(prompt) for prompt in ids], parameters, use_tqdm=False)
        return [
            np.array(
                [at[token].logprob for token, at in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)],
                np.float32,
            )
            for prompt, output in zip(ids, outputs, strict=True)
        ]

    def _last_rows(self, prompts: Sequence[Prompt], sites: Sequence[Site], steering: Steering) -> Rows:
        captures = self._captured(prompts, sites, steering, "last_prompt")
        return {site: np.stack([each[site][-1] for each in captures]) for site in sites}

    def _prompt_rows(self, prompts: Sequence[Prompt], sites: Sequence[Site], steering: Steering) -> list[Rows]:
        return self._captured(prompts, sites, steering, "all_prompt")

    def _captured(
        self, prompts: Sequence[Prompt], sites: Sequence[Site], steering: Steering, positions: str
    ) -> list[Rows]:
        """Return the captured rows of each prompt at these positions."""
        if self._rows is None:
            do = "pass rows=ROOT, the root of the engine's filesystem consumer, or open the model by name"
            raise UsageError(explain("last_rows: no captured rows to read", do=do))
        name = uuid.uuid4().hex
        hooks = layers_by_hook(dict.fromkeys(sites))
        parameters = [
            sampling_params(
                id=f"{name}-{number}",
                capture={"hooks": hooks, "positions": positions},
                max_tokens=1,
                temperature=0.0,
                detokenize=False,
                **_fields(steering),
            )
            for number, _ in enumerate(prompts)
        ]
        outputs = self.llm.generate([_vllm_prompt(prompt) for prompt in prompts], parameters, use_tqdm=False)
        for output in outputs:
            for consumer, result in output.capture_results.items():
                if result.status != "ok":
                    raise CapflowError(explain(f"rows for {consumer}", got=f"{result.status}: {result.error}"))
        data = capflow.open(self._rows)
        captures = [data[f"{name}-{number}"] for number, _ in enumerate(prompts)]
        return [{site: each[site].rows.astype(np.float32) for site in sites} for each in captures]

    def token_ids(self, prompt: Prompt) -> list[int]:
        """Return a prompt's token ids."""
        return list(self.llm.get_tokenizer().encode(prompt)) if isinstance(prompt, str) else list(prompt)

    @property
    def _has_words(self) -> bool:
        return not self.llm.llm_engine.model_config.skip_tokenizer_init


def _vllm_prompt(prompt: Prompt) -> Any:
    return prompt if isinstance(prompt, str) else {"prompt_token_ids": list(prompt)}


def _fields(steering: Steering) -> dict[str, Any]:
    """Return a steering as keyword arguments of `sampling_params`, without empty ones.

    Raises UsageError for features that are resolved: a request names features by their autoencoder.
    """
    for field, part in steering.parts():
        if isinstance(part, SetFeature):
            at, do = f"{field}.{part.hook}.{part.layer}", "leave it to the engine to resolve them"
            expected = "features by the name of their autoencoder"
            raise UsageError(explain(at, got="a feature that is resolved", expected=expected, do=do))
    features = {
        tier: tuple(use for use in steering.features if use.tier == tier) for tier in ("base", "prefill", "decode")
    }
    fields = {
        "steering_vectors": steering.base.vectors,
        "prefill_steering_vectors": steering.prefill.vectors,
        "decode_steering_vectors": steering.decode.vectors,
        "steering_clamps": steering.base.clamps,
        "prefill_steering_clamps": steering.prefill.clamps,
        "decode_steering_clamps": steering.decode.clamps,
        "steering_features": features["base"],
        "prefill_steering_features": features["prefill"],
        "decode_steering_features": features["decode"],
        "steering_patches": steering.patches,
        "steering_gates": steering.gates,
        "steering_name": {use.name: use.scale for use in steering.modules},
    }
    return {name: value for name, value in fields.items() if value}
