# SPDX-License-Identifier: Apache-2.0
"""Copies of whole blocks, for hits that end within a block of a sharded group (from 0.29 on).

Such a hit shares a block's first part, so the block is copied before it is written to.  Recurrent states and attention
KV of one pool begin at the same address, and where one allocation holds several layers, stock copies the first view
that it meets and takes the others for the same one: often a recurrent state, which is shorter than the block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_dcp_hybrid.worker import startup


def copy_kv_cache_blocks_inplace(
    wrapped: Callable[..., None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Wraps vLLM's function of this name: it meets the view that covers most of each block first."""
    if not startup.is_active():
        wrapped(*args, **kwargs)
        return

    def bound(kv_caches: Any, num_blocks: int, kv_cache_block_copies: Any) -> tuple[Any, int, Any]:
        return kv_caches, num_blocks, kv_cache_block_copies

    kv_caches, num_blocks, copies = bound(*args, **kwargs)
    wrapped(sorted(kv_caches, key=num_bytes, reverse=True), num_blocks, copies)


def num_bytes(view: Any) -> int:
    """Bytes of all blocks that a layer's view covers."""
    return int(view.numel() * view.element_size())
