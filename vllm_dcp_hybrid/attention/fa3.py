# SPDX-License-Identifier: Apache-2.0
"""FlashAttention 3 for one query per row and rank, where the queries and the outputs lie by rank.

vLLM's wrapper takes queries of rows of any length, whose heads have one stride. The kernel also takes a batch of rows
of one length: with the ranks as the query positions of a row, all strides are free, so that gathered queries are read
as they arrive, and the partial outputs are written as they are sent. Without a causal mask the positions of a row do
not differ, and the kernel packs them and the heads into one tile as it packs heads.
"""

from __future__ import annotations

import torch

# The operator's schema has no defaults.
_UNUSED: dict[str, bool | int | None] = {
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q")),
    **dict.fromkeys(("k_new", "v_new", "q_v", "kv_batch_idx", "leftpad_k", "s_aux", "pack_gqa")),
    **dict.fromkeys(("rotary_cos", "rotary_sin", "seqlens_rotary")),
    **{"is_causal": False, "window_size_left": -1, "window_size_right": -1, "is_rotary_interleaved": True},
    **{"sm_margin": 0, "cp_world_size": 1, "cp_rank": 0, "cp_tot_seqused_k": None},
}


def attend_decode_rows(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    *,
    seqused_k: torch.Tensor,
    max_seqlen_k: int,
    block_table: torch.Tensor,
    softmax_scale: float,
    softcap: float,
    scheduler_metadata: torch.Tensor | None,
    num_splits: int,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of T rows over this rank's tokens.

    Args:
        queries: [N, T, h, D], head dimension dense.
        keys, values: [num_blocks, block_size, num_kv_heads, D].
        out: [N, T, h, D] where to write the output, head dimension dense.
        seqused_k: [T] int32, this rank's tokens of each row; may be 0.
        block_table: [T, max_num_blocks] int32.
        scheduler_metadata: for T rows of N queries of h heads; None to plan in this call.
        q_descale, k_descale, v_descale: [T, num_kv_heads] float32, for FP8.

    Returns:
        lse [N, T, h] float32, natural log, a view of [T, h, N]. Rows of no tokens: zeros and -inf.

    Source: the operator that ``vllm_flash_attn.flash_attn_interface.flash_attn_varlen_func`` calls (0.20.2 - 0.28.0);
        the names are those of its schema.
    """
    _, lse, *_ = torch.ops._vllm_fa3_C.fwd(
        q=queries.transpose(0, 1),
        k=keys,
        v=values,
        out=out.transpose(0, 1),
        seqused_k=seqused_k,
        max_seqlen_q=queries.shape[0],
        max_seqlen_k=max_seqlen_k,
        page_table=block_table,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        softmax_scale=softmax_scale,
        softcap=softcap,
        scheduler_metadata=scheduler_metadata,
        num_splits=num_splits,
        **_UNUSED,
    )
    lse_by_rank: torch.Tensor = lse.permute(2, 0, 1)
    return lse_by_rank
