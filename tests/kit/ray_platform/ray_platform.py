"""A platform of vLLM that lets Ray start workers on CPUs; for tests only.

vLLM's platform for CPUs names no resource of Ray's, so its executor on Ray refuses to start there. This one differs
in nothing else: a worker takes a "GPU" that a node of Ray's says to have, and runs on the CPU.
"""

from vllm.platforms.cpu import CpuPlatform


class RayCpuPlatform(CpuPlatform):
    """The platform for CPUs, for workers that each hold one GPU of Ray's."""

    ray_device_key = "GPU"


def register():
    """Return the name of the platform, which vLLM imports."""
    assert not CpuPlatform.ray_device_key, "vLLM has it now: remove this plugin"
    return "ray_platform.RayCpuPlatform"
