"""vLLM's offloading connector on a CPU: its own keys, lookups and jobs, with a worker here that copies the blocks.

vLLM's worker copies between a GPU and the host; nothing else of the connector needs a GPU.
"""

import torch
from vllm.config import KVTransferConfig
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from capflow_engine.compat import connectors


def offloading():
    """Return the argument of an engine that offloads, and have capflow allow it."""
    connectors.SPECS.add("CopyingSpec")
    extra = {"spec_name": "CopyingSpec", "spec_module_path": __name__, "cpu_bytes_to_use": 64 << 20}
    config = KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_connector_extra_config={**extra, "offload_prompt_only": False},
    )
    return {"kv_transfer_config": config}


class CopyingSpec(CPUOffloadingSpec):
    """vLLM's offloading to the host, with a worker that runs on a CPU."""

    def get_worker(self, kv_caches):
        """Return the worker, which has room for every chunk that the manager may name."""
        if self._worker is None:
            assert self.blocks_per_chunk == 1
            self._worker = Copying([each.tensor for each in kv_caches.tensors], self.num_chunks)
        return self._worker


class Copying(OffloadingWorker):
    """Copies blocks at once."""

    def __init__(self, tensors, chunks):
        self._tensors = tensors
        self._stored = [torch.zeros((chunks, *tensor.shape[1:]), dtype=tensor.dtype) for tensor in tensors]
        self._finished = []

    def submit_store(self, job_id, src_spec, dst_spec):
        """Copy blocks of the cache to chunks."""
        return self._copy(job_id, self._tensors, src_spec.block_ids, self._stored, dst_spec.block_ids)

    def submit_load(self, job_id, src_spec, dst_spec):
        """Copy chunks to blocks of the cache."""
        return self._copy(job_id, self._stored, src_spec.block_ids, self._tensors, dst_spec.block_ids)

    def _copy(self, job_id, sources, taken, targets, given):
        for source, target in zip(sources, targets, strict=True):
            target[torch.as_tensor(given.astype("int64"))] = source[torch.as_tensor(taken.astype("int64"))]
        self._finished.append(TransferResult(job_id, success=True, transfer_size=1, transfer_time=1e-9))
        return True

    def get_finished(self):
        """Return the copies since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids):
        """Return: every copy is done."""
