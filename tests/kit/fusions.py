"""Counts the fusions of all-reduce and norm that vLLM finds in the graph of a tiny Llama with taps; a script.

    python tests/kit/fusions.py MODEL < [[hooks, hooks that are not steered], …] as JSON

The patterns are vLLM's own. They need two ranks, FlashInfer, and CUDA's custom ops. Here one rank takes itself for two,
an op without an implementation stands for FlashInfer's, and the model lies on the meta device: only its graph is made,
in the way of vLLM's backend, and nothing runs.
"""

import json
import sys
import types

import torch
from torch._functorch.aot_autograd import aot_module_simplified
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import remove_noop_ops
from torch._inductor.pattern_matcher import PatternMatcherPass
from torch._subclasses.fake_tensor import FakeTensorMode

from capflow.capture.model import ModelInfo
from capflow.capture.site import Site
from capflow_engine.compat import model as compat_model
from capflow_engine.steering.budget import Size
from capflow_engine.taps.bank import Bank
from capflow_engine.taps.tables import Tables
from capflow_engine.taps.tap import Tap, install

META = torch.device("meta")
TOKENS = 8


class GraphMadeError(Exception):
    """The graph is all that is wanted."""


def fused(
    allreduce_in: torch.Tensor,
    residual: torch.Tensor,
    rms_gamma: torch.Tensor,
    rms_eps: float,
    world_size: int,
    launch_with_pdl: bool,
    fp32_acc: bool,
    max_token_num: int,
    pattern_code: int,
    norm_out: torch.Tensor | None = None,
    quant_out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    scale_factor: torch.Tensor | None = None,
    weight_bias: float = 0.0,
) -> None:
    """Stand for FlashInfer's all-reduce and norm; never called."""


def patterns(epsilon):
    """Return vLLM's pass with the patterns of models that are not quantised."""
    from vllm.utils.torch_utils import direct_register_custom_op

    for name in (
        "rms_norm_static_fp8_quant",
        "fused_add_rms_norm_static_fp8_quant",
        "rms_norm_dynamic_per_token_quant",
    ):
        if not hasattr(torch.ops._C, name):
            setattr(torch.ops._C, name, types.SimpleNamespace(default=None))
    from vllm.compilation.passes.fusion import allreduce_rms_fusion as theirs

    name = "flashinfer_trtllm_fused_allreduce_norm"
    direct_register_custom_op(name, fused, ["allreduce_in", "residual", "norm_out", "quant_out", "scale_out"])
    theirs.flashinfer_trtllm_fused_allreduce_norm = getattr(torch.ops.vllm, name).default
    theirs.flashinfer_comm = types.SimpleNamespace(AllReduceFusionPattern=types.SimpleNamespace(kARResidualRMSNorm=1))
    matcher = PatternMatcherPass("all_reduce_fusion_pass")
    parameters = theirs.FlashInferFusedAllReduceParams(2, TOKENS)
    with FakeTensorMode():
        for pattern in (theirs.AllReduceRMSNormPattern, theirs.AllReduceFusedAddRMSNormPattern):
            pattern(epsilon, torch.bfloat16, "meta", parameters).register(matcher)
    return matcher


def tapped_model(config, hooks, fixed):
    """Return a model of a configuration with taps at these hooks of all layers."""
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config.compilation_config.static_forward_context.clear()
    with META, set_default_torch_dtype(torch.bfloat16):
        model = initialize_model(config)
    for module in model.modules():
        module.cpu_linear = torch.nn.functional.linear  # which the CPU's linear layers get with their weights
    text = config.model_config
    layers, width = text.get_total_num_hidden_layers(), text.get_hidden_size()
    sites = tuple(Site(n, hook) for n in range(layers) for hook in hooks)
    info = ModelInfo("tiny", layers, width, "bfloat16", sites, fixed=tuple(s for s in sites if s.hook in fixed))
    sizes = {"sites": max(1, len(sites)), "tokens": TOKENS, "rows": TOKENS, "hidden": width, "requests": TOKENS}
    tables = Tables(**sizes, dtype=torch.bfloat16, device=META, resident=False)
    bank = Bank(Size(2, 4, 2), {site: n for n, site in enumerate(sites)}, width, META)
    for n, (site, module, place) in enumerate(compat_model.owned_sites(model, info, torch.bfloat16)):
        install(module, site.hook, place, Tap(n, place, tables, bank, META))
    return model.model


def graph_of(config, model):
    """Return the functional graph of a model, as vLLM's passes get it."""
    from vllm.compilation.passes.inductor_pass import pass_context
    from vllm.compilation.passes.ir.inplace_functionalization import VllmIRInplaceFunctionalizationPass
    from vllm.config.utils import Range

    graphs = []

    def keep(module, inputs):
        remove_noop_ops(module.graph)
        graphs.append(module.graph)
        raise GraphMadeError

    def backend(module, inputs):
        with pass_context(Range(1, TOKENS)):
            VllmIRInplaceFunctionalizationPass(config)(module.graph)
        module.recompile()
        return aot_module_simplified(module, inputs, fw_compiler=keep, decompositions=select_decomp_table())

    torch._dynamo.reset()
    ids, positions = (torch.zeros(TOKENS, dtype=dtype, device=META) for dtype in (torch.int32, torch.int64))
    try:
        with torch.no_grad():
            torch.compile(model.forward, backend=backend, fullgraph=True)(ids, positions, None)
    except Exception:
        if not graphs:
            raise
    return graphs[0]


def main():
    """Count, and print for each case the number of taps in the graph and of fusions."""
    import vllm.ir.op
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.network_utils import get_open_port

    arguments = EngineArgs(model=sys.argv[1], dtype="bfloat16", skip_tokenizer_init=True, max_model_len=64)
    config = arguments.create_engine_config()
    vllm.ir.op.set_default_torch_wrap(True)  # as on a GPU
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(1, 0, f"tcp://127.0.0.1:{get_open_port()}", 0, "gloo")
        parallel_state.ensure_model_parallel_initialized(1, 1)
        group = parallel_state.get_tp_group()
        group.world_size, group.use_custom_op_call = 2, True
        matcher = patterns(config.model_config.hf_text_config.rms_norm_eps)
        for hooks, fixed in json.load(sys.stdin):
            graph = graph_of(config, tapped_model(config, hooks, fixed))
            taps = sum("capflow" in str(node.args[:1]) for node in graph.nodes if node.op == "call_function")
            print("counted", json.dumps([taps, matcher.apply(graph)]), flush=True)


if __name__ == "__main__":
    main()
