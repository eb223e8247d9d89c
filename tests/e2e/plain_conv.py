# SPDX-License-Identifier: Apache-2.0
"""Short convolutions on CPUs with AVX512-BF16 for vLLM 0.29 - 0.31, which packs their weights there.

It can pack width 4 alone, and LFM2's have width 3: stock stops while it loads.
This worker takes the CPU for one without AVX512-BF16.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.cpu_worker import CPUWorker


class PlainConvWorker(CPUWorker):
    """Stock's CPU worker on a CPU without AVX512-BF16."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        torch.cpu._is_avx512_bf16_supported = lambda: False
        super().load_model(*args, **kwargs)
