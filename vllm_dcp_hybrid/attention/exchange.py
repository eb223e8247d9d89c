# SPDX-License-Identifier: Apache-2.0
"""Collectives of attention under DCP: the queries go out, the partial outputs come back.

Heads: with `h` local query heads per rank and N ranks, the heads of all ranks are rank 0's, then rank 1's, and so on.
*By rank* they are `[N, T, h, D]`, one piece for each rank; *by token* they are `[T, h * N, D]`. Both exchanges take
partial outputs by rank and return to rank r piece r, summed over the senders: its own heads, whose output projection
it holds.

Copies: none, where the partial outputs are stored by rank and their LSEs densely, in any order of dimensions. The
queries arrive by rank, and `combine` writes where the caller wants the output.

Precision: both exchanges combine in float32 and round to the output dtype once, so that they agree within one step of
it. `exchange_a2a` sends the partial outputs as they are. `exchange_ag_rs` sends weighted shares, which the collective
itself adds: these travel in float32, because in a 2-byte dtype each share and each partial sum would be rounded. That
is twice the bytes and one more conversion; where bandwidth counts, use `exchange_a2a`.

Memory: a long chunk is exchanged in rounds of rows, each with buffers of at most `MAX_ROUND_BYTES`.

Every rank calls with the same T, h, D, strides, dtype and arguments, in the same order: nothing here decides whether
to communicate from what a rank happens to store. Buffers are fresh in each call: in a CUDA graph they belong to its
pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from vllm_dcp_hybrid.attention.combine import add_sinks, combine, correct_partial
from vllm_dcp_hybrid.attention.transport import DcpGroup, transport_of

MAX_ROUND_BYTES = 64 * 2**20
"""Bytes of one send buffer of a round; the receive buffer is no larger."""

Exchange = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class DenseLses(NamedTuple):
    """LSEs [N, T, h] as they are stored, and how their dimensions lie there."""

    stored: torch.Tensor
    order: tuple[int, ...]

    def new_of_all_ranks(self, world_size: int) -> torch.Tensor:
        """Room for every rank's, stored alike."""
        return self.stored.new_empty((world_size, *self.stored.shape))

    def by_sender(self, of_all_ranks: torch.Tensor) -> torch.Tensor:
        """What `new_of_all_ranks` made, as a view [senders, N, T, h]."""
        return of_all_ranks.permute(0, *(self.order.index(dim) + 1 for dim in range(3)))


def exchange_by_name(dcp_comm_backend: str) -> Exchange:
    """The exchange that vLLM's `--dcp-comm-backend` names: `ag_rs` or `a2a`."""
    return {"ag_rs": exchange_ag_rs, "a2a": exchange_a2a}[dcp_comm_backend]


def gather_queries(q: torch.Tensor, dcp_group: DcpGroup) -> torch.Tensor:
    """The queries of all ranks, by rank.

    Args:
        q: [T, h, D] this rank's query heads.

    Returns:
        [N, T, h, D] contiguous; a view of `q` where it is all and dense.
    """
    if dcp_group.world_size == 1:
        return q.contiguous().unsqueeze(0)
    queries = q.new_empty((dcp_group.world_size, *q.shape))
    if q.shape[0]:
        transport_of(dcp_group).all_gather(queries, q.contiguous())
    return queries


def by_token(of_ranks: torch.Tensor) -> torch.Tensor:
    """[N, T, h, ...] to [T, h * N, ...], rank r's heads at `r*h .. r*h + h - 1`; a copy unless N or T is 1."""
    num_ranks, num_tokens, num_local_heads, *rest = of_ranks.shape
    return of_ranks.transpose(0, 1).reshape(num_tokens, num_ranks * num_local_heads, *rest)


def by_rank(of_tokens: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """[T, h * N, ...] as a view [N, T, h, ...].

    Raises:
        ValueError: the number of heads is not a multiple of N.
    """
    num_tokens, num_heads, *rest = of_tokens.shape
    if num_heads % num_ranks:
        raise ValueError(f"{num_heads} gathered heads are not a multiple of {num_ranks} DCP ranks")
    # Splits one dimension, which every tensor can do in place.
    return of_tokens.view(num_tokens, num_ranks, num_heads // num_ranks, *rest).transpose(0, 1)


def exchange_ag_rs(
    outs: torch.Tensor,
    lses: torch.Tensor,
    dcp_group: DcpGroup,
    *,
    sinks: torch.Tensor | None = None,
    into: torch.Tensor | None = None,
    use_triton: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All-gather the LSEs, weigh the own partial outputs, reduce-scatter the shares over the heads.

    Args:
        outs: [N, T, h, D] this rank's partial outputs, by the rank whose heads they are. Not changed.
        lses: [N, T, h] their LSEs, float32, natural log, any strides.
        sinks: [h] attention sink logits of this rank's own heads.
        into: [T, h, D] where to write the output; does not overlap `outs`. Default: a new tensor.
        use_triton: which twin combines; None decides by device.

    Returns:
        out [T, h, D] in the dtype of `outs` (or `into` itself), lse [T, h] float32, for this rank's own heads.
    """
    num_ranks, num_tokens, num_heads, head_size = outs.shape
    if into is None:
        into = outs.new_empty((num_tokens, num_heads, head_size))
    if num_tokens == 0:
        return into, outs.new_empty((0, num_heads), dtype=torch.float32)
    gathered = _gather_lses(lses, dcp_group)
    lses_of_rounds = []
    for rows in _rounds(num_tokens, num_ranks * num_heads * head_size * 4):
        shares = torch.empty_like(outs[:, rows], dtype=torch.float32, memory_format=torch.contiguous_format)
        _, lses_of_pieces = correct_partial(
            outs[:, rows], gathered[:, :, rows], dcp_group.rank_in_group, into=shares, use_triton=use_triton
        )
        combined, lse = _sum_own_heads(shares, dcp_group), lses_of_pieces[dcp_group.rank_in_group]
        if sinks is not None:
            combined, lse = add_sinks(combined, lse, sinks)
        into[rows].copy_(combined)
        lses_of_rounds.append(lse)
    return into, _join_rows(lses_of_rounds)


def exchange_a2a(
    outs: torch.Tensor,
    lses: torch.Tensor,
    dcp_group: DcpGroup,
    *,
    sinks: torch.Tensor | None = None,
    into: torch.Tensor | None = None,
    use_triton: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Send each rank its heads, outputs and LSEs at once, and combine what arrives.

    Arguments and results are those of `exchange_ag_rs`. The result never aliases `outs`.
    """
    num_ranks, num_tokens, num_heads, head_size = outs.shape
    if into is None:
        into = outs.new_empty((num_tokens, num_heads, head_size))
    if num_tokens == 0:
        return into, outs.new_empty((0, num_heads), dtype=torch.float32)
    lses_of_rounds = []
    for rows in _rounds(num_tokens, num_ranks * num_heads * (head_size * outs.element_size() + 4)):
        arrived, arrived_lses = _swap_partials(outs[:, rows], lses[:, rows], dcp_group)
        _, lse = combine(arrived, arrived_lses, sinks=sinks, into=into[rows], use_triton=use_triton)
        lses_of_rounds.append(lse)
    return into, _join_rows(lses_of_rounds)


def store_densely(lses: torch.Tensor) -> DenseLses:
    """LSEs [N, T, h] in the order of dimensions in which they already lie: a copy only where there are gaps."""
    strides = lses.stride()
    order = tuple(sorted(range(3), key=lambda dim: (-strides[dim], dim)))
    return DenseLses(lses.float().permute(order).contiguous(), order)


def _swap_partials(outs: torch.Tensor, lses: torch.Tensor, dcp_group: DcpGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """Partials [N, T, h, D] of this rank by receiver, for those of the own heads [N, T, h, D] by sender; LSEs alike."""
    num_ranks = dcp_group.world_size
    if num_ranks == 1:
        return outs, lses
    dense = store_densely(lses)
    arrived_lses = dense.new_of_all_ranks(num_ranks)
    arrived = torch.empty_like(outs, memory_format=torch.contiguous_format)
    if not outs[0].is_contiguous():
        outs = outs.contiguous()
    # All LSEs go to every rank: they are few bytes, and picking out those of one rank would be a copy.
    to_all = dense.stored.expand_as(arrived_lses)
    transport_of(dcp_group).swap((arrived, arrived_lses), (outs, to_all))
    return arrived, dense.by_sender(arrived_lses)[:, dcp_group.rank_in_group]


def _gather_lses(lses: torch.Tensor, dcp_group: DcpGroup) -> torch.Tensor:
    """[N, T, h] of this rank to a view [senders, N, T, h] of all ranks."""
    if dcp_group.world_size == 1:
        return lses.unsqueeze(0)
    dense = store_densely(lses)
    gathered = dense.new_of_all_ranks(dcp_group.world_size)
    transport_of(dcp_group).all_gather(gathered, dense.stored)
    return dense.by_sender(gathered)


def _sum_own_heads(shares: torch.Tensor, dcp_group: DcpGroup) -> torch.Tensor:
    """Shares [N, T, h, D] of this rank to the sum over ranks [T, h, D] of its own heads."""
    if dcp_group.world_size == 1:
        return shares[0]
    own_heads = torch.empty_like(shares[0])
    transport_of(dcp_group).reduce_scatter(own_heads, shares)
    return own_heads


def _rounds(num_tokens: int, bytes_per_token: int) -> Iterator[slice]:
    """Rows of each round: as many as fit `MAX_ROUND_BYTES`, at least one."""
    num_rows = max(MAX_ROUND_BYTES // bytes_per_token, 1)
    for start in range(0, num_tokens, num_rows):
        yield slice(start, min(start + num_rows, num_tokens))


def _join_rows(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
