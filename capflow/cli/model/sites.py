"""`capflow sites`: shows the sites of a model and which of them would be tapped, from its configuration alone."""

from __future__ import annotations

import json
from collections.abc import Iterable
from operator import attrgetter

import click
import msgspec
from rich.console import Console
from rich.table import Table

from capflow.capture.site import FORWARD_HOOKS, NNSIGHT_NAMES, SHAPED_HOOKS, TRANSFORMER_LENS_NAMES
from capflow.cli.model.child import last_event
from capflow.extras import require
from capflow.text.examples import examples
from capflow.text.printable import printable


@click.command(epilog=examples("capflow sites Qwen/Qwen3-8B --sites 'post_block:*' --sites mlp_in:12"))
@click.argument("model")
@click.option(
    "--sites", multiple=True, metavar="HOOK:LAYER", help="Sites to tap; * is every layer. Default: post_block:*."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a list of layers, each with its sites.")
@click.option(
    "--trust-remote-code", is_flag=True, help="Run the model's own Python code, as vLLM's flag of that name does."
)
def sites(model: str, sites: tuple[str, ...], *, as_json: bool, trust_remote_code: bool) -> None:
    """Print the sites of MODEL and which of them would be tapped; no weights are loaded."""
    require("vllm", "capflow sites")
    options = ["--trust-remote-code"] if trust_remote_code else []
    layers = last_event(
        "capflow_engine.jobs.sites", [*options, "--", model, *sites], "sites", f"model {model}: looking at it"
    )["layers"]
    if as_json:
        click.echo(json.dumps(layers))
        return
    _show(msgspec.convert(layers, list[LayerSites]), Console(highlight=False))


class LayerSites(msgspec.Struct, frozen=True):
    """One layer in the engine's answer.

    layer: the class of the layer.
    available: the hooks that the layer has.
    tapped: the hooks that would be tapped.
    missing: for each hook that the layer lacks, the reason.
    shapes: by hook, the shape of a row, where it is not that of the stream.
    """

    layer: str
    available: list[str]
    tapped: list[str]
    missing: dict[str, str]
    shapes: dict[str, tuple[int, ...]] = {}


def _show(layers: list[LayerSites], console: Console) -> None:
    table = Table("hook", "layers", "tapped", "TransformerLens", "nnsight", box=None)
    reasons: dict[str, None] = {}
    for hook in FORWARD_HOOKS:
        available, tapped = ([n for n, layer in enumerate(layers) if hook in of(layer)] for of in (_AVAILABLE, _TAPPED))
        lens = TRANSFORMER_LENS_NAMES[hook]
        lens = f"({lens})" if hook == "final" else lens
        table.add_row(hook, ranges(available), ranges(tapped), lens, NNSIGHT_NAMES.get(hook, "-"))
        for layer in layers:
            if (reason := layer.missing.get(hook)) is not None:
                reasons.setdefault(f"{layer.layer} has no {hook}: {reason}")
    classes = dict.fromkeys(layer.layer for layer in layers)
    for name in classes:
        console.print(f"{printable(name)}: layers {ranges(n for n, layer in enumerate(layers) if layer.layer == name)}")
    console.print(table)
    for hook in SHAPED_HOOKS:
        shapes = dict.fromkeys("x".join(map(str, layer.shapes[hook])) for layer in layers if hook in layer.shapes)
        if shapes:
            console.print(f"A row of {hook} has {' or '.join(shapes)} numbers.")
    for reason in reasons:
        console.print(printable(reason), markup=False)
    console.print("Also accepted: blocks.LAYER.NAME of TransformerLens, those in parentheses alone,")
    console.print("and model.layers.LAYER.NAME of nnsight.")
    taps = sum(len(layer.tapped) for layer in layers)
    console.print(f"{taps} taps. --sites HOOK:LAYER, with * and repeatable, puts them elsewhere.")


_AVAILABLE, _TAPPED = attrgetter("available"), attrgetter("tapped")


def ranges(numbers: Iterable[int]) -> str:
    """Return ascending numbers as ranges, such as `0-4, 7`; `-` without any."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs) or "-"
