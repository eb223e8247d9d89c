# SPDX-License-Identifier: Apache-2.0
"""A worker that goes another way than the others: what the rank check is for."""

from __future__ import annotations

from itertools import count
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_dcp_hybrid.attention import exchange

FIRST_SKIPPED = 40


class SkippingWorker(CPUWorker):
    """Rank 1 decides by itself, after some steps, that there is nothing to gather."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if self.rank == 1:
            exchange.gather_queries = skipping(exchange.gather_queries)


def skipping(gather_queries: Any) -> Any:
    calls = count()

    def gather_or_not(q: Any, dcp_group: Any) -> Any:
        if next(calls) < FIRST_SKIPPED:
            return gather_queries(q, dcp_group)
        return q.new_zeros((dcp_group.world_size, *q.shape))

    return gather_or_not
