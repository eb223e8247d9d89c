# SPDX-License-Identifier: Apache-2.0
"""Collectives of attention under DCP: the queries go out, the partial outputs come back.

Heads: with `h` local query heads per rank and N ranks, the gathered order is rank 0's heads, then rank 1's, and so on.
Both exchanges return to rank r the heads `r*h .. r*h + h - 1` of that order: its own, whose output projection it holds.

Precision: both exchanges combine in float32 and round to the output dtype once, so that they agree within one step of
it. `exchange_a2a` sends the partial outputs as they are. `exchange_ag_rs` sends weighted shares, which the collective
itself adds: these travel in float32, because in a 2-byte dtype each share and each partial sum would be rounded. That
is twice the bytes, hidden by latency at decode sizes; where bandwidth counts, use `exchange_a2a`.

Memory: a long chunk is exchanged in rounds of rows, each with buffers of at most `MAX_ROUND_BYTES`.

Every rank calls with the same T, H, D, dtype and arguments, in the same order: nothing here decides whether to
communicate from what a rank happens to store. Buffers are fresh in each call: in a CUDA graph they belong to its pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from vllm_dcp_hybrid.attention.combine import add_sinks, combine, correct_partial

MAX_ROUND_BYTES = 64 * 2**20
"""Bytes of one send buffer of a round; the receive buffer is no larger."""

# Parts of a packed buffer start at multiples of it: float32 views are legal, and element strides stay multiples of 16.
_ALIGNMENT = 64


Exchange = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class DcpGroup(Protocol):
    """What is needed of a group of ranks; vLLM's GroupCoordinator has it."""

    @property
    def world_size(self) -> int: ...
    @property
    def rank_in_group(self) -> int: ...
    @property
    def device_group(self) -> dist.ProcessGroup: ...


class PackedPartials(NamedTuple):
    """The partial results of N ranks for h heads, or of one rank for the heads of N ranks, as one buffer of bytes."""

    buffer: torch.Tensor  # [N, num_bytes] uint8
    outs: torch.Tensor  # [N, T, h, D], a view of the buffer
    lses: torch.Tensor  # [N, T, h] float32, a view of the buffer


def exchange_by_name(dcp_comm_backend: str) -> Exchange:
    """The exchange that vLLM's `--dcp-comm-backend` names: `ag_rs` or `a2a`."""
    return {"ag_rs": exchange_ag_rs, "a2a": exchange_a2a}[dcp_comm_backend]


def gather_query_heads(q: torch.Tensor, dcp_group: DcpGroup) -> torch.Tensor:
    """The query heads of all ranks.

    Args:
        q: [T, h, D] this rank's query heads.

    Returns:
        [T, h * N, D] contiguous, rank r's heads at `r*h .. r*h + h - 1`; `q` itself where it is all.
    """
    if dcp_group.world_size == 1:
        return q
    num_tokens, num_local_heads, head_size = q.shape
    num_heads = num_local_heads * dcp_group.world_size
    if num_tokens == 0:
        return q.new_empty((0, num_heads, head_size))
    rank_major = q.new_empty((dcp_group.world_size * num_tokens, num_local_heads, head_size))
    dist.all_gather_into_tensor(rank_major, q.contiguous(), group=dcp_group.device_group)
    token_major = rank_major.view(dcp_group.world_size, *q.shape).transpose(0, 1)
    return token_major.reshape(num_tokens, num_heads, head_size).contiguous()


def exchange_ag_rs(
    out: torch.Tensor,
    lse: torch.Tensor,
    dcp_group: DcpGroup,
    *,
    sinks: torch.Tensor | None = None,
    into: torch.Tensor | None = None,
    use_triton: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All-gather the LSEs, weigh the own partial output, reduce-scatter the shares over the heads.

    Args:
        out: [T, h * N, D] this rank's partial output for all heads, in the gathered order. Not changed.
        lse: [T, h * N] its LSE, float32, natural log, any strides (no copy if stored as [h * N, T]).
        sinks: [h] attention sink logits of this rank's own heads.
        into: [T, h, D] where to write the output; does not overlap `out`. Default: a new tensor.
        use_triton: which twin combines; None decides by device.

    Returns:
        out [T, h, D] in the dtype of `out` (or `into` itself), lse [T, h] float32, for this rank's own heads.

    Raises:
        ValueError: the number of heads is not a multiple of N.
    """
    num_tokens, num_heads, head_size = out.shape
    num_local_heads = _num_local_heads(num_heads, dcp_group)
    if into is None:
        into = out.new_empty((num_tokens, num_local_heads, head_size))
    if num_tokens == 0:
        return into, out.new_empty((0, num_local_heads), dtype=torch.float32)
    lses = _gather_lses(lse, dcp_group)
    first_head = dcp_group.rank_in_group * num_local_heads
    lses_of_rounds = []
    for rows in _rounds(num_tokens, num_heads * head_size * 4):
        num_rows = rows.stop - rows.start
        # Stored by head, the part of each rank is one piece, as the collective wants it.
        shares = out.new_empty((num_heads, num_rows, head_size), dtype=torch.float32)
        _, global_lse = correct_partial(
            out[rows],
            lses[:, rows],
            dcp_group.rank_in_group,
            into=shares.transpose(0, 1),
            use_triton=use_triton,
        )
        combined = _sum_own_heads(shares, num_local_heads, dcp_group).transpose(0, 1)
        local_lse = global_lse[:, first_head : first_head + num_local_heads]
        if sinks is not None:
            combined, local_lse = add_sinks(combined, local_lse, sinks)
        into[rows].copy_(combined)
        lses_of_rounds.append(local_lse)
    return into, _join_rows(lses_of_rounds)


def exchange_a2a(
    out: torch.Tensor,
    lse: torch.Tensor,
    dcp_group: DcpGroup,
    *,
    sinks: torch.Tensor | None = None,
    into: torch.Tensor | None = None,
    use_triton: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Send each rank its heads, output and LSE in one message, and combine what arrives.

    Arguments, results and errors are those of `exchange_ag_rs`. The result never aliases `out`.
    """
    num_tokens, num_heads, head_size = out.shape
    num_local_heads = _num_local_heads(num_heads, dcp_group)
    if into is None:
        into = out.new_empty((num_tokens, num_local_heads, head_size))
    if num_tokens == 0:
        return into, out.new_empty((0, num_local_heads), dtype=torch.float32)
    lses_of_rounds = []
    for rows in _rounds(num_tokens, num_heads * (head_size * out.element_size() + 4)):
        outs, lses = _swap_partials(out[rows], lse[rows], dcp_group)
        _, local_lse = combine(outs, lses, sinks=sinks, into=into[rows], use_triton=use_triton)
        lses_of_rounds.append(local_lse)
    return into, _join_rows(lses_of_rounds)


def allocate_packed_partials(
    num_ranks: int,
    num_tokens: int,
    num_heads: int,
    head_size: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> PackedPartials:
    """An uninitialised buffer, one message of LSEs [T, h] and outputs [T, h, D] per rank, and its two views.

    Args:
        num_ranks, num_tokens, num_heads, head_size: N, T, h, D.
        dtype: of the outputs; the LSEs are float32.

    Invariant: the views do not overlap, and each part of each message starts at a multiple of 64 bytes.
    """
    lse_bytes = num_tokens * num_heads * 4
    out_bytes = num_tokens * num_heads * head_size * dtype.itemsize
    out_start = _round_up(lse_bytes)
    buffer = torch.empty((num_ranks, out_start + _round_up(out_bytes)), dtype=torch.uint8, device=device)
    lses = buffer[:, :lse_bytes].view(torch.float32)
    outs = buffer[:, out_start : out_start + out_bytes].view(dtype)
    return PackedPartials(
        buffer,
        outs.view(num_ranks, num_tokens, num_heads, head_size),
        lses.view(num_ranks, num_tokens, num_heads),
    )


def _swap_partials(out: torch.Tensor, lse: torch.Tensor, dcp_group: DcpGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """All heads [T, h * N, D] of this rank for the own heads [N, T, h, D] of all ranks, and their LSEs."""
    num_ranks = dcp_group.world_size
    if num_ranks == 1:
        return out.unsqueeze(0), lse.unsqueeze(0)
    num_tokens, num_heads, head_size = out.shape
    num_local_heads = num_heads // num_ranks
    message_shape = (num_ranks, num_tokens, num_local_heads, head_size)
    sent = allocate_packed_partials(*message_shape, dtype=out.dtype, device=out.device)
    received = allocate_packed_partials(*message_shape, dtype=out.dtype, device=out.device)
    sent.outs.copy_(out.view(num_tokens, num_ranks, num_local_heads, head_size).transpose(0, 1))
    sent.lses.copy_(lse.view(num_tokens, num_ranks, num_local_heads).transpose(0, 1))
    dist.all_to_all_single(received.buffer, sent.buffer, group=dcp_group.device_group)
    return received.outs, received.lses


def _sum_own_heads(shares: torch.Tensor, num_local_heads: int, dcp_group: DcpGroup) -> torch.Tensor:
    """Shares [h * N, T, D] of this rank to the sum over ranks [h, T, D] of its own heads."""
    if dcp_group.world_size == 1:
        return shares
    own_heads = shares.new_empty((num_local_heads, *shares.shape[1:]))
    dist.reduce_scatter_tensor(own_heads, shares, group=dcp_group.device_group)
    return own_heads


def _gather_lses(lse: torch.Tensor, dcp_group: DcpGroup) -> torch.Tensor:
    """[T, H] of this rank to a view [N, T, H] of all ranks; stored by head on the wire, on each rank alike."""
    by_head = lse.float().t().contiguous()
    if dcp_group.world_size == 1:
        return by_head.t().unsqueeze(0)
    num_heads, num_tokens = by_head.shape
    gathered = by_head.new_empty((dcp_group.world_size * num_heads, num_tokens))
    dist.all_gather_into_tensor(gathered, by_head, group=dcp_group.device_group)
    return gathered.view(dcp_group.world_size, num_heads, num_tokens).transpose(1, 2)


def _num_local_heads(num_heads: int, dcp_group: DcpGroup) -> int:
    if num_heads % dcp_group.world_size:
        raise ValueError(f"{num_heads} gathered heads are not a multiple of {dcp_group.world_size} DCP ranks")
    return num_heads // dcp_group.world_size


def _rounds(num_tokens: int, bytes_per_token: int) -> Iterator[slice]:
    """Rows of each round: as many as fit `MAX_ROUND_BYTES`, at least one."""
    num_rows = max(MAX_ROUND_BYTES // bytes_per_token, 1)
    for start in range(0, num_tokens, num_rows):
        yield slice(start, min(start + num_rows, num_tokens))


def _join_rows(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
