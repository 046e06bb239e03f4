"""Every architecture against Transformers, every hook at every layer: `make conformance` writes docs/compatibility.md's matrix.

    python tests/conformance.py [MODEL_TYPE …] [--write]

Each architecture is a tiny random model, saved, loaded by real vLLM, and captured through a hub into files; the rows that are read
back are compared with Transformers'. Engines take turns in a child process, which is replaced when it dies.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

ERROR_MAX = 1e-5
HOOKS = ("pre_attn", "post_attn", "post_block", "mlp_in", "mlp_out")
LENGTHS = (9, 21, 5)
TOKENS = 4
_DIE_S = 240.0


def check(model_type, hub, root):
    """Return what was found of one architecture: `{"hooks": {hook: layers}, "error": largest, …}`."""
    import architectures
    import engines

    import capflow

    with tempfile.TemporaryDirectory() as directory:
        model = architectures.make(model_type, directory)
        prompts = engines.prompts(LENGTHS, seed=3)
        hooks = None
        only = {"language_model_only": True} if model_type in architectures.MULTIMODAL else {}
        with engines.engine(directory, hub=hub, sites=["*:*"], max_num_batched_tokens=64, **only) as llm:
            found = llm.capflow_model.sites
            hooks = {hook: "all" for hook in HOOKS if any(site.hook == hook for site in found)}
            name = f"{model_type}-{time.time_ns()}"
            params = [
                capflow.sampling_params(
                    id=f"{name}-{n}", capture={"hooks": hooks}, max_tokens=TOKENS, **engines.GREEDY
                )
                for n in range(len(prompts))
            ]
            outputs = llm.generate(prompts, params, use_tqdm=False)
            architecture = type(llm.llm_engine.model_executor.driver_worker.worker.get_model()).__name__
            layer = sorted({type(x).__name__ for _, x in _layers(llm)})
        given = [p["prompt_token_ids"] + list(o.outputs[0].token_ids)[:-1] for p, o in zip(prompts, outputs, strict=True)]
    for module in model.modules():  # vLLM's Transformers backend changes classes in its process
        module.__dict__.setdefault("do_not_compile", True)
    references = architectures.expected(model_type, model, given)
    sums = max(architectures.adds_up(rows, model.config.get_text_config().num_hidden_layers) for rows in references)
    assert sums < 1e-5, f"the reference's names are wrong: its sums are off by {sums:.1e}"
    data = capflow.open(root)
    errors, unproved = {}, set()
    for n, reference in enumerate(references):
        request = data[f"{name}-{n}"]
        for site in found:
            if tuple(site) not in reference:
                unproved.add(site.hook)
                continue
            error = architectures.distance(request[tuple(site)].rows, reference[tuple(site)])
            errors[site.hook] = max(errors.get(site.hook, 0.0), error)
    layers = {hook: sum(site.hook == hook for site in found) for hook in HOOKS}
    return {
        "architecture": architecture, "layer": layer, "sites": layers, "errors": errors, "unproved": sorted(unproved),
        "layers": model.config.get_text_config().num_hidden_layers, "class": type(model).__name__,
    }  # fmt: skip


def _layers(llm):
    from capflow_engine import compat

    model = llm.llm_engine.model_executor.driver_worker.worker.get_model()
    return compat.decoder_layers(model, llm.capflow_model.num_layers)


def child(hub, root):
    """Check the architectures that come in, a line each."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            found = check(line.strip(), hub, root)
        except BaseException as e:  # noqa: BLE001 - whatever it is, it is this architecture's answer
            lines = [text for text in str(e).splitlines() if text.strip()]
            found = {"failed": f"{type(e).__name__}: {lines[-1] if lines else ''}"[:400]}
            traceback.print_exc()
        out.write(json.dumps(found) + "\n")


class Child:
    """A process that checks one architecture after another."""

    def __init__(self, hub, root):
        self.log = Path(os.environ.get("CONFORMANCE_LOG", os.devnull)).open("a")
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--child", hub, root],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True,
        )  # fmt: skip

    def check(self, model_type):
        """Return what the child found of an architecture; None when it died of it."""
        import threading

        timer = threading.Timer(_DIE_S, self.process.kill)
        timer.start()
        try:
            self.process.stdin.write(model_type + "\n")
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


def run(model_types, say):
    """Return what was found of each architecture."""
    from capflow.launch import HubProcess

    found = {}
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory) / "rows"
        hub = HubProcess([f"filesystem:root={root},capture=requests"])
        hub.start(60)
        worker = None
        try:
            for model_type in model_types:
                worker = worker or Child(hub.address, str(root))
                result = worker.check(model_type)
                if result is None:
                    worker.close()
                    worker = None
                    result = {"failed": "the engine's process died"}
                found[model_type] = result
                say(model_type, result)
        finally:
            if worker is not None:
                worker.close()
            hub.stop()
    return found


def passed(result):
    """Return whether an architecture's rows are right at every site that it has, and each was compared."""
    return "failed" not in result and not result["unproved"] and max(result["errors"].values()) <= ERROR_MAX


def show(model_type, result):
    """Print what was found of an architecture."""
    if "failed" in result:
        print(f"{model_type:22} -      {result['failed']}", flush=True)
        return
    worst = " ".join(f"{hook}:{result['sites'][hook]}:{result['errors'].get(hook, -1):.0e}" for hook in HOOKS)
    word = "right" if passed(result) else "WRONG"
    print(f"{model_type:22} {word}  {result['architecture']} {worst} {' '.join(result['unproved'])}", flush=True)


def main():
    """Run the conformance proof; return 0 when every architecture is right or is known to be left out."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model_types", nargs="*")
    parser.add_argument("--child", nargs=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.child:
        child(*args.child)
        return 0
    import architectures

    def say(model_type, result):
        show(model_type, result)
        if args.json:
            before = json.loads(args.json.read_text()) if args.json.exists() else {}
            args.json.write_text(json.dumps(before | {model_type: result}, indent=1))

    found = run(args.model_types or architectures.model_types(), say)
    return 0


if __name__ == "__main__":
    sys.exit(main())
