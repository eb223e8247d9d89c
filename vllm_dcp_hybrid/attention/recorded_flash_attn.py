# SPDX-License-Identifier: Apache-2.0
"""FLASH_ATTN where the rank check is on: the CUDA engine, whose row kinds of each step are written down."""

from __future__ import annotations

from typing import Any

from vllm_dcp_hybrid.attention.flash_attn import (
    DCPFlashAttentionBackend,
    DCPFlashAttentionMetadata,
    DCPFlashAttentionMetadataBuilder,
)
from vllm_dcp_hybrid.attention.flash_attn_kv_first import KVFirstFlashAttentionBackend
from vllm_dcp_hybrid.worker import rank_check_seams
from vllm_dcp_hybrid.worker.rank_records import describe_branch


class RecordedFlashAttentionMetadataBuilder(DCPFlashAttentionMetadataBuilder):
    """Writes down the kinds of rows, also of steps that replay a graph."""

    def build(self, *args: Any, **kwargs: Any) -> Any:
        metadata = super().build(*args, **kwargs)
        if isinstance(metadata, DCPFlashAttentionMetadata) and metadata.rows is not None:
            rank_check_seams.checker().note(describe_branch("rows", vars(metadata.rows)))
        return metadata


class RecordedFlashAttentionBackend(DCPFlashAttentionBackend):
    """FLASH_ATTN under DCP, with a record."""

    @staticmethod
    def get_builder_cls() -> type[RecordedFlashAttentionMetadataBuilder]:
        return RecordedFlashAttentionMetadataBuilder


class RecordedKVFirstFlashAttentionBackend(KVFirstFlashAttentionBackend):
    """The same, for caches with keys and values first."""

    @staticmethod
    def get_builder_cls() -> type[RecordedFlashAttentionMetadataBuilder]:
        return RecordedFlashAttentionMetadataBuilder
