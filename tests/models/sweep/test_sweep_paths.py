"""Path patching against two runs of Transformers with hooks: the sender with all else frozen, then the receiver."""

import json

import numpy as np
import pytest
import torch

from capflow.errors import UsageError
from capflow_models import sweep_path
from capflow_models.sweep.patch import PatchOptions, plan_of
from tests.kit.engines import LAYERS, in_this_process
from tests.kit.hooked import Hooked

BOUND = 1e-4
HEAD = 32
ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "max_model_len": 64,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 100,
    "kv_cache_memory_bytes": 64 << 20,
}
RECEIVERS = "q:3[1],k:3,v:2,mlp_in:3,final"
PAIR = {"clean": [7, 60, 8, 9, 12], "corrupted": [7, 70, 8, 9, 12], "answer": 30, "wrong_answer": 31}


def direct(hooked, base, donor, sender, receiver, frozen):
    """Return the logits of the second run.

    base, donor: the tokens of the prompt that is changed, and of the other.
    sender: layer, hook and slice of the row.
    receiver: the same.
    """
    layer, hook, part = sender
    at = list(range(len(base)))
    unchanged, others = hooked.run(base)[1], hooked.run(donor)[1]
    patches = [(layer, hook, at, others[layer, hook][:, part], part)]
    for name in frozen:
        first = layer if name == "mlp_out" and hook in ("heads", "attn_out") else layer + 1
        patches += [(number, name, at, unchanged[number, name]) for number in range(first, LAYERS)]
    _, rows = hooked.run(base, *patches)
    layer, hook, part = receiver
    new = rows[layer, hook][:, part]
    assert not torch.equal(new, unchanged[layer, hook][:, part])
    return hooked.run(base, (layer, hook, at, new, part))[0]


def slice_of(name):
    site, _, index = name.partition("[")
    hook, layer = site.split(":")
    number = int(index[:-1]) if index else None
    return int(layer), hook, slice(None) if number is None else slice(number * HEAD, (number + 1) * HEAD)


@pytest.mark.parametrize("frozen", [("attn_out", "mlp_out"), pytest.param(("attn_out",), marks=pytest.mark.long)])
def test_a_path_equals_two_runs_of_transformers(tiny, reference, tmp_path, frozen):
    both = len(frozen) == 2
    hooks = "heads,mlp_out" if both else "heads"
    options = {"hooks": hooks, "layers": "0-2", "frozen": frozen, "metrics": "logit_diff", "direction": "both"}
    if not both:
        options |= {"layers": [1], "direction": "noise"}
    with in_this_process():
        result = sweep_path(tiny, [PAIR], RECEIVERS, out=tmp_path / "out", engine=ENGINE, **options)
    rows, hooked = result.patches.to_pylist(), Hooked(reference.model, HOOKS_SEEN)
    assert len(rows) == (2 * (2 * (5 + 5 + 4) + 5 + 5 + 4) if both else 2 * 5)
    moved = []
    for row in rows:
        prompts = (PAIR["corrupted"], PAIR["clean"])
        base, donor = prompts if row["direction"] == "denoise" else prompts[::-1]
        part = slice(None) if row["index"] is None else slice(row["index"] * HEAD, (row["index"] + 1) * HEAD)
        sender = (row["layer"], row["hook"], part)
        logits = direct(hooked, base, donor, sender, slice_of(row["receiver"]), frozen)
        assert row["value"] == pytest.approx(float(logits[30] - logits[31]), abs=BOUND), row
        moved.append(abs(row["value"] - row["corrupted" if row["direction"] == "denoise" else "clean"]))
    assert np.max(moved) > 0.01
    sites = {json.loads(line)["site"] for line in (tmp_path / "out" / "runs.jsonl").read_bytes().splitlines()}
    assert "heads:1[0]>q:3[1]" in sites
    if both:
        figure = result.heatmap("logit_diff", "noise")
        titles = {axes.get_title(loc="left") for axes in figure.axes}
        assert {"heads to q:3[1]", "heads to final:3", "mlp_out to k:3"} <= titles
        with pytest.raises(UsageError, match="the frozen hooks: got attn_out,mlp_out there, expected mlp_out; choose"):
            sweep_path(tiny, [PAIR], "q:3", out=tmp_path / "out", engine=ENGINE, **(options | {"frozen": "mlp_out"}))


HOOKS_SEEN = ("heads", "attn_out", "mlp_out", "mlp_in", "q", "k", "v", "final")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"receivers": "q:9"}, r"receivers: got q:9, expected a layer of 0\.\.3"),
        ({"receivers": "q:3[5]"}, r"receivers: got q:3\[5\], expected 0\.\.1, as q:3 has 2 entries"),
        ({"receivers": "mlp_in:3[5]"}, r"receivers: got mlp_in:3\[5\], expected no index at this hook"),
        ({"receivers": "router:3", "hooks": "heads"}, "receivers: got router:3, expected a site of LlamaDecoderLayer"),
        ({"receivers": "q:3", "hooks": "heads:5"}, r"hooks: got heads:5"),
        ({"receivers": "attn_out:3"}, "receivers: got attn_out:3, expected what reads the stream"),
        ({"receivers": "loss"}, "receivers: got loss, expected HOOK:LAYER"),
        ({"receivers": "q:0"}, "receivers: got none behind a sender, expected one in a later layer"),
        ({"receivers": []}, "receivers: got none, expected receivers such as"),
        ({"receivers": "final", "hooks": "q"}, "hooks: got q, expected senders, of heads, attn_out, neurons, mlp_out"),
        ({"receivers": "final", "frozen": "q"}, "frozen: got q, expected hooks, of attn_out, mlp_out"),
    ],
)
def test_a_wrong_path_is_named(tiny, options, message):
    with pytest.raises(UsageError, match=message):
        plan_of(
            tiny, [PAIR], PatchOptions(**{"hooks": "mlp_out", "positions": "together", "engine": ENGINE, **options})
        )
