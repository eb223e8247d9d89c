# SPDX-License-Identifier: Apache-2.0
"""FlashAttention 3 over ranks as query positions, on a device, against attention in float32."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.gpu

LENS = {
    "one": [1],
    "empty ranks and padded rows": [0, 1, 271, 272, 273, 0, 0, 0],
    "long": [16_384],
    "many long": [16_384 - 37 * row for row in range(64)],
}


def pages(cache, table, length: int):
    """The first `length` keys or values [length, D] of a row."""
    num_blocks = -(-length // cache.shape[1])
    return cache[table[:num_blocks].long()].flatten(0, 1)[:length, 0]


def attend(queries, keys, values, table, lens, dtype):
    """Out [N, T, h, D] and lse [N, T, h], every operation in `dtype`; empty rows are 0 and -inf."""
    out = torch.zeros(queries.shape, dtype=dtype, device=queries.device)
    lse = torch.full(queries.shape[:3], -math.inf, device=queries.device)
    for row, length in enumerate(lens):
        if length:
            k, v = (pages(cache, table[row], length).to(dtype) for cache in (keys, values))
            scores = torch.einsum("nhd,ld->nhl", queries[:, row].to(dtype), k) * queries.shape[-1] ** -0.5
            out[:, row] = torch.einsum("nhl,ld->nhd", scores.softmax(-1), v)
            lse[:, row] = torch.logsumexp(scores.float(), -1)
    return out, lse


@pytest.mark.parametrize("has_metadata", [False, True])
@pytest.mark.parametrize("block_size", [16, 272])
@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("lens", LENS.values(), ids=LENS)
def test_decode_rows_of_all_ranks_attend_to_this_ranks_tokens(
    lens: list[int], head_size: int, block_size: int, has_metadata: bool
) -> None:
    fa_utils = pytest.importorskip("vllm.v1.attention.backends.fa_utils")
    from vllm_dcp_hybrid.attention import fa3

    if fa_utils.get_flash_attn_version() != 3:
        pytest.skip("needs FlashAttention 3")
    num_ranks, num_heads, num_rows = 2, 8, len(lens)
    torch.manual_seed(num_rows + head_size)
    num_columns = -(-16_384 // block_size)
    num_blocks = num_rows * num_columns + 1
    table = torch.randperm(num_blocks - 1, device="cuda").add(1).view(num_rows, num_columns).to(torch.int32)
    cache = torch.randn(num_blocks, 2, block_size, 1, head_size, device="cuda", dtype=torch.bfloat16)
    keys, values = cache.unbind(1)
    # As vLLM does for one KV head: TMA wants strides that are multiples of 16 bytes.
    from vllm.utils.torch_utils import canonicalize_singleton_dim_strides

    keys, values = map(canonicalize_singleton_dim_strides, (keys, values))
    queries = torch.randn(num_ranks, num_rows, num_heads, head_size, device="cuda", dtype=torch.bfloat16)
    lens_on_device = torch.tensor(lens, dtype=torch.int32, device="cuda")
    metadata, num_splits = None, 0
    if has_metadata:
        num_splits = 32
        metadata = fa_utils.get_scheduler_metadata(
            batch_size=num_rows,
            max_seqlen_q=num_ranks,
            max_seqlen_k=16_384,
            num_heads_q=num_heads,
            num_heads_kv=1,
            headdim=head_size,
            cache_seqlens=lens_on_device,
            qkv_dtype=torch.bfloat16,
            cu_seqlens_q=torch.arange(num_rows + 1, dtype=torch.int32, device="cuda") * num_ranks,
            page_size=block_size,
            causal=False,
            window_size=(-1, -1),
            num_splits=num_splits,
        )
    out = torch.full_like(queries, math.nan)
    lse = fa3.attend_decode_rows(
        queries,
        keys,
        values,
        out,
        seqused_k=lens_on_device,
        max_seqlen_k=16_384,
        block_table=table,
        softmax_scale=head_size**-0.5,
        softcap=0.0,
        scheduler_metadata=metadata,
        num_splits=num_splits,
    )
    expected, expected_lse = attend(queries, keys, values, table, lens, torch.float32)
    plain, _ = attend(queries, keys, values, table, lens, torch.bfloat16)
    bound = max(2 * (plain - expected).abs().max().item(), 1e-3)
    assert (out.float() - expected).abs().max().item() <= bound
    is_live = expected_lse.isfinite()
    torch.testing.assert_close(lse[is_live], expected_lse[is_live], rtol=1e-3, atol=1e-3)
    assert not lse[~is_live].isfinite().any()
