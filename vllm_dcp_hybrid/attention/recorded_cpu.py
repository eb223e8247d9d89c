# SPDX-License-Identifier: Apache-2.0
"""CPU_ATTN where the rank check is on: the CPU engine, whose plan of each step is written down."""

from __future__ import annotations

from typing import Any

from vllm_dcp_hybrid.attention.cpu import (
    DCPCPUAttentionBackend,
    DCPCPUAttentionMetadata,
    DCPCPUAttentionMetadataBuilder,
)
from vllm_dcp_hybrid.attention.plan import AttentionPlan
from vllm_dcp_hybrid.worker import rank_check_seams
from vllm_dcp_hybrid.worker.rank_records import describe_branch


class RecordedCPUAttentionMetadataBuilder(DCPCPUAttentionMetadataBuilder):
    """Writes down each plan."""

    def build(self, *args: Any, **kwargs: Any) -> Any:
        metadata = super().build(*args, **kwargs)
        if isinstance(metadata, DCPCPUAttentionMetadata):
            rank_check_seams.checker().note(describe_branch("plan", invariant_rows(metadata.plan)))
        return metadata


class RecordedCPUAttentionBackend(DCPCPUAttentionBackend):
    """CPU_ATTN under DCP, with a record."""

    @staticmethod
    def get_builder_cls() -> type[RecordedCPUAttentionMetadataBuilder]:
        return RecordedCPUAttentionMetadataBuilder


def invariant_rows(plan: AttentionPlan) -> dict[str, list[tuple[int, ...]]]:
    """What every rank plans alike: the rows by kind, without this rank's share of their keys."""
    kinds = {"decode": plan.decode_rows, "context": plan.context_rows, "prefill": plan.prefill_rows}
    return {name: [(row.req, row.start, row.end, row.context_len) for row in rows] for name, rows in kinds.items()}
