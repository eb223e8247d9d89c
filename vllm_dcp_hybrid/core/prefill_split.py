# SPDX-License-Identifier: Apache-2.0
"""Where prefill chunks end, so that a recurrent state can be kept for what the sharded blocks cover (TARGETS E3).

In ``align`` mode a recurrent state is kept only where a step ended, and a prefix hit must be a multiple of the
scheduler block (the least common multiple of the effective block sizes).  Stock ends chunks on multiples of one rank's
block, which under DCP is often no multiple of the scheduler block: no state, no hit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def mamba_block_aligned_split(
    wrapped: Callable[..., int], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> int:
    """Wraps ``Scheduler._mamba_block_aligned_split``: new tokens for this step, after cutting the chunk.

    The original runs with the scheduler block in place of one rank's block.  Where not even one scheduler block fits
    into the step's budget it would answer 0, for ever if the budget stays so small; then the original decides with one
    rank's block, and the chunk is cut where it would step over a multiple of the scheduler block.
    """
    scheduler_block = instance.block_size
    rank_block = instance.cache_config.block_size
    if scheduler_block == rank_block or instance.dcp_world_size == 1:
        return wrapped(*args, **kwargs)
    chunk = _with_block_size(instance, scheduler_block, wrapped, args, kwargs)
    if chunk == 0 and _bound(*args, **kwargs)[1] > 0:
        chunk = wrapped(*args, **kwargs)
    return cut(chunk, instance, args, kwargs)


def cut(chunk: int, scheduler: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Shorten a chunk that would step over a multiple of the scheduler block.

    Args:
        chunk: what the original answered.
        scheduler: a vLLM ``Scheduler``.
        args, kwargs: those of the original.
    """
    request, _, start = _bound(*args, **kwargs)
    if start >= max(request.num_prompt_tokens, request.num_tokens - 1):
        return chunk
    block = scheduler.block_size
    if scheduler.use_eagle:
        last_kept = max(request.num_tokens // block * block - block, 0)
    else:
        # A repeat must compute its last token, so a state of the whole prompt can never serve it.
        last_kept = (request.num_tokens - 1) // block * block
    return end_on_boundary(start, chunk, block, last_kept)


def end_on_boundary(start: int, chunk: int, block: int, last_kept: int) -> int:
    """Shorten a chunk so that it ends on the last multiple of ``block`` that it reaches, if it reaches one.

    Args:
        start: tokens computed before this step.
        chunk: tokens of this step.
        block: tokens of the scheduler block.
        last_kept: the last position at which a state is worth keeping; chunks that start there or later are free.

    Invariant: the result is positive where ``chunk`` is.
    """
    boundary = min(start + chunk, last_kept) // block * block
    return boundary - start if start < boundary else chunk


def _bound(request: Any, num_new_tokens: int, *computed: int, **more: int) -> tuple[Any, int, int]:
    """(request, new tokens that are wanted, tokens computed before) of a call of the original."""
    local, external, *_ = *computed, 0, 0
    local = more.get("num_new_local_computed_tokens", local)
    external = more.get("num_external_computed_tokens", external)
    return request, num_new_tokens, request.num_computed_tokens + local + external


def _with_block_size(
    scheduler: Any, block: int, wrapped: Callable[..., int], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> int:
    """Call the original while the scheduler's cache config names another block size."""
    cache_config = scheduler.cache_config
    before = cache_config.block_size
    cache_config.block_size = block
    try:
        return wrapped(*args, **kwargs)
    finally:
        cache_config.block_size = before
