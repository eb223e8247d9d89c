# SPDX-License-Identifier: Apache-2.0
"""Torch operations of the CPU engine: cache writes and reads, and attention that returns its LSE.

LSE is float32, natural log, ``[T, H]`` everywhere in this module's interface.
"""

from __future__ import annotations

import torch


def write_kv(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Store new tokens at their slots.

    Args:
        key, value: ``[num_tokens, num_kv_heads, head_size]``.
        kv_cache: ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``, written in place.
        slot_mapping: ``[>= num_tokens]`` int64; negative slots are skipped.
    """
    slots = slot_mapping[: key.shape[0]]
    mine = (slots >= 0).nonzero().squeeze(1)
    if mine.numel() == 0:
        return
    block_size, head_size = kv_cache.shape[2], key.shape[2]
    blocks, offsets = slots[mine] // block_size, slots[mine] % block_size
    kv_cache[blocks, :, offsets, :head_size] = key[mine].to(kv_cache.dtype)
    kv_cache[blocks, :, offsets, head_size:] = value[mine].to(kv_cache.dtype)


def read_kv(kv_cache: torch.Tensor, block_ids: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first ``num_tokens`` tokens under a request's blocks.

    Args:
        kv_cache: ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``.
        block_ids: ``[>= ceil(num_tokens / block_size)]``, the request's row of the block table.

    Returns:
        keys, values: ``[num_kv_heads, num_tokens, head_size]`` each.
    """
    block_size = kv_cache.shape[2]
    used = block_ids[: -(-num_tokens // block_size)]
    gathered = kv_cache.transpose(0, 1).index_select(1, used)  # [num_kv_heads, num_used, block_size, 2 * head_size]
    tokens = gathered.flatten(1, 2)[:, :num_tokens]
    keys, values = tokens.chunk(2, dim=-1)
    return keys, values


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float,
    num_head_groups: int = 1,
    soft_cap: float = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention without a mask: every query sees every key.

    Args:
        query: ``[T, H, D]``.  Heads are ``num_head_groups`` (the DCP size) equal parts, rank by rank; within a part
            they are grouped by KV head, as on one rank.
        keys, values: ``[num_kv_heads, S, D]`` with S > 0.
        soft_cap: bound of the logits, 0 for none.

    Returns:
        out ``[T, H, D]`` in the query's dtype, lse ``[T, H]`` float32.
    """
    num_tokens, num_heads, head_size = query.shape
    num_kv_heads = keys.shape[0]
    heads_per_kv = num_heads // num_head_groups // num_kv_heads
    # Without a mask, query heads of one KV head are just more queries: one large product instead of many small ones.
    grouped = query.view(num_tokens, num_head_groups, num_kv_heads, heads_per_kv, head_size)
    rows = grouped.permute(2, 0, 1, 3, 4).reshape(1, num_kv_heads, -1, head_size)
    out, lse = _attention(rows, keys.unsqueeze(0), values.unsqueeze(0), scale, soft_cap, is_causal=False)
    shape = (num_kv_heads, num_tokens, num_head_groups, heads_per_kv)
    out = out.reshape(*shape, head_size).permute(1, 2, 0, 3, 4).reshape(num_tokens, num_heads, head_size)
    return out, lse.reshape(shape).permute(1, 2, 0, 3).reshape(num_tokens, num_heads)


def attend_causal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float, soft_cap: float = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of T tokens among themselves, for one rank's heads.

    Args:
        query: ``[T, H, D]``, heads grouped by KV head.
        key, value: ``[T, num_kv_heads, D]``.

    Returns:
        out ``[T, H, D]`` in the query's dtype, lse ``[T, H]`` float32.
    """
    heads_per_kv = query.shape[1] // key.shape[1]
    keys = key.transpose(0, 1).repeat_interleave(heads_per_kv, dim=0).unsqueeze(0)
    values = value.transpose(0, 1).repeat_interleave(heads_per_kv, dim=0).unsqueeze(0)
    out, lse = _attention(query.transpose(0, 1).unsqueeze(0), keys, values, scale, soft_cap, is_causal=True)
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)


def _attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, soft_cap: float, *, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[1, H, T, D]`` x ``[1, H, S, D]`` -> out ``[1, H, T, D]``, lse ``[1, H, T]`` float32."""
    if soft_cap:
        return _attention_with_soft_cap(query, keys, values, scale, soft_cap, is_causal=is_causal)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys.to(query.dtype), values.to(query.dtype), 0.0, is_causal, scale=scale
    )
    return out, lse.float()


def _attention_with_soft_cap(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, soft_cap: float, *, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`_attention`, in float32 and with the whole matrix of logits: no library kernel caps them."""
    logits = soft_cap * torch.tanh(query.float() @ keys.float().transpose(-1, -2) * (scale / soft_cap))
    if is_causal:
        hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
        logits = logits.masked_fill(hidden, float("-inf"))
    lse = torch.logsumexp(logits, dim=-1)
    return (torch.exp(logits - lse.unsqueeze(-1)) @ values.float()).to(query.dtype), lse
