"""Compares every architecture with Transformers, at every hook and layer, in three dtypes.

    python -m tests.architectures [MODEL_TYPE …] [--write]

`make architectures` writes the matrix of docs/compatibility.md. Each architecture is a tiny random model, which is
saved, loaded by real vLLM, and captured through a hub into files. The rows in the files are compared with those of
Transformers, which computes in float32 from the same weights. One child process runs the engines one after another; it
is replaced if it dies.

In float32, the largest error of any number counts. In a coarser dtype, the median error of a site's rows counts:
rounding may route a token to another expert, which changes its row and the rows that attend to it. A wrong scale
changes every row.
"""

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
from pathlib import Path

from tests.architectures import inside, plain
from tests.kit.sources import ROOT

ERROR_MAX = 1e-5
ROUNDING = {"bfloat16": 2**-8, "float16": 2**-11}
"""The largest relative error of one rounding, by dtype."""
DTYPES = ("float32", *ROUNDING)
ROUNDINGS_MAX = 8
"""The maximum error of a row, in roundings: three layers round about twenty times, and errors add up as a square root.
"""
HOOKS = (
    "pre_attn", "attn_in", "q", "k", "v", "heads", "attn_out", "post_attn", "mlp_in", "router", "neurons", "mlp_out",
    "post_block", "final",
)  # fmt: skip
LENGTHS = (9, 21, 5)
TOKENS = 4
_DIE_S = 240.0


def check(model_type, dtype, hub, root, **arguments):
    """Return the result of one architecture in a dtype: `{"sites": {hook: layers}, "errors": {hook: largest}, …}`.

    arguments: more arguments of the engine.
    """
    if model_type in plain.TYPES:
        return plain.check(model_type, hub, root, LENGTHS, TOKENS, HOOKS)
    import numpy as np
    import torch

    import capflow
    from capflow_engine.compat import model as compat_model
    from tests.architectures import table as architectures
    from tests.kit import engines

    with tempfile.TemporaryDirectory() as directory:
        model = architectures.make(model_type, directory, dtype)
        prompts = engines.prompts(LENGTHS, seed=3)
        hooks = None
        if model_type in architectures.MULTIMODAL:
            arguments["language_model_only"] = True
        if model_type in architectures.HEADED:
            arguments["compilation_config"] = {"custom_ops": ["-rotary_embedding"]}
        arguments |= {"sites": ["*:*"], "dtype": dtype, "max_num_batched_tokens": 64}
        with engines.engine(directory, hub=hub, **arguments) as llm:
            sites = llm.capflow_model.sites
            hooks = {hook: "all" for hook in HOOKS if any(site.hook == hook for site in sites)}
            name = f"{model_type}-{time.time_ns()}"
            params = [
                capflow.sampling_params(id=f"{name}-{n}", capture={"hooks": hooks}, max_tokens=TOKENS, **engines.GREEDY)
                for n in range(len(prompts))
            ]
            outputs = llm.generate(prompts, params, use_tqdm=False)
            loaded = llm.llm_engine.model_executor.driver_worker.worker.get_model()
            layers = dict(compat_model.decoder_layers(loaded, llm.capflow_model.num_layers))
            structures = {n: compat_model.structure_of(layer, getattr(torch, dtype)) for n, layer in layers.items()}
            compat_model.find_final(loaded, layers, structures, getattr(torch, dtype))
            missing = {hook: reason for each in structures.values() for hook, reason in each.missing.items()}
        given = [
            p["prompt_token_ids"] + list(o.outputs[0].token_ids)[:-1] for p, o in zip(prompts, outputs, strict=True)
        ]
    references = architectures.expected(model_type, engines.uncompiled(model), given)
    sums = max(architectures.adds_up(rows, model.config.get_text_config().num_hidden_layers) for rows in references)
    assert sums < 1e-5, f"the reference's names are wrong: its sums are off by {sums:.1e}"
    data = capflow.open(root)
    errors, unproved = {}, set()
    distance = architectures.distance if dtype == "float32" else architectures.usual_distance
    for site in sites:
        if any(tuple(site) not in reference for reference in references):
            if site.hook not in inside.WITHOUT_REFERENCE.get(model_type, ()):
                unproved.add(site.hook)
            continue
        rows = [data[f"{name}-{n}"][tuple(site)].rows for n in range(len(references))]
        rows = [each.reshape(len(each), -1) for each in rows]  # heads are a dimension
        error = distance(*map(np.concatenate, (rows, [reference[tuple(site)] for reference in references])))
        errors[site.hook] = max(errors.get(site.hook, 0.0), error)
    layers = {hook: sum(site.hook == hook for site in sites) for hook in HOOKS}
    return {
        "architecture": type(loaded).__name__, "missing": missing, "sites": layers, "errors": errors,
        "unproved": sorted(unproved), "layers": model.config.get_text_config().num_hidden_layers,
        "bound": architectures.COARSE.get(model_type, 0.0) if dtype == "float32" else 0.0,
    }  # fmt: skip


def child(hub, root):
    """Check the architectures that stdin names, one per line."""
    import torch

    # vLLM's latent attention for AMX takes no float32, and some of its kernels for AMX are wrong: they are not used on
    # any processor.
    torch.cpu._is_amx_tile_supported = lambda: False
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            result = check(*line.split(), hub=hub, root=root)
        except BaseException as e:  # noqa: BLE001 - any failure is this architecture's result
            lines = [text for text in str(e).splitlines() if text.strip()]
            result = {"failed": f"{type(e).__name__}: {lines[-1] if lines else ''}"[:400]}
            traceback.print_exc()
        out.write(json.dumps(result) + "\n")


def _environment():
    """Return an environment in which models of images can be imported."""
    if importlib.util.find_spec("torchvision") is not None:
        return None
    paths = [str(ROOT / "tests" / "kit" / "torchvision_absent"), os.environ.get("PYTHONPATH")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


class Child:
    """A process that checks one architecture after another."""

    def __init__(self, hub, root):
        self.log = Path(os.environ.get("CONFORMANCE_LOG", os.devnull)).open("a")  # noqa: SIM115 - `close` does
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.architectures", "--child", hub, root],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, env=_environment(),
        )  # fmt: skip

    def check(self, model_type, dtype):
        """Return the child's result of an architecture in a dtype; None if the child died."""
        import threading

        timer = threading.Timer(_DIE_S, self.process.kill)
        timer.start()
        try:
            self.process.stdin.write(f"{model_type} {dtype}\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        return json.loads(line) if line else None

    def close(self):
        """End the child."""
        self.process.stdin.close()
        self.process.kill()
        self.process.wait()
        self.log.close()


def run(model_types, dtypes, results, say):
    """Add each architecture's result in each dtype to `results`; other dtypes are tried only if float32 is right."""
    from capflow.transport.hub_process import HubProcess
    from tests.architectures import table as architectures

    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory) / "rows"
        hub = HubProcess([f"filesystem:root={root},capture=requests"])
        hub.start(60)
        children = _Children(hub.address, str(root))
        try:
            for model_type in model_types:
                for dtype in [plain.DTYPE] if model_type in plain.TYPES else dtypes:
                    if dtype == "float32" or model_type in plain.TYPES:
                        results[model_type] = children.check(model_type, dtype)
                    elif model_type in results and passed(results[model_type]):
                        wrong = architectures.WRONG_COARSE.get(model_type)
                        there = {"failed": wrong} if wrong else children.check(model_type, dtype)
                        results[model_type].setdefault("dtypes", {})[dtype] = there
                say(model_type, results.get(model_type, {"failed": "it was not tried in float32"}))
        finally:
            children.close()
            hub.stop()


class _Children:
    """The process that checks; replaced if it dies. A model that fails after others ran is tried in a new process."""

    def __init__(self, *hub):
        self.hub, self.now = hub, None

    def check(self, model_type, dtype):
        """Return the result of an architecture in a dtype."""
        fresh, self.now = self.now is None, self.now or Child(*self.hub)
        result = self.now.check(model_type, dtype) or {"failed": "the engine's process died"}
        if "failed" not in result or "UsageError" in result["failed"]:
            return result
        self.close()  # it may have left an engine behind
        return result if fresh else self.check(model_type, dtype)

    def close(self):
        """End the process."""
        if self.now is not None:
            self.now.close()
            self.now = None


def passed(result, error_max=ERROR_MAX):
    """Return whether an architecture's rows are right at every site that it has, and each was compared.

    Rows that were compared with plain hooks have the same bits.
    """
    if "failed" in result or result["unproved"]:
        return False
    return max(result["errors"].values()) <= max(result.get("bound", 0.0), 0.0 if result.get("plain") else error_max)


def passed_in(result, dtype):
    """Return whether an architecture's rows are right in a dtype coarser than float32 too."""
    there = result.get("dtypes", {}).get(dtype, {"failed": "not tried"})
    return passed(there, ROUNDINGS_MAX * ROUNDING[dtype])


def differs(result, dtype):
    """Return whether an architecture runs in a dtype coarser than float32 and its rows are wrong there."""
    there = result.get("dtypes", {}).get(dtype, {"failed": ""})
    return "failed" not in there and not passed_in(result, dtype)


# --- the matrix ---

BEGIN, END = "<!-- architectures:begin -->", "<!-- architectures:end -->"
MATRIX = ROOT / "docs" / "compatibility.md"

REASONS = (
    (
        r"Model architectures? .*(not supported|was supported)|failed to be inspected: not found",
        "vLLM does not implement it",
    ),
    (r"failed to be inspected", "vLLM cannot import it here"),
    (r"selective_scan_fwd", "vLLM's kernel for its state space does not run on a CPU"),
    (r"[Ss]parse.*(not supported on CPU|no valid sparse MLA)", "vLLM's sparse attention does not run on a CPU"),
    (r"Transformers attention interface", "vLLM's Transformers backend cannot run its token mixing"),
    (
        r"is_act_and_mul=False|no attribute 'set_allocator'|scoring_func == |No module named|Triton|triton",
        "vLLM needs a GPU for it",
    ),
    (r"Can't load image processor", "vLLM's Transformers backend needs its image processor"),
    (r"not supported by MLA", "vLLM's Transformers backend takes a wrong head size for its latent attention"),
    (r"lm_head\.dense", "vLLM's Transformers backend does not know its head"),
    (r"tensor a \(64\) must match the size of tensor b \(192\)", "vLLM's Transformers backend cannot load its experts"),
    (
        r"Unrecognized configuration class|KeyError: 'vllm'|position_ids not found|M-RoPE support is not",
        "vLLM's Transformers backend cannot run it",
    ),
    (r"Cannot find any model weights", "vLLM reads its weights from folders that Transformers does not make"),
    (r"pip install timm", "it needs timm, which is not installed here"),
    (r"cannot find the decoder layers", "capflow refuses it: it runs its layers several times"),
    (r"million parameters", "its configuration cannot be made tiny"),
    (
        r"use another dtype",
        "in this dtype vLLM scales only a part of what its layers add, so its answers are wrong; capflow refuses it",
    ),
    (r"does not support float16", "vLLM refuses it in this dtype"),
    (r"to have the same dtype", "vLLM cannot run it in this dtype"),
    (r"^not tried$", "not run in this dtype"),
    (
        r"(Gemma3n|Qwen4Exp)DecoderLayer: unknown structure",
        "capflow refuses it: its layers pass on several streams side by side, not one of `[tokens, hidden size]`",
    ),
    (r"unknown structure", "capflow refuses it: its layers' output is not their input plus what their modules add"),
    (r"only implemented for topk=1", "vLLM runs only one expert for each of its tokens"),
    (r"AssertionError: $", "vLLM's router on a CPU does not support its scoring function"),
    (r"process died", "vLLM's process crashes on a CPU"),
)
"""The reasons of failures, by a pattern of the failure's text; a text that matches no pattern is shown itself."""


PLAIN = (
    "compared with plain forward hooks in vLLM without capflow, eager, bit for bit: on a CPU, vLLM runs its linear "
    "attention only in bfloat16"
)


def reason_of(result):
    """Return why an architecture is not right in a dtype."""
    if "failed" not in result:
        if result["unproved"]:
            return f"no reference for {', '.join(result['unproved'])}"
        if result.get("plain"):
            return f"rows differ from plain hooks' in {max(result['errors'].values()):.0e} of their numbers"
        return f"rows differ from Transformers' by {max(result['errors'].values()):.0e}, for an unknown reason"
    for pattern, reason in REASONS:
        if re.search(pattern, result["failed"]):
            return reason
    text = re.sub(r"model /\S+: ", "", result["failed"])
    return f"`{text.removeprefix('UsageError: ').replace('`', chr(39))[:160]}`"


def wrapped(text, indent=""):
    """Return a line of the document as lines of at most 118 characters: two spaces may follow, for a line break."""
    return textwrap.fill(text, 118, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def matrix(results, left_out, notes):
    """Return the lines of the table and of the list of architectures that are left out."""
    right = {name: result for name, result in sorted(results.items()) if passed(result)}
    footnotes = []

    def note(text):
        if text not in footnotes:
            footnotes.append(text)
        return f"<sup>{footnotes.index(text) + 1}</sup>"

    right_text = "architectures are right at every layer of each hook point that they have."
    median = f"the median error of a row, at the worst site; it must be below {ROUNDINGS_MAX} roundings of the dtype"
    bounds = ", ".join(f"{ROUNDINGS_MAX * size:.1e} in {dtype}" for dtype, size in ROUNDING.items())
    lines = [
        f"{len(right)} {right_text} The last three columns are errors compared",
        "with Transformers, with the same weights; a note names another reference:",
        "",
        "* float32: the largest error of any number; it must be below 1e-5;",
        f"* bfloat16 and float16: {median}",
        f"  ({bounds}).",
        "",
        "| model type | vLLM's class | " + " | ".join([*(f"`{hook}`" for hook in HOOKS), "float32", *ROUNDING]) + " |",
        "|---|---|" + "---|" * (len(HOOKS) + 1 + len(ROUNDING)),
    ]
    for name, result in right.items():
        cells = []
        for hook in HOOKS:
            count, layers = result["sites"][hook], 1 if hook == "final" else result["layers"]
            reason = note(result["missing"][hook]) if hook in result.get("missing", ()) else ""
            whole = "yes" if hook == "final" else "all"
            cells.append((whole if count == layers else f"{count} of {layers}" if count else "-") + reason)
        architecture = result["architecture"]
        if architecture.startswith("Transformers"):
            architecture = "Transformers backend"
        cells.append("-" if result.get("plain") else f"{max(result['errors'].values()):.0e}")
        if result.get("plain"):
            cells += ["same bits" + note(PLAIN), "-"]
        for dtype in ROUNDING if not result.get("plain") else ():
            there = result.get("dtypes", {}).get(dtype, {"failed": "not tried"})
            right_there = passed_in(result, dtype)
            cells.append(f"{max(there['errors'].values()):.0e}" if right_there else "-" + note(reason_of(there)))
        label = f"{name}{note(notes[name])}" if name in notes else name
        lines.append(f"| {label} | {architecture} | {' | '.join(cells)} |")
    lines += ["", *(wrapped(f"<sup>{number}</sup> {text}.") + "  " for number, text in enumerate(footnotes, 1))]
    reasons = {}
    for name, reason in {
        **{name: reason_of(r) for name, r in results.items() if name not in right},
        **left_out,
    }.items():
        reasons.setdefault(reason, []).append(name)
    lines += ["", "Left out:", ""]
    lines += [
        wrapped(f"* {reason}: {', '.join(sorted(names))}", indent="  ")
        for reason, names in sorted(reasons.items(), key=lambda x: x[1])
    ]
    return lines


def rights(text):
    """Return the model types that a document's table names."""
    table = text.partition(BEGIN)[2].partition(END)[0]
    rows = re.findall(r"^\| ([^|<]+?)(?:<sup>.*?</sup>)? \|", table, re.MULTILINE)
    return {name for name in rows if name != "model type"}


def write(results, left_out, notes):
    """Write the matrix into the document, between its marks."""
    text = MATRIX.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    MATRIX.write_text("\n".join([before + BEGIN, "", *matrix(results, left_out, notes), "", END + after]))


def show(model_type, result):
    """Print the result of an architecture."""
    if "failed" in result:
        print(f"{model_type:22} -      {result['failed']}", flush=True)
        return
    worst = " ".join(f"{hook}:{result['sites'][hook]}:{result['errors'].get(hook, -1):.0e}" for hook in HOOKS)
    for dtype, there in result.get("dtypes", {}).items():
        worst += f" {dtype}:" + (f"{max(there['errors'].values()):.1e}" if "failed" not in there else there["failed"])
    word = "right" if passed(result) else "WRONG"
    print(f"{model_type:22} {word}  {result['architecture']} {worst} {' '.join(result['unproved'])}", flush=True)


def main():
    """Run the proof; return 1 when an architecture that is right in the document no longer is."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model_types", nargs="*")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="a file of results; results in it that are not run again stay")
    parser.add_argument(
        "--write", action="store_true", help="write the matrix of the results into docs/compatibility.md"
    )
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="run in this dtype alone; may be repeated")
    parser.add_argument("--none", action="store_true", help="run nothing; use only the results in --json")
    args = parser.parse_args()
    if args.child:
        child(*args.child)
        return 0
    from tests.architectures import table as architectures

    results = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    before = rights(MATRIX.read_text())

    def say(model_type, result):
        show(model_type, result)
        if args.json:
            args.json.write_text(json.dumps(results, indent=1))

    if not args.none:
        run(args.model_types or architectures.model_types(), args.dtype or DTYPES, results, say)
    tried = set(results) & set(args.model_types or results)
    lost = sorted(name for name in before & tried if not passed(results[name]))
    lost += [
        f"{name} in {dtype}" for name in sorted(before & tried) for dtype in ROUNDING if differs(results[name], dtype)
    ]
    if lost:
        print(f"no longer right, so nothing is written: {', '.join(lost)}", file=sys.stderr)
    elif args.write:
        untried = dict.fromkeys(set(architectures.model_types()) - set(results), "not run for this table")
        write(results, architectures.LEFT_OUT | untried, architectures.NOTES)
    print(f"{sum(map(passed, results.values()))} architectures are right, {len(results)} were tried", flush=True)
    return 1 if lost else 0
