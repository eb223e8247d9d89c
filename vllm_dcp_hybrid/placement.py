# SPDX-License-Identifier: Apache-2.0
"""Who owns which token: the arithmetic of Decode Context Parallelism, in plain integers.

Nothing here imports torch or vLLM.  Every function takes the world size ``n`` and the interleave size ``i`` of the
sharded layout; the replicated layout is the case ``n == 1``.

The layout: tokens are dealt out in runs of ``i``.  Run 0 goes to rank 0, run 1 to rank 1, ..., run ``n`` to rank 0
again.  Each rank packs the tokens it owns densely, in sequence order.
"""

from __future__ import annotations

from enum import Enum


class Placement(Enum):
    """Where the tokens of one KV cache group live."""

    SHARDED = "sharded"
    """Token ``p`` lives on DCP rank ``(p // interleave_size) % dcp_world_size``."""

    REPLICATED = "replicated"
    """The whole group lives on every rank."""

    NONE = "none"
    """The group stores nothing between steps (encoder-only attention)."""


def cdiv(numerator: int, denominator: int) -> int:
    """``numerator / denominator`` rounded up."""
    return -(-numerator // denominator)


def owner(global_pos: int, n: int, i: int) -> int:
    """The DCP rank that stores the token at ``global_pos``."""
    return global_pos // i % n


def local_pos(global_pos: int, n: int, i: int) -> int:
    """Index of the token at ``global_pos`` among the tokens that its owner stores.

    Invariant: over all positions of one owner this counts 0, 1, 2, ... without a gap.
    """
    return global_pos // (i * n) * i + global_pos % i


def global_pos(local: int, rank: int, n: int, i: int) -> int:
    """The position in the sequence of the ``local``-th token that ``rank`` stores: the inverse of :func:`local_pos`."""
    return (local // i * n + rank) * i + local % i


def local_len(global_len: int, rank: int, n: int, i: int) -> int:
    """How many of the first ``global_len`` tokens ``rank`` stores.

    Invariant: summed over all ranks this is ``global_len``.
    """
    rounds, rest = divmod(global_len, i * n)
    return rounds * i + min(max(rest - rank * i, 0), i)


def max_local_len(global_len: int, n: int, i: int) -> int:
    """The largest :func:`local_len` of any rank, which is rank 0's."""
    return local_len(global_len, 0, n, i)


def largest_dcp_world_size(tp_size: int, num_kv_heads: int, num_query_heads: int, *, is_mla: bool = False) -> int:
    """The largest legal DCP size for a model at this tensor-parallel size; 1 where DCP is not possible.

    DCP splits the copies of a KV head over the ranks that would hold one each, so ``n`` may not exceed the number of
    copies, must divide the TP size, and must divide the query heads that share a KV head.  It must also divide the
    number of copies: a DCP group is a run of neighbouring ranks, and all of them must hold the same KV head.  MLA has
    one latent KV head that every rank would copy.

    Source: ``ModelConfig.verify_with_parallel_config`` and ``ParallelConfig`` of vLLM 0.25.1, which lack the last rule.
    """
    if is_mla:
        return max(1, tp_size)
    copies = tp_size // max(1, num_kv_heads)
    query_heads_per_kv_head = num_query_heads // max(1, num_kv_heads)
    legal = [n for n in range(1, copies + 1) if tp_size % n == copies % n == query_heads_per_kv_head % n == 0]
    return max(legal, default=1) if tp_size > num_kv_heads else 1
