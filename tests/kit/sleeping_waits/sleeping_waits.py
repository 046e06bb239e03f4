"""A plugin of vLLM that has processes of an engine sleep while they wait for each other; for tests only.

vLLM calls `sched_yield` in a loop instead. Under Linux 6.18, where all cores were busy, a process that woke then got no
core for up to six seconds: a hub answered after the request that an action was meant for.
"""

from vllm.distributed import utils


def register():
    assert hasattr(utils, "USE_SCHED_YIELD"), "vLLM has another switch, or waits otherwise"
    utils.USE_SCHED_YIELD = False
