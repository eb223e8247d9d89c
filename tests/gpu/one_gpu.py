# SPDX-License-Identifier: Apache-2.0
"""Several ranks on one GPU: a worker that always takes device 0 (NCCL 2.30 with ``NCCL_MULTI_RANK_GPU_ENABLE=1``)."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker


class OneGPUWorker(Worker):
    """Stock's worker on device 0, whatever its rank."""

    def init_device(self) -> None:
        self.local_rank = 0
        super().init_device()
