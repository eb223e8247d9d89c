# SPDX-License-Identifier: Apache-2.0
"""Several ranks on one GPU: a worker that shares devices (NCCL 2.30 with ``NCCL_MULTI_RANK_GPU_ENABLE=1``)."""

from __future__ import annotations

import torch
from vllm.v1.worker.gpu_worker import Worker


class OneGPUWorker(Worker):
    """Stock's worker, with ranks dealt out over too few devices."""

    def init_device(self) -> None:
        self.local_rank %= torch.cuda.device_count()
        super().init_device()
