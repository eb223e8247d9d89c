# SPDX-License-Identifier: Apache-2.0
"""The CUDA engine for releases whose cache is ``[2, num_blocks, block_size, num_kv_heads, head_size]`` (before 0.23).

The shape and the cache writes are stock's in every release; this says where keys and values part.
"""

from __future__ import annotations

from vllm_dcp_hybrid.attention.flash_attn import DCPFlashAttentionBackend, DCPFlashAttentionImpl


class KVFirstFlashAttentionImpl(DCPFlashAttentionImpl):
    """Attention of one layer over this rank's shard of a cache with all keys before all values."""

    kv_dim = 0


class KVFirstFlashAttentionBackend(DCPFlashAttentionBackend):
    """FLASH_ATTN for hybrid models under DCP."""

    @staticmethod
    def get_impl_cls() -> type[KVFirstFlashAttentionImpl]:
        return KVFirstFlashAttentionImpl
