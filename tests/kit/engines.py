"""Tiny random models that real vLLM runs in this process, and what Transformers computes for the same tokens."""

import atexit
import collections
import contextlib
import gc
import os
from collections.abc import Mapping

import numpy as np
import torch
import transformers

VOCABULARY = 300
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
BACKEND = "seed_oss"
"""An architecture like Llama's that vLLM has no class for: its Transformers backend runs it."""
LAYERS, WIDTH = SHAPE["num_hidden_layers"], SHAPE["hidden_size"]


def save_tiny(directory, architecture="llama", **shape):
    """Save a tiny random model with weights large enough that its answers depend on every layer.

    shape: replaces what `SHAPE` has.
    """
    torch.manual_seed(1234)
    if architecture == "gemma3":
        config = transformers.Gemma3TextConfig(**SHAPE, head_dim=32, sliding_window=64)
        model = transformers.Gemma3ForCausalLM(config)
    elif architecture == "mixtral":
        config = transformers.MixtralConfig(**SHAPE, head_dim=32, num_local_experts=4, num_experts_per_tok=2)
        model = transformers.MixtralForCausalLM(config)
    elif architecture == BACKEND:
        model = transformers.SeedOssForCausalLM(transformers.SeedOssConfig(**SHAPE, head_dim=32))
    else:
        config = transformers.LlamaConfig(**SHAPE | shape, head_dim=32)
        model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.15 if "embed" in name else 0.09)
    model.float().save_pretrained(directory)
    return str(directory)


def save_words(directory):
    """Save a tokenizer beside a tiny model: one token for each word `w5` … `w299`."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"<unk>": 0, "<eos>": 1} | {f"w{n}": n for n in range(2, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>")
    fast.save_pretrained(directory)


def prompts(lengths, seed=0):
    """Return prompts of random tokens, one for each length."""
    rng = np.random.default_rng(seed)
    return [{"prompt_token_ids": rng.integers(5, VOCABULARY, n).tolist()} for n in lengths]


@contextlib.contextmanager
def environment(**variables):
    """Set environment variables for as long as a block runs."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


atexit.register(gc.unfreeze)  # what is never freed, Triton's bindings report as leaked at the exit


@contextlib.contextmanager
def collecting_little():
    """Let the garbage collector visit the objects that exist when the block begins once, and no others.

    vLLM starts and ends an engine with nine full collections. Each reads every object of the process, and nearly all
    objects belong to modules: an engine costs half a second of CPU time, and the nine collections cost three seconds
    and more. vLLM's own `gc.freeze` and `gc.unfreeze` do nothing in the block, so the collections read and free only
    the objects of the engine.
    """
    gc.collect()
    gc.freeze()
    freeze, unfreeze = gc.freeze, gc.unfreeze
    gc.freeze = gc.unfreeze = lambda: None
    try:
        yield
    finally:
        gc.freeze, gc.unfreeze = freeze, unfreeze


@contextlib.contextmanager
def engine(model, *, capflow_on=True, in_process=True, **arguments):
    """Yield a `capflow.LLM` (or a plain `vllm.LLM`) on the CPU, in this process unless told otherwise."""
    workers = arguments.get("tensor_parallel_size", 1) * arguments.get("pipeline_parallel_size", 1)
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1" if workers == 2 else "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    with environment(**variables), collecting_little():
        from vllm.distributed import cleanup_dist_env_and_memory

        settings = {
            "dtype": "float32",
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "max_model_len": 256,
            "max_num_batched_tokens": 64,
            "max_num_seqs": 16,
            "kv_cache_memory_bytes": 64 << 20,
        } | arguments
        if capflow_on:
            import capflow

            llm = capflow.LLM(model, **settings)
        else:
            from vllm import LLM

            llm = LLM(model, **settings)
        try:
            yield llm
        finally:
            if capflow_on:
                llm.close()
            else:
                llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()
            cleanup_dist_env_and_memory()


@contextlib.contextmanager
def async_scheduling():
    """Let engines that start in the block schedule steps before the output of earlier ones.

    vLLM's CPU platform turns that off, because it brings nothing there.
    """
    from vllm.platforms import current_platform

    platform = next(each for each in type(current_platform).__mro__ if "check_and_update_config" in vars(each))
    # The descriptor itself: a bound method in its place would lack the class when it is bound again.
    original = platform.__dict__["check_and_update_config"]

    def check(cls, vllm_config):
        original.__get__(None, cls)(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    platform.check_and_update_config = classmethod(check)
    try:
        yield
    finally:
        platform.check_and_update_config = original


@contextlib.contextmanager
def scheduled_ahead(steps):
    """Let engines that start in the block schedule `steps` steps before the output of one is processed.

    Yields a function that makes a started engine of this process run so deep; pipeline stages are deeper than one step.
    """

    def deepen(llm):
        core = llm.llm_engine.engine_core.engine_core
        core.batch_queue_size = steps + 1
        core.batch_queue = collections.deque(maxlen=steps + 1)

    with async_scheduling():
        yield deepen


def save_drafter(model, directory, noise):
    """Save a model with noise in its weights; as a drafter for the model it is right now and then."""
    drafter = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.add_(noise * torch.randn_like(weight))
    drafter.save_pretrained(directory)
    return {"method": "draft_model", "model": str(directory), "num_speculative_tokens": 2}


def vector(seed, norm=6.0):
    """Return a steering vector of the tiny models' width."""
    values = np.random.default_rng(seed).standard_normal(WIDTH).astype(np.float32)
    return norm * values / np.linalg.norm(values)


GREEDY = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}


def answers(outputs):
    """Return the token ids of each answer."""
    return [list(output.outputs[0].token_ids) for output in outputs]


@contextlib.contextmanager
def in_this_process():
    """Have engines run in this process while a block runs."""
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with environment(**variables, VLLM_LOGGING_LEVEL="ERROR"), collecting_little():
        from vllm.distributed import cleanup_dist_env_and_memory

        try:
            yield
        finally:
            cleanup_dist_env_and_memory()


def uncompiled(model):
    """Return a model of Transformers that runs after vLLM's Transformers backend has run one of its class.

    The backend changes the class: it would have vLLM compile the model.
    """
    for module in model.modules():
        module.__dict__.setdefault("do_not_compile", True)
    return model


class Reference:
    """Transformers' hidden states, with vectors added at given positions of given layers."""

    def __init__(self, model, dtype=torch.float32):
        self.model = uncompiled(
            transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="eager").eval()
        )
        self.layers = self.model.model.layers

    def post_block(self, token_ids, steering: Mapping | None = None):
        """Return `[layers, tokens, hidden]` float32: the stream after each layer, before it is steered there.

        steering: `{layer: (vector, first position)}`, added from that position on.
        """
        caught = {}

        def hook_of(number):
            def hook(module, inputs, output):
                hidden = output[0] if isinstance(output, tuple) else output
                caught[number] = hidden[0].detach().float().clone()
                if steering and number in steering:
                    vector, first = steering[number]
                    hidden[0, first:] += torch.as_tensor(vector, dtype=hidden.dtype)

            return hook

        hooks = [layer.register_forward_hook(hook_of(n)) for n, layer in enumerate(self.layers)]
        try:
            with torch.no_grad():
                self.model(torch.tensor([list(token_ids)]), use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        return np.stack([caught[n].numpy() for n in range(len(self.layers))])


def relative_error(got, expected):
    """Return the largest relative error of any row: `|got - expected| / |expected|`, in the 2-norm."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    return float((np.linalg.norm(got - expected, axis=-1) / np.linalg.norm(expected, axis=-1)).max())
