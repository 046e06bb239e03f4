"""The cost of serving with capflow: `vllm serve` against `capflow serve` with the same flags.

    python benchmarks/serving.py [--model demo | llama-3-8b | PATH] [--rounds N] [--json FILE] [--quick]
                                 [--engine-arg gpu_memory_utilization=0.4]

The load generator is vLLM's own. Both servers live for the whole run, and so does a hub whose `filesystem` consumer
writes the captures. Each turn is one run of `vllm bench serve`: random prompts of a fixed length, fixed answers,
`ignore_eos`, a number of requests at a time, no prefix cache. Turns interleave, forth and back. Turns of one half round
send the same prompts, so a ratio is of adjacent turns.

* `plain`: vLLM. `idle`: capflow that is asked for nothing.
* `steered`: every request at every tapped site, by a module that is registered under a name.
* `captured`: every site and position of every request to disk. The clock is that of the clients, who do not wait for
  the disk. The next turn waits for it, and checks every file. `overhead.py` has the disk in the clock.
* `inline`, beside `plain alone`: one request at a time with answers of two tokens, for the time to the first token.
  Each body brings the vectors of all sites, always the same; `steering_ttft.py` sends new ones with each request.

`llama-3-8b` is that model's shape with random weights and a tokenizer of made-up words, so nothing is downloaded. Two
of them fit one GPU of 80 GiB or more, each with its share of the memory. `--quick` is for a GPU that is lent for
minutes: shorter prompts and answers, two rounds, few CUDA graphs. The report has a verdict on each goal; a missed goal
is no failure. A run that is ended with SIGTERM reports the turns that it has.

Predicted, on a GPU: idle 1 launch for each tap, below 1 %; steered 3 %, because the stream is read and written once
more at each layer; inline 3 ms.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import gc
import http.client
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from overhead import ratio_of
from steering_ttft import end_of, free_port, wait_for

from capflow.steering.report import GOALS, TURNS_MIN

MODULE = "benchmark"
BACKEND = "openai"
BODY_MAX = 500
"""The characters of an error that are shown."""
CAPTURE = {"hooks": {"post_block": "all"}, "positions": "all"}
ALONE_TOKENS, ALONE_PROMPTS_MAX = 2, 16
INLINE_MS_MAX = 5.0
DISK_WAIT_S = 60
"""How long a captured request may take after the one before it."""
QUICK: dict[str, Any] = {"input_len": 256, "output_len": 64, "num_prompts": 64, "rounds": 2}
QUICK_SEQUENCES = 64
"""Of both servers: a step has no more requests, so vLLM captures CUDA graphs for few sizes."""
VOCABULARY = 128_256
LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": VOCABULARY, "max_position_embeddings": 8192, "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16",
}  # fmt: skip


class Mode(NamedTuple):
    """What a turn asks for.

    server: which server it goes to.
    goal: the smallest ratio to plain, or None.
    alone: whether there is one request at a time.
    """

    server: str
    goal: float | None = None
    alone: bool = False


MODES = {
    "plain": Mode("plain"),
    "idle": Mode("capflow", GOALS["idle"]),
    "steered": Mode("capflow", GOALS["steered"]),
    "captured": Mode("capflow"),
    "plain alone": Mode("plain", alone=True),
    "inline": Mode("capflow", alone=True),
}


def save_shape(directory: Path) -> None:
    """Save the configuration of an 8B Llama 3 without weights, and a tokenizer with one made-up word for each token."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(LLAMA_3_8B))
    # The longest is longer than a word and a space: vLLM refuses a prompt of more characters than that many for each
    # token that fits.
    words = {"<begin-of-text>": 0, "<eos>": 1} | {f"w{n}": n for n in range(2, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.add_special_tokens({"bos_token": "<begin-of-text>", "eos_token": "<eos>"})
    fast.save_pretrained(directory)


class Process:
    """A child process and its log."""

    def __init__(self, name: str, arguments: list[str], directory: Path, environment: dict[str, str]) -> None:
        self.log = directory / f"{name}.log"
        with self.log.open("w") as log:
            command = [sys.executable, *arguments]
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)

    def close(self) -> None:
        """End it."""
        self.process.terminate()
        self.process.wait(120)


class Server(Process):
    """An OpenAI server."""

    def __init__(self, name: str, arguments: list[str], directory: Path, environment: dict[str, str]) -> None:
        self.port = free_port()
        address = ["--host", "127.0.0.1", "--port", str(self.port)]
        super().__init__(name, [*arguments, *address], directory, environment)

    def wait(self) -> None:
        """Return once it answers."""
        wait_for(self.process, self.port, self.log)

    def ask(self, path: str, body: dict[str, Any] | None = None, status: int = 200) -> dict[str, Any]:
        """Return the answer of a route; end the program when its status is another one."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            data = None if body is None else json.dumps(body)
            connection.request("GET" if body is None else "POST", path, data, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        if answer.status != status:
            sys.exit(f"serving: {path} answered {answer.status} and not {status}: {content[:500]!r}")
        return dict(json.loads(content))


def serve(arguments: list[str]) -> None:
    """Be `vllm serve`, in the way of `capflow serve`.

    vLLM's own command needs a distribution named vllm, which its CPU build is not.
    """
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # as vLLM's own command does
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    command = ServeSubcommand()
    command.subparser_init(parser.add_subparsers(required=True))
    args = parser.parse_args(["serve", *arguments])
    command.validate(args)
    command.cmd(args)


def load(arguments: list[str]) -> None:
    """Be `vllm bench serve` once for each line read, and answer with its result.

    A line has the arguments, and the extra body, which is too long to be an argument.
    """
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from vllm.benchmarks.serve import ASYNC_REQUEST_FUNCS, add_cli_args, main
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    ASYNC_REQUEST_FUNCS[BACKEND] = explaining(ASYNC_REQUEST_FUNCS[BACKEND])
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    for line in sys.stdin:
        turn = json.loads(line)
        args = parser.parse_args([*arguments, *turn["arguments"]])
        args.extra_body = turn["body"]
        out.write(json.dumps(main(args)) + "\n")
        gc.unfreeze()  # each run freezes all objects, also the tokenizer of the run before
        gc.collect()


def explaining(ask: Callable[..., Any]) -> Callable[..., Any]:
    """Return a request function of vLLM's load generator whose errors have the answer's body, not its reason alone."""

    class Session:
        def __init__(self, session: Any) -> None:
            self.session = session

        @contextlib.asynccontextmanager
        async def post(self, **request: Any) -> AsyncIterator[Any]:
            async with self.session.post(**request) as answer:
                if answer.status == 200:
                    yield answer
                else:
                    reason = f"{answer.status}: {(await answer.text())[:BODY_MAX]}"
                    yield SimpleNamespace(status=answer.status, reason=reason)

    async def asked(session: Any, **arguments: Any) -> Any:
        return await ask(session=Session(session), **arguments)

    return asked


CHILDREN = {"serve": serve, "load": load}


def bodies(server: Server) -> dict[str, dict[str, Any]]:
    """Register the module, and return the extra fields of each mode's requests."""
    import numpy as np

    tapped = server.ask("/v1/steering/layers")
    layers = [int(layer) for layer, state in tapped["layers"].items() if "post_block" in state["hook_points"]]
    rows = (0.01 * np.random.default_rng(0).standard_normal((len(layers), tapped["hidden_size"]))).astype(np.float16)
    packed = {"dtype": "float16", "shape": list(rows.shape), "layer_indices": layers}
    vectors = {"post_block": packed | {"data": base64.b64encode(rows.tobytes()).decode()}}
    server.ask("/v1/steering/modules", {"name": MODULE, "vectors": vectors})
    # A server that does not read the fields would answer every mode as it answers `plain`.
    server.ask("/v1/completions", {"prompt": "w5", "max_tokens": 1, "steering_name": "no such module"}, status=404)
    print(f"vectors for {rows.shape[0]} layers x {rows.shape[1]}", file=sys.stderr, flush=True)
    return {
        "steered": {"steering_name": MODULE},
        "captured": {"capture": CAPTURE},
        "inline": {"steering_vectors": vectors},
    }


class Load:
    """The load generator, in a process of its own.

    directory: where its log and the captured rows lie.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        model: str,
        servers: dict[str, Server],
        directory: Path,
        environment: dict[str, str],
    ) -> None:
        self.args, self.servers, self.directory = args, servers, directory
        self.bodies = bodies(servers["capflow"])
        command = [
            sys.executable, __file__, "load", "--model", model, "--backend", BACKEND, "--dataset-name", "random",
            "--random-input-len", str(args.input_len), "--temperature", "0", "--ignore-eos", "--disable-tqdm",
        ]  # fmt: skip
        with (directory / "load.log").open("w") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
            )

    def turn(self, mode: str, seed: int) -> dict[str, float]:
        """Run one turn and return its measurements; end the program when a request failed."""
        args, alone = self.args, MODES[mode].alone
        prompts = min(args.num_prompts, ALONE_PROMPTS_MAX) if alone else args.num_prompts
        tokens = ALONE_TOKENS if alone else args.output_len
        flags = {
            "port": self.servers[MODES[mode].server].port, "seed": seed, "num-prompts": prompts,
            "random-output-len": tokens, "max-concurrency": 1 if alone else args.concurrency,
        }  # fmt: skip
        result = self.ask([f"--{name}={value}" for name, value in flags.items()], self.bodies.get(mode))
        if result["completed"] != prompts or result["total_output_tokens"] != prompts * tokens:
            errors = "\n".join(sorted({error for error in result["errors"] if error})[:3])
            tokens_of = f"{result['total_output_tokens']} of {prompts * tokens} tokens"
            sys.exit(f"serving: {mode}: {result['completed']} of {prompts} requests answered, {tokens_of}\n{errors}")
        if mode == "captured":
            self.settle(prompts)
        names = {"s": "duration", "tok/s": "output_throughput", "tpot": "median_tpot_ms", "ttft": "median_ttft_ms"}
        return {name: result[field] for name, field in names.items()}

    def ask(self, arguments: list[str], body: dict[str, Any] | None) -> dict[str, Any]:
        """Return the result of one run."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"arguments": arguments, "body": body}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"serving: the load generator ended:\n{end_of(self.directory / 'load.log')}")
        return dict(json.loads(line))

    def close(self) -> None:
        """End the child."""
        self.process.terminate()
        self.process.wait(60)

    def settle(self, requests: int) -> None:
        """Wait until the captures of a turn are on disk, check all of them, and remove them."""
        import capflow

        root, last, deadline = self.directory / "rows", 0, time.monotonic() + DISK_WAIT_S
        while (count := len(data := capflow.open(root))) < requests:
            if count > last:
                last, deadline = count, time.monotonic() + DISK_WAIT_S
            if time.monotonic() > deadline:
                log = end_of(self.directory / "hub.log")
                sys.exit(f"serving: {count} of {requests} captured requests on disk, none in {DISK_WAIT_S} s:\n{log}")
            time.sleep(0.2)
        data.verify()
        size = sum(request[site].rows.nbytes for request in data for site in request.sites)
        print(f"captured: {size / 1e6:.0f} MB, each file verified", file=sys.stderr, flush=True)
        for directory in root.glob("[!.]*"):  # the consumer holds the root itself
            shutil.rmtree(directory)


def verdict(values: list[float], goal: float | None, *, most: bool = False) -> str:
    """Return a goal and whether it is met, as far as the middle half of the turns agree.

    most: whether the goal is the largest value rather than the smallest.
    """
    if goal is None:
        return ""
    if len(values) < TURNS_MIN:
        return f"{goal:g}: too few turns to tell"
    low, _, high = (value - goal for value in statistics.quantiles(values, n=4))
    worst, best = (-high, -low) if most else (low, high)
    return f"{goal:g}: {'met' if worst >= 0 else 'missed' if best < 0 else 'too noisy to tell'}"


def report(turns: dict[str, list[dict[str, float]]]) -> None:
    """Print the results."""

    def column(mode: str, name: str) -> list[float]:
        return [turn[name] for turn in turns[mode]]

    print("| mode | tok/s | of plain | quartiles | goal | TPOT ms | plain's to it | quartiles | TTFT ms |")
    print("|---|---|---|---|---|---|---|---|---|")
    for mode in (mode for mode in turns if not MODES[mode].alone):
        plain, own = column("plain", "s"), column(mode, "s")
        ratio, quartiles = ratio_of(plain, own)
        goal = verdict([p / m for p, m in zip(plain, own, strict=True)], MODES[mode].goal)
        token_ratio, token_quartiles = ratio_of(column("plain", "tpot"), column(mode, "tpot"))
        rate, tpot, ttft = (statistics.median(column(mode, name)) for name in ("tok/s", "tpot", "ttft"))
        print(
            f"| {mode} | {rate:.0f} | {ratio:.3f} | {quartiles} | {goal} "
            f"| {tpot:.2f} | {token_ratio:.3f} | {token_quartiles} | {ttft:.1f} |"
        )
    if "inline" in turns:
        plain, own = column("plain alone", "ttft"), column("inline", "ttft")
        added = [m - p for p, m in zip(plain, own, strict=True)]
        low, middle, high = statistics.quantiles(added, n=4) if len(added) > 1 else added * 3
        print(
            f"\none request at a time: TTFT {statistics.median(plain):.1f} ms, "
            f"with inline vectors {statistics.median(own):.1f} ms; "
            f"added {middle:.1f} ms ({low:.1f}..{high:.1f}; goal at most {verdict(added, INLINE_MS_MAX, most=True)})"
        )


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="demo", help="demo, llama-3-8b (its shape, without weights) or a directory")
    parser.add_argument("--dtype", default="auto", help="float32 is faster on a CPU without AVX-512")
    parser.add_argument("--load-format", default=None, help="dummy for random weights, as llama-3-8b has")
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--num-prompts", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3, help="two turns of each mode")
    parser.add_argument("--quick", action="store_true", help="smaller defaults, for a few minutes on a GPU")
    parser.add_argument("--modes", nargs="+", choices=[m for m in MODES if not m.startswith("plain")], default=None)
    parser.add_argument("--engine-arg", action="append", default=[], metavar="NAME[=VALUE]", help="of both servers")
    parser.add_argument("--json", type=Path)
    if "--quick" in arguments:
        parser.set_defaults(**QUICK)
    return parser.parse_args(arguments)


def environment_in(directory: Path) -> dict[str, str]:
    """Return the environment of all child processes, whose sockets are in a directory."""
    (directory / "run").mkdir(mode=0o700)
    quiet = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    return quiet | offline | os.environ | {"XDG_RUNTIME_DIR": str(directory / "run")}


def start(
    args: argparse.Namespace, model: str, directory: Path, environment: dict[str, str], stack: contextlib.ExitStack
) -> dict[str, Server]:
    """Start the hub and both servers, one after another, so that each sees the memory that the one before left.

    stack: ends them.
    """
    flags = [model, "--dtype", args.dtype, "--max-model-len", str(args.input_len + args.output_len + 64)]
    flags += ["--no-enable-prefix-caching"]
    if (form := args.load_format or ("dummy" if args.model == "llama-3-8b" else None)) is not None:
        flags += ["--load-format", form]
    if args.quick:
        flags += ["--max-num-seqs", str(max(QUICK_SEQUENCES, args.concurrency))]
    for given in args.engine_arg:
        name, equals, value = given.partition("=")
        flags.append(f"--{name.lstrip('-').replace('_', '-')}{equals}{value}")
    consumer = f"filesystem:root={directory / 'rows'},capture=requests"
    hub = Process("hub", ["-m", "capflow", "run", "--consumer", consumer], directory, environment)
    stack.callback(hub.close)
    servers: dict[str, Server] = {}
    for name, program in (("plain", [__file__]), ("capflow", ["-m", "capflow"])):
        servers[name] = Server(name, [*program, "serve", *flags], directory, environment)
        stack.callback(servers[name].close)
        begin = time.monotonic()
        servers[name].wait()
        print(f"{name}: answers after {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    return servers


def main() -> int:
    """Run the benchmark and print its table."""
    if (child := CHILDREN.get("".join(sys.argv[1:2]))) is not None:
        child(sys.argv[2:])
        return 0
    args = parse(sys.argv[1:])
    directory = Path(tempfile.mkdtemp(prefix="capflow-bench-"))
    model = args.model
    if model == "demo":
        from capflow_engine.jobs.demo import prepare

        model = str(prepare())
    elif model == "llama-3-8b":
        model = str(directory / model)
        save_shape(Path(model))
    asked = args.modes or list(MODES)
    modes = [mode for mode in MODES if mode in {"plain", *asked} or (mode == "plain alone" and "inline" in asked)]
    turns: dict[str, list[dict[str, float]]] = {mode: [] for mode in modes}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no server outlives this
    with contextlib.ExitStack() as stack:
        environment = environment_in(directory)
        servers = start(args, model, directory, environment, stack)
        generator = Load(args, model, servers, directory, environment)
        stack.callback(generator.close)
        stack.callback(summary, args, model, turns)  # runs first, also for a run that was ended
        for half in range(-1, 2 * args.rounds):  # the first warms up
            for mode in modes if half % 2 else reversed(modes):
                result = generator.turn(mode, half + 1)
                print(f"{mode}: {result['s']:.1f} s", file=sys.stderr, flush=True)
                if half >= 0:
                    turns[mode].append(result)
                    if args.json is not None:
                        args.json.write_text(json.dumps(turns))
    shutil.rmtree(directory)
    return 0


def summary(args: argparse.Namespace, model: str, turns: dict[str, list[dict[str, float]]]) -> None:
    """Print the results of the turns in which every mode had its own."""
    whole = min(map(len, turns.values()))
    print(
        f"\n{args.num_prompts} prompts x {args.input_len} tokens + {args.output_len} generated, "
        f"{args.concurrency} at a time, "
        f"{Path(model).name}, {whole} turns each, interleaved"
    )
    if whole:
        report({mode: values[:whole] for mode, values in turns.items()})


if __name__ == "__main__":
    sys.exit(main())
