# SPDX-License-Identifier: Apache-2.0
"""Prefill chunk ends for the releases whose own hybrid DCP loses prefix hits to theirs (0.26 - 0.28)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_dcp_hybrid import activation
from vllm_dcp_hybrid.core import prefill_split


def mamba_block_aligned_split(
    wrapped: Callable[..., int], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> int:
    """Wraps ``Scheduler._mamba_block_aligned_split``: see :mod:`vllm_dcp_hybrid.core.prefill_split`.

    Where a scheduler block is larger than any chunk, the original is not told of it: from 0.27 on it would end chunks
    in the middle of recurrent blocks then.
    """
    if instance.dcp_world_size == 1 or not activation.is_active(instance.vllm_config):
        return wrapped(*args, **kwargs)
    if instance.block_size <= largest_chunk(instance):
        return prefill_split.mamba_block_aligned_split(wrapped, instance, args, kwargs)
    return prefill_split.cut(wrapped(*args, **kwargs), instance, args, kwargs)


def largest_chunk(scheduler: Any) -> int:
    """Tokens that one request can be given in one step."""
    threshold = scheduler.scheduler_config.long_prefill_token_threshold
    budget: int = scheduler.max_num_scheduled_tokens
    return min(budget, threshold) if threshold > 0 else budget
