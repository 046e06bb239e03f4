"""A plugin of vLLM that lets replicas of a mixture of experts exchange tokens on CPUs; for tests only.

vLLM's communicator for CPUs lacks the two collectives of data-parallel experts, so these replicas run on GPUs only.
"""

import torch.distributed as dist
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


def gather(self, tensors, dim=0, sizes=None):
    """Return the rows of all ranks, in their order. sizes: how many rows each rank has; by default, as many as this."""
    assert dim == 0
    if isinstance(tensors, list):
        return [gather(self, tensor, dim, sizes) for tensor in tensors]
    sizes = [len(tensors)] * self.world_size if sizes is None else sizes
    whole = tensors.new_zeros((sum(sizes), *tensors.shape[1:]))
    start = sum(sizes[: self.rank_in_group])
    whole[start : start + len(tensors)] = tensors  # zeros elsewhere, so the sum is all rows
    dist.all_reduce(whole, group=self.device_group)
    return whole


def scatter(self, tensor, dim=0, sizes=None):
    """Return this rank's rows of the sum over all ranks."""
    assert dim == 0
    sizes = [len(tensor) // self.world_size] * self.world_size if sizes is None else sizes
    whole = tensor.clone()
    dist.all_reduce(whole, group=self.device_group)
    start = sum(sizes[: self.rank_in_group])
    return whole[start : start + sizes[self.rank_in_group]].clone()


def register():
    assert "all_gatherv" not in vars(CpuCommunicator), "vLLM has it now: remove this plugin"
    CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = gather, scatter
