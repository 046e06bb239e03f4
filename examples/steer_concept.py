"""Fit a vector for a concept; measure how much it changes the odds of the concept's words, and its cost.

    python examples/steer_concept.py --plot concept.svg

The concept is gladness against sadness. The model is the demo's, Gemma-3-270m (base), in float32 on vLLM. `fit_vectors`
fits the vector from glad_pairs.jsonl, as `capflow vectors fit` does; it is added at every position. It is measured on
the prompts of glad_prompts.jsonl, which are used for nothing else:

* *log-odds*, in nats: log p(GLAD) - log p(SAD) of the next token, where p is the sum over the words below. No pair
  contains these words.
* *cost*, in nats per token: the mean log probability of NEUTRAL, texts without a mood.

The layer is chosen on the pairs alone: the layer at which pairs that were left out of the fit differ most steadily
along the vector, by the mean of their projections divided by the standard deviation.

Controls are as long as the vector: random directions, and vectors of the same pairs with a random half of them
reversed. The effect of a vector is its *swing*: the log-odds at scale 2 minus those at -2. A difference is needed,
because any vector moves the log-odds towards those of a confused model. Transformers computes some of the log-odds
again as a check.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
PAIRS, PROMPTS = HERE / "glad_pairs.jsonl", HERE / "glad_prompts.jsonl"

GLAD = ("happy", "glad", "great", "wonderful", "good", "joyful", "lovely", "amazing", "pleasant", "cheerful")
SAD = ("sad", "unhappy", "terrible", "bad", "awful", "miserable", "horrible", "dreadful", "unpleasant", "gloomy")
NEUTRAL = (
    "A triangle has three sides, and the sum of its angles is 180 degrees.",
    "The train from the airport to the centre leaves every twenty minutes and stops at four stations.",
    "Copper is a metal that conducts electricity well, so it is used in cables.",
    "To open the file, choose its name from the list and press the button on the right.",
)

SCALES = (-4.0, -3.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0, 4.0)
OTHER_SCALES = (-4.0, -2.0, 2.0, 4.0)
"""The scales at which the other vectors are measured."""

CHECKED_SCALES = (-2.0, 2.0)
"""The scales at which Transformers computes the log-odds too."""

CONTROLS = 2
RESAMPLES = 10_000
HOOK = "post_block"


@dataclass(frozen=True)
class Curve:
    """The effect of one vector.

    scales: multiples of the vector, ascending.
    log_odds: `[scales, prompts]`, in nats.
    neutral: log probability of NEUTRAL, `[scales]`, in nats per token.
    """

    name: str
    scales: Sequence[float]
    log_odds: list[list[float]]
    neutral: list[float]

    def mean(self) -> Any:
        """Return the mean log-odds, `[scales]`."""
        return np.mean(self.log_odds, axis=1)

    def change(self) -> Any:
        """Return the change of the log-odds against scale 0, `[scales, prompts]`."""
        rows = np.array(self.log_odds)
        return rows - rows[list(self.scales).index(0.0)]

    def swing(self) -> float:
        """Return the mean log-odds at scale 2 minus those at -2."""
        mean = dict(zip(self.scales, self.mean(), strict=True))
        return float(mean[2.0] - mean[-2.0])


@dataclass(frozen=True)
class Result:
    """All measurements.

    steadiness: by layer; the layer with the highest one was chosen.
    curves: the first is the fitted vector's.
    answers: to the first prompt, by scale.
    transformers_difference: largest difference of the log-odds between vLLM and Transformers.
    """

    layer: int
    steadiness: list[float]
    vector_length: float
    stream_length: float
    curves: list[Curve]
    answers: dict[str, str]
    transformers_difference: float


def read(path: Path, *fields: str) -> list[tuple[str, ...]]:
    """Return these fields of each line of a JSONL file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [tuple(json.loads(line)[field] for field in fields) for line in lines]


def interval(values: Any) -> Any:
    """Return the bootstrap 95 % interval `[2, scales]` of the mean over prompts of `[scales, prompts]`."""
    values = np.asarray(values)
    drawn = np.random.default_rng(0).integers(values.shape[1], size=(RESAMPLES, values.shape[1]))
    return np.percentile(values[:, drawn].mean(-1), (2.5, 97.5), axis=1)


def steadiness(differences: Any) -> float:
    """Return how steadily each pair's difference points along the mean of all others: mean over standard deviation.

    differences: positive minus negative, `[pairs, hidden_size]`.
    """
    others = differences.sum(0) - differences
    along = (differences * others).sum(1) / np.linalg.norm(others, axis=1)
    return float(along.mean() / along.std())


def single_tokens(tokenizer: Any, words: Sequence[str]) -> list[int]:
    """Return the token of each word with a space before it."""
    tokens = [tokenizer(f" {word}", add_special_tokens=False).input_ids for word in words]
    longer = [word for word, ids in zip(words, tokens, strict=True) if len(ids) != 1]
    if longer:
        sys.exit(f"steer_concept: not one token: {', '.join(longer)}")
    return [ids[0] for ids in tokens]


def odds(glad: Any, sad: Any) -> Any:
    """Return the log-odds of `[…, words]` log probabilities."""
    return np.logaddexp.reduce(glad, axis=-1) - np.logaddexp.reduce(sad, axis=-1)


def controls(differences: Any, length: float) -> dict[str, Any]:
    """Return vectors of the fitted one's length that do not represent its concept."""
    random = np.random.default_rng(0)
    signs = np.resize([1.0, -1.0], len(differences))
    vectors: dict[str, Any] = {}
    for number in range(1, CONTROLS + 1):
        vectors[f"random {number}"] = random.standard_normal(differences.shape[1])
        vectors[f"turned {number}"] = random.permutation(signs) @ differences
    return {name: vector * length / np.linalg.norm(vector) for name, vector in vectors.items()}


def measure(model: Any, layer: int, vectors: dict[str, Any], prompts: list[str]) -> list[Curve]:
    """Return a curve for each vector.

    Each prompt at each scale is a request of its own; all requests go to the engine together.
    """
    from capflow import sampling_params

    tokens = [single_tokens(model.llm.get_tokenizer(), words) for words in (GLAD, SAD)]
    first, *others = vectors
    settings = [(first, scale) for scale in SCALES] + [(name, scale) for name in others for scale in OTHER_SCALES]
    texts, parameters = [], []
    for name, scale in settings:
        steering = {"steering_vectors": {HOOK: {layer: {"vector": vectors[name], "scale": scale}}}} if scale else {}
        for text in (*prompts, *NEUTRAL):
            wanted = {"prompt_logprobs": 0} if text in NEUTRAL else {"logprob_token_ids": tokens[0] + tokens[1]}
            texts.append(text)
            parameters.append(sampling_params(max_tokens=1, temperature=0.0, detokenize=False, **wanted, **steering))
    outputs = iter(model.llm.generate(texts, parameters, use_tqdm=sys.stderr.isatty()))

    points: dict[str, list[tuple[float, list[float], float]]] = {name: [] for name in vectors}
    for name, scale in settings:
        nexts = [next(outputs).outputs[0].logprobs[0] for _ in prompts]
        glad, sad = (np.array([[each[token].logprob for token in side] for each in nexts]) for side in tokens)
        texts_scored = [next(outputs) for _ in NEUTRAL]
        neutral = [
            each[token].logprob
            for output in texts_scored
            for token, each in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        ]
        # At scale 0 all vectors have the same effect.
        for each in vectors if scale == 0.0 else [name]:
            points[each].append((scale, odds(glad, sad).tolist(), float(np.mean(neutral))))
    return [Curve(name, *map(list, zip(*sorted(curve), strict=True))) for name, curve in points.items()]


def again_in_transformers(directory: str, spec: Callable[[float], Any], prompts: list[str]) -> Any:
    """Return the log-odds `[scales, prompts]` at CHECKED_SCALES, computed by Transformers."""
    from capflow_models import TransformersSteerableModel

    model = TransformersSteerableModel(directory, dtype="float32")
    tokens = [single_tokens(model.tokenizer, words) for words in (GLAD, SAD)]
    rows = []
    for scale in CHECKED_SCALES:
        with model.steering(spec(scale)):
            logprobs = model.logprobs(prompts).astype(np.float64)
        rows.append(odds(*(logprobs[:, side] for side in tokens)))
    return np.array(rows)


def run(say: Callable[[str], None]) -> Result:
    """Fit, measure and check.

    say: called with the name of each step.
    """
    from capflow import Site, demo_model
    from capflow_models import LayerSteeringSpec, SteeringSpec, VLLMSteerableModel, fit_vectors

    pairs = [(positive, negative) for positive, negative in read(PAIRS, "positive", "negative")]
    prompts = [prompt for (prompt,) in read(PROMPTS, "prompt")]
    directory = str(demo_model(progress=say))
    say("starting the engine")
    with VLLMSteerableModel(
        directory, dtype="float32", max_model_len=256, max_num_seqs=64, enforce_eager=True, max_logprobs=64
    ) as model:
        say("fitting")
        sites = [Site(layer, HOOK) for layer in range(model.info.num_layers)]
        rows = model.last_rows([text for pair in pairs for text in pair], sites)
        differences = [rows[site][::2].astype(np.float64) - rows[site][1::2] for site in sites]
        by_layer = [steadiness(each) for each in differences]
        layer = int(np.argmax(by_layer))
        fitted = {method: fit_vectors(model, pairs, method, [layer])[layer] for method in ("mean", "pca")}
        length = float(np.linalg.norm(fitted["mean"]))

        def spec(scale: float) -> SteeringSpec:
            return SteeringSpec({layer: LayerSteeringSpec(fitted["mean"], scale)})

        say("measuring")
        vectors = {**fitted, **controls(differences[layer], length)}
        curves = measure(model, layer, vectors, prompts)
        answers = {}
        for scale in sorted((0.0, *OTHER_SCALES)):
            with model.steering(spec(scale)):
                (answers[f"{scale:+g}"],) = model.generate(prompts[:1], max_new_tokens=16)
    say("checking with Transformers")
    theirs = again_in_transformers(directory, spec, prompts)
    ours = np.array([curves[0].log_odds[SCALES.index(scale)] for scale in CHECKED_SCALES])
    stream = float(np.linalg.norm(rows[sites[layer]], axis=1).mean())
    return Result(layer, by_layer, length, stream, curves, answers, float(np.abs(ours - theirs).max()))


def table(result: Result) -> str:
    """Return the measurements as Markdown tables."""
    curve = result.curves[0]
    change = curve.change()
    lines = [
        "| scale | log-odds, nats | change, nats | 95 % of the change | neutral text, nats a token |",
        "|---|---|---|---|---|",
    ]
    for number, (low, high) in enumerate(interval(change).T):
        columns = (
            f"{curve.scales[number]:+g}",
            f"{curve.mean()[number]:+.2f}",
            f"{change[number].mean():+.2f}",
            f"{low:+.2f} to {high:+.2f}",
            f"{curve.neutral[number]:.2f}",
        )
        lines.append(f"| {' | '.join(columns)} |")
    lines += [
        "",
        f"| vector | {' | '.join(f'at {scale:+g}' for scale in OTHER_SCALES)} | swing |",
        "|---|---|---|---|---|---|",
    ]
    for other in result.curves:
        by_scale = dict(zip(other.scales, other.change().mean(1), strict=True))
        columns = (other.name, *(f"{by_scale[scale]:+.2f}" for scale in OTHER_SCALES), f"{other.swing():+.2f}")
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines)


def plot(result: Result, path: Path) -> None:
    """Draw log-odds and cost against the scale; the file's suffix is the format."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams.update(
        {"svg.hashsalt": "capflow", "font.size": 11, "axes.spines.top": False, "axes.spines.right": False}
    )
    figure = Figure((7.2, 6.2), layout="constrained", facecolor="#fbfbfb")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(5, 3))
    styles = {
        "mean": ("fitted: difference of means", {"color": "#0b62a4", "lw": 2.4, "marker": "o", "ms": 5, "zorder": 3}),
        "pca": (
            "fitted: first principal direction",
            {"color": "#d1590f", "lw": 1.6, "marker": "s", "ms": 4, "ls": "--"},
        ),
        "random": ("control: random direction", {"color": "#6f6f6f", "lw": 1.2, "marker": ".", "ls": ":"}),
        "turned": (
            "control: half of the pairs turned round",
            {"color": "#2e8b57", "lw": 1.2, "marker": ".", "ls": "-."},
        ),
    }
    named = set()
    for curve in result.curves:
        kind = curve.name.split()[0]
        label, style = styles[kind]
        above.plot(curve.scales, curve.mean(), label=None if kind in named else label, **style)
        below.plot(curve.scales, curve.neutral, **style)
        named.add(kind)
    curve = result.curves[0]
    above.fill_between(
        curve.scales, *interval(curve.log_odds), color="#0b62a4", alpha=0.18, lw=0, label="95 % of the mean"
    )
    above.set_ylabel("log-odds, glad : sad (nats)")
    above.legend(frameon=False, fontsize=9.5, loc="upper left")
    below.set_ylabel("log p of neutral text\n(nats a token)")
    below.set_xlabel("scale (multiples of the fitted vector)")
    below.set_xticks(range(-4, 5))
    shown = [cost for other in result.curves if not other.name.startswith("random") for cost in other.neutral]
    # Random directions lie far outside.
    below.set_ylim(min(shown) - 0.1, max(shown) + 0.1)
    for axes in (above, below):
        axes.set_facecolor("#fbfbfb")
        axes.grid(color="#dddddd", lw=0.7)
        axes.axvline(0, color="#999999", lw=0.9, zorder=1)
    figure.savefig(path, dpi=100, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser(description="Measure what a fitted vector does to the odds of its concept.")
    parser.add_argument("--plot", type=Path, help="the figure to write, .svg or .png")
    parser.add_argument("--json", type=Path, help="a JSON file of all measurements to write")
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

    result = run(lambda step: print(f"steer_concept: {step}", file=sys.stderr, flush=True))
    print(f"layer {result.layer}, chosen by " + " ".join(f"{value:.2f}" for value in result.steadiness))
    print(f"lengths: the vector {result.vector_length:.0f}, the stream at that layer {result.stream_length:.0f}")
    print(f"Transformers' log-odds differ by at most {result.transformers_difference:.1e}\n")
    print(table(result), "\n")
    for scale, answer in result.answers.items():
        print(f"{scale:>3}{answer!r}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(asdict(result), indent=1) + "\n", encoding="utf-8")
    if arguments.plot is not None:
        plot(result, arguments.plot)


if __name__ == "__main__":
    main()
