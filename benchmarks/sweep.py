"""A patch sweep: capflow against a bare loop in Transformers with forward hooks, and against TransformerLens.

    python benchmarks/sweep.py [--model demo] [--pairs 2] [--layers all] [--hook heads] [--rounds 3]
        [--transformer-lens DIRECTORY]

Every contender patches the same rows: the stream that leaves each layer (`post_block`), or with `--hook heads` each
head's result, at each position, one patch at a time, in float32. Each computes the same three metrics of the next
token. All are loaded at the same time, in this process. Turns are interleaved; loading is not timed. Results must
agree. Medians are of the CPU time of the process and of its hub's: other work on the machine lengthens the wall time of
the many small steps of a loop far more than that of a few large ones. With `OMP_NUM_THREADS=1` it is the wall time of a
quiet core.

* `loop`: one forward pass for each patch, of the last token's logits only.
* `batched`: the same, with `--batch` patches in one forward pass.
* `TransformerLens`: `run_with_hooks` for each patch, as its tutorials do; it computes the logits of every token.
  Install it beside this environment: `pip install --no-deps --target DIRECTORY transformer-lens` and what it imports.

Predicted: a forward pass of 10 tokens reads every weight once. capflow puts hundreds of patches into one step, so it is
as fast as its arithmetic: 3 to 10 times the loop on a CPU. It pays 1 to 2 ms for each request.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from overhead import run_round

from capflow_models.backends import resolved_model
from capflow_models.sweep.metrics import value_of
from capflow_models.sweep.parts import RowPart
from capflow_models.sweep.patch import PatchOptions, plan_of
from capflow_models.sweep.plan import RunKey, SweepPlan

AGREE = 2e-3
PAIRS = Path(__file__).parent.parent / "examples" / "city_pairs.jsonl"

Values = dict[RunKey, tuple[float, float, float]]


def measured(logits: torch.Tensor, reference: torch.Tensor, answer: int, wrong: int) -> tuple[float, float, float]:
    """Return logit difference, probability and KL of logits `[vocabulary]`."""
    logprobs = logits.log_softmax(-1)
    kl = (reference.exp() * (reference - logprobs)).sum()
    return float(logits[answer] - logits[wrong]), float(logprobs[answer].exp()), float(kl)


class Loop:
    """Transformers with forward hooks, `batch` patches in one forward pass."""

    def __init__(self, model: Any, layers: Any, batch: int) -> None:
        self.model, self.layers, self.batch = model, layers, batch

    def turn(self, plan: SweepPlan) -> Values:
        """Run the sweep."""
        values: Values = {}
        for number, pair in enumerate(plan.pairs):
            rows: dict[int, torch.Tensor] = {}
            handles = [
                attached(layer, plan.sites[0].hook, functools.partial(_keep, rows, n))
                for n, layer in enumerate(self.layers)
            ]
            clean = self.logits([pair.clean])[0].log_softmax(-1)
            for handle in handles:
                handle.remove()
            keys = [key for key in plan.keys(number) if key.site]
            for start in range(0, len(keys), self.batch):
                some = keys[start : start + self.batch]
                for key, logits in zip(some, self._patched(some, pair.corrupted, rows), strict=True):
                    values[key] = measured(logits, clean, pair.answer, pair.wrong_answer)
        return values

    def _patched(self, keys: list[RunKey], tokens: Any, rows: dict[int, torch.Tensor]) -> torch.Tensor:
        parts = [RowPart.parse(key.site) for key in keys]

        def patch(layer: int, values: torch.Tensor) -> None:
            for place, (key, part) in enumerate(zip(keys, parts, strict=True)):
                if part.site.layer == layer:
                    width = self.layers[layer].self_attn.head_dim
                    at = slice(None) if part.first is None else slice(part.first * width, (part.first + 1) * width)
                    values[place, key.position, at] = rows[layer][key.position, at]

        layers = sorted({part.site.layer for part in parts})
        handles = [attached(self.layers[n], parts[0].site.hook, functools.partial(patch, n)) for n in layers]
        try:
            return self.logits([tokens] * len(keys))
        finally:
            for handle in handles:
                handle.remove()

    def logits(self, prompts: list[Any]) -> torch.Tensor:
        """Return the logits of the next token, `[prompts, vocabulary]`."""
        with torch.inference_mode():
            ids = torch.tensor([list(prompt) for prompt in prompts])
            logits: torch.Tensor = self.model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1].float()
            return logits


def attached(layer: Any, hook: str, visit: Callable[[torch.Tensor], None]) -> Any:
    """Call a function with the rows of a layer `[batch, tokens, width]`, which it may change; return the handle."""
    if hook == "heads":
        return layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: visit(args[0]))
    return layer.register_forward_hook(lambda _, __, output: visit(_hidden(output)))


def _keep(rows: dict[int, torch.Tensor], layer: int, values: torch.Tensor) -> None:
    rows[layer] = values[0].clone()


def _hidden(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output[0]


class Lens:
    """TransformerLens."""

    def __init__(self, directory: str, name: str) -> None:
        sys.path.append(directory)
        from transformer_lens.model_bridge import TransformerBridge

        self.model = TransformerBridge.boot_transformers(name, dtype=torch.float32)

    def turn(self, plan: SweepPlan) -> Values:
        """Run the sweep."""
        values: Values = {}
        with torch.inference_mode():
            for number, pair in enumerate(plan.pairs):
                names = [site.transformer_lens_name for site in plan.sites]
                logits, cache = self.model.run_with_cache(torch.tensor([pair.clean]), names_filter=names)
                clean = logits[0, -1].float().log_softmax(-1)
                tokens = torch.tensor([pair.corrupted])
                for key in (key for key in plan.keys(number) if key.site):
                    part = RowPart.parse(key.site)
                    name = part.site.transformer_lens_name
                    at = (slice(None), key.position, *([] if part.first is None else [part.first]))
                    patch = functools.partial(_put, row=cache[name][at], at=at)
                    logits = self.model.run_with_hooks(tokens, return_type="logits", fwd_hooks=[(name, patch)])
                    values[key] = measured(logits[0, -1].float(), clean, pair.answer, pair.wrong_answer)
        return values


def _put(value: torch.Tensor, hook: Any, *, row: torch.Tensor, at: tuple[Any, ...]) -> torch.Tensor:  # noqa: ARG001
    value[at] = row
    return value


class Capflow:
    """capflow's engine."""

    def __init__(self, plan: SweepPlan, out: Path) -> None:
        from capflow_models.sweep.session import SweepSession

        self.session = SweepSession(plan.model, plan.sites, out, (), plan.engine)

    def turn(self, plan: SweepPlan) -> Values:
        """Run the sweep."""
        self.session.llm.reset_prefix_cache()
        self.session.begin(plan.pairs)
        keys = [key for number in range(len(plan.pairs)) for key in plan.keys(number) if key.site]
        runs = self.session.patched(keys, {pair.id: pair for pair in plan.pairs})
        return {
            run.key: (value_of(run, "logit_diff"), value_of(run, "probability"), value_of(run, "kl")) for run in runs
        }


def main() -> int:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="demo")
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--layers", default="all")
    parser.add_argument("--hook", default="post_block", choices=["post_block", "heads"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--transformer-lens", default="")
    args = parser.parse_args()
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    name = resolved_model(args.model)
    engine = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256}
    plan = plan_of(args.model, PAIRS, PatchOptions(args.hook, layers=args.layers, engine=engine))
    plan = SweepPlan(
        plan.model, plan.pairs[: args.pairs], plan.parts, plan.positions[: args.pairs], plan.directions, {}, engine
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
    turns: dict[str, Callable[[SweepPlan], Values]] = {
        "loop": Loop(model, model.model.layers, 1).turn,
        "batched": Loop(model, model.model.layers, args.batch).turn,
    }
    if args.transformer_lens:
        turns["TransformerLens"] = Lens(args.transformer_lens, name).turn
    ours = Capflow(plan, Path(tempfile.mkdtemp(prefix="capflow-bench-")))
    turns["capflow"] = ours.turn
    seconds: dict[str, list[float]] = {kind: [] for kind in turns}
    for number in range(args.rounds + 1):
        values = run_round(turns, plan, number, seconds)
    ours.session.close()
    count = len(values["capflow"])
    threads = torch.get_num_threads()
    print(f"\n{count} patches of {args.pairs} pairs, {args.rounds} turns each, interleaved, {threads} threads")
    print("| contender | CPU s | patches per CPU s | capflow is faster by |")
    print("|---|---|---|---|")
    fastest = statistics.median(seconds["capflow"])
    for kind, each in seconds.items():
        median = statistics.median(each)
        print(f"| {kind} | {median:.1f} | {count / median:.1f} | {median / fastest:.1f} |")
    for kind, theirs in values.items():
        apart = max(
            abs(one - other)
            for key in theirs
            for one, other in zip(theirs[key], values["capflow"][key], strict=True)
        )  # fmt: skip
        print(f"{kind}: values differ from capflow's by at most {apart:.1e}")
        assert theirs.keys() == values["capflow"].keys(), kind
        assert apart < AGREE, kind
    moved = [value[0] for value in values["capflow"].values()]
    assert max(moved) - min(moved) > 1.0, "no patch moved the answer"
    return 0


if __name__ == "__main__":
    sys.exit(main())
