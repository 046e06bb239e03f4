"""A steerable model over Hugging Face Transformers: the reference; it computes one prompt at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from capflow.capture.model import ModelInfo
from capflow.capture.site import HOOKS, Site
from capflow.errors import UsageError, explain
from capflow.extras import require
from capflow.steering.request import Steering
from capflow_engine.steering.budget import Size
from capflow_engine.steering.fit import Fit
from capflow_engine.steering.saes import load_for
from capflow_engine.steering.store import SteeringStore
from capflow_models.model import Completion, Job, Prompt, Rows, Sampling, SteerableModel

require("vllm", "capflow_models.TransformersSteerableModel", "torch", "transformers")

import torch  # noqa: E402
import transformers  # noqa: E402

from capflow_models.stream import Stream, layers_of  # noqa: E402


class TransformersSteerableModel(SteerableModel):
    """A causal language model of Transformers.

    model: a directory or a name that `AutoModelForCausalLM` loads, or a loaded model.
    tokenizer: the model's tokenizer; if left out, it is loaded by the model's name. Without a tokenizer, prompts must
        be token ids, and answers have no text.
    dtype: the name of a torch dtype, or `auto`.
    device: the torch device; the model's own if None.
    saes: autoencoders by whose features prompts may be steered, each `PATH`, `PATH@SITE` or `NAME=PATH@SITE`.
    arguments: further arguments of `from_pretrained`.

    Every hook point that is found in the layers can be steered. A layer with an unclear structure has two: its input
    and its output.

    The model has forward hooks only while a prompt is computed. Only one thread may use it at a time.
    """

    other_hooks = "steer another hook"

    def __init__(
        self,
        model: str | Any,
        *,
        tokenizer: Any = None,
        dtype: str = "auto",
        device: str | None = None,
        saes: Sequence[str] = (),
        **arguments: Any,
    ) -> None:
        if isinstance(model, str):
            tokenizer = tokenizer or _tokenizer(model)
            try:
                loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype, **arguments)
            except (OSError, ValueError) as e:
                raise UsageError(
                    explain("model", got=f"{model}: {e}", expected="a model that Transformers loads")
                ) from e
        else:
            loaded = model
        self.model = (loaded if device is None else loaded.to(device)).eval()
        self.tokenizer = tokenizer
        config = loaded.config.get_text_config()
        layers = int(config.num_hidden_layers)
        self._layers = layers_of(self.model, layers, loaded.dtype)
        super().__init__(
            ModelInfo(
                name=model if isinstance(model, str) else loaded.config.name_or_path or type(loaded).__name__,
                num_layers=layers,
                hidden_size=int(config.hidden_size),
                dtype=str(loaded.dtype).removeprefix("torch."),
                sites=tuple(Site(n, hook) for n, layer in enumerate(self._layers) for hook in layer.structure.places),
                fixed=tuple(Site(n, hook) for n, layer in enumerate(self._layers) for hook in layer.structure.fixed),
            ),
            SteeringStore(check=self._check_shared, resolve=self._resolved),
        )
        self._fit = Fit(self.info, Size.without_bound(), load_for(saes, lambda: self.info, "saes"))
        self._ends = _ends(loaded, tokenizer)

    @property
    def hooks(self) -> tuple[str, ...]:
        """The hooks that at least one layer has."""
        return tuple(hook for hook in HOOKS if any(hook in layer.structure.places for layer in self._layers))

    def _check_site(self, site: Site) -> None:
        if site.hook in HOOKS and site.layer < len(self._layers):
            layer, structure, _ = self._layers[site.layer]
            if (reason := structure.missing.get(site.hook)) is not None:
                got = f"{site}, which {type(layer).__name__} lacks: {reason}"
                raise UsageError(explain("hook", got=got, expected=f"one of {', '.join(structure.places)}"))
        super()._check_site(site)

    def _resolved(self, steering: Steering) -> Steering:
        return self._fit.resolved(steering)

    def _check(self, steering: Steering) -> None:
        super()._check(self._resolved(steering))

    def _check_shared(self, present: Steering, new: Steering) -> None:
        """Raise UsageError for a module or a global state that does not fit; see `SteeringStore`."""
        self._check(new)
        self._fit.check(present, new)

    @torch.inference_mode()
    def run(self, jobs: Sequence[Job]) -> list[Completion]:
        """Return the answers to jobs, in order. They are computed one after another."""
        return [self._answer(job) for job in jobs]

    def _answer(self, job: Job) -> Completion:
        prompt = self.token_ids(job.prompt)
        sampling = job.sampling
        random = torch.Generator(self.model.device)
        if sampling.seed is None:
            random.seed()
        else:
            random.manual_seed(sampling.seed)
        answer: list[int] = []
        with self._stream(prompt, job.steering).hooked(self._layers):
            ids, cache = prompt, None
            while len(answer) < sampling.max_new_tokens:
                output = self._forward(ids, cache, use_cache=True)
                cache = output.past_key_values
                ids = [_sample(output.logits[0, -1].float(), sampling, random)]
                answer += ids
                if ids[0] in self._ends and not sampling.ignore_eos:
                    break
        return Completion(self._text(prompt, answer), tuple(answer), tuple(prompt))

    def _text(self, prompt: list[int], answer: list[int]) -> str:
        """Return the text that an answer adds to its prompt; a space between them belongs to it, as in vLLM."""
        if self.tokenizer is None:
            return ""
        before, whole, alone = (
            str(self.tokenizer.decode(ids, skip_special_tokens=True)) for ids in (prompt, prompt + answer, answer)
        )
        return whole.removeprefix(before) if whole.startswith(before) else alone

    @torch.inference_mode()
    def _logprobs(self, prompts: Sequence[Prompt], steering: Steering) -> npt.NDArray[np.float32]:
        rows = []
        for prompt in map(self.token_ids, prompts):
            with self._stream(prompt, steering).hooked(self._layers):
                logits = self._forward(prompt, None, use_cache=False).logits[0, -1].float()
            rows.append(logits.log_softmax(-1).cpu().numpy())
        return np.stack(rows)

    @torch.inference_mode()
    def _token_logprobs(self, prompts: Sequence[Prompt], steering: Steering) -> list[npt.NDArray[np.float32]]:
        logprobs = []
        for prompt in map(self.token_ids, prompts):
            with self._stream(prompt, steering).hooked(self._layers):
                logits = self._forward(prompt, None, use_cache=False).logits[0, :-1].float()
            tokens = torch.tensor(prompt[1:], device=logits.device)
            logprobs.append(logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0].cpu().numpy())
        return logprobs

    def _last_rows(self, prompts: Sequence[Prompt], sites: Sequence[Site], steering: Steering) -> Rows:
        caught = [{site: rows[-1] for site, rows in self._rows_of(p, sites, steering).items()} for p in prompts]
        return {site: np.stack([each[site] for each in caught]) for site in sites}

    def _prompt_rows(self, prompts: Sequence[Prompt], sites: Sequence[Site], steering: Steering) -> list[Rows]:
        return [self._rows_of(prompt, sites, steering) for prompt in prompts]

    @torch.inference_mode()
    def _rows_of(self, prompt: Prompt, sites: Sequence[Site], steering: Steering) -> Rows:
        ids = self.token_ids(prompt)
        stream = self._stream(ids, steering)
        with stream.hooked(self._layers, frozenset(sites)):
            self._forward(ids, None, use_cache=False)
        return {site: stream.caught[site].numpy() for site in sites}

    def _stream(self, prompt: Sequence[int], steering: Steering) -> Stream:
        self._check(steering)
        return Stream(self._fit.program(steering, self.modules), len(prompt), self.model.device)

    def _forward(self, ids: Sequence[int], cache: Any, *, use_cache: bool) -> Any:
        input_ids = torch.tensor([list(ids)], device=self.model.device)
        return self.model(input_ids=input_ids, past_key_values=cache, use_cache=use_cache)

    def token_ids(self, prompt: Prompt) -> list[int]:
        """Return a prompt's token ids."""
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            do = "pass token ids, or a tokenizer"
            raise UsageError(explain("prompts", got="a text for a model without a tokenizer", do=do))
        return list(self.tokenizer(prompt).input_ids)


def _tokenizer(name: str) -> Any:
    """Return the tokenizer of a model by the model's name; None if it has none."""
    try:
        return transformers.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _ends(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the end tokens: those of the model's generation settings and that of the tokenizer."""
    settings = getattr(model, "generation_config", None)
    named = getattr(settings, "eos_token_id", None)
    own = named if isinstance(named, list) else [named]
    return frozenset(int(token) for token in (*own, getattr(tokenizer, "eos_token_id", None)) if token is not None)


def _sample(logits: torch.Tensor, sampling: Sampling, random: torch.Generator) -> int:
    """Return the next token, sampled from logits `[vocabulary]`."""
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    odds, tokens = (logits / sampling.temperature).softmax(-1).sort(descending=True)
    odds = odds.where(odds.cumsum(-1) - odds < sampling.top_p, 0.0)
    return int(tokens[torch.multinomial(odds, 1, generator=random)])
