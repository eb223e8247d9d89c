# SPDX-License-Identifier: Apache-2.0
"""Torch operations of the CPU engine, against a float64 reference that uses no library kernel."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from vllm_dcp_hybrid.attention.cpu_kernels import attend, attend_causal, read_kv, write_kv  # noqa: E402

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_cap = pytest.mark.parametrize("soft_cap", [0, 5.0], ids=["no_cap", "soft_cap"])


def reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    kv_head_of: list[int],
    scale: float,
    soft_cap: float = 0,
    is_causal: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of [T, H, D] over [num_kv_heads, S, D], head by head, every operation in `dtype`."""
    num_tokens, num_heads, _ = query.shape
    outs, lses = [], []
    for head in range(num_heads):
        q = query[:, head].to(dtype)
        k, v = (x[kv_head_of[head]].to(dtype) for x in (keys, values))
        logits = q @ k.T * scale
        if soft_cap:
            logits = soft_cap * torch.tanh(logits / soft_cap)
        if is_causal:
            hidden = torch.arange(k.shape[0]) > torch.arange(num_tokens)[:, None] + k.shape[0] - num_tokens
            logits = logits.masked_fill(hidden, -math.inf)
        lses.append(torch.logsumexp(logits, -1))
        outs.append(torch.softmax(logits, -1) @ v)
    return torch.stack(outs, 1), torch.stack(lses, 1)


def assert_as_good_as_plain(found: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor) -> None:
    """Error at most 2x that of a plain computation in the same dtype, and noise of float32."""
    noise = 4 * torch.finfo(torch.float32).eps * max(1.0, float(exact.abs().max()))
    allowed = 2 * (plain.double() - exact).abs().max() + noise
    error = (found.double() - exact).abs().max()
    assert error <= allowed, (float(error), float(allowed))


def random_tensors(dtype: torch.dtype, *shapes: tuple[int, ...], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def kv_heads_of_groups(num_head_groups: int, num_kv_heads: int, heads_per_kv: int) -> list[int]:
    """Each rank's heads are a whole set, grouped by KV head as on one rank."""
    return [kv_head for _ in range(num_head_groups) for kv_head in range(num_kv_heads) for _ in range(heads_per_kv)]


@each_dtype
@each_cap
@pytest.mark.parametrize("num_keys", [1, 17, 300])
@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize(
    ("num_head_groups", "num_kv_heads", "heads_per_kv"), [(1, 1, 1), (1, 2, 3), (2, 1, 4), (4, 2, 1), (3, 2, 2)]
)
def test_attend_is_as_exact_as_a_plain_computation(
    dtype: torch.dtype,
    soft_cap: float,
    num_keys: int,
    num_tokens: int,
    num_head_groups: int,
    num_kv_heads: int,
    heads_per_kv: int,
) -> None:
    num_heads, head_size = num_head_groups * num_kv_heads * heads_per_kv, 64
    kv_shape = (num_kv_heads, num_keys, head_size)
    query, keys, values = random_tensors(dtype, (num_tokens, num_heads, head_size), kv_shape, kv_shape)
    scale = 1.3 * head_size**-0.5
    options = {"kv_head_of": kv_heads_of_groups(num_head_groups, num_kv_heads, heads_per_kv), "scale": scale}
    out, lse = attend(query, keys, values, scale=scale, num_head_groups=num_head_groups, soft_cap=soft_cap)
    exact, exact_lse = reference(query, keys, values, soft_cap=soft_cap, **options)
    plain, plain_lse = reference(query, keys, values, soft_cap=soft_cap, dtype=dtype, **options)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert out.shape == query.shape
    assert lse.shape == query.shape[:2]
    assert_as_good_as_plain(out, exact, plain)
    assert_as_good_as_plain(lse, exact_lse, plain_lse)


@each_dtype
@each_cap
@pytest.mark.parametrize("num_tokens", [1, 2, 33])
@pytest.mark.parametrize(("num_kv_heads", "heads_per_kv"), [(1, 1), (2, 3)])
def test_causal_attention_is_as_exact_as_a_plain_computation(
    dtype: torch.dtype, soft_cap: float, num_tokens: int, num_kv_heads: int, heads_per_kv: int
) -> None:
    head_size = 80
    kv_shape = (num_tokens, num_kv_heads, head_size)
    query, key, value = random_tensors(dtype, (num_tokens, num_kv_heads * heads_per_kv, head_size), kv_shape, kv_shape)
    scale = head_size**-0.5
    options = {
        "kv_head_of": kv_heads_of_groups(1, num_kv_heads, heads_per_kv),
        "scale": scale,
        "soft_cap": soft_cap,
        "is_causal": True,
    }
    out, lse = attend_causal(query, key, value, scale=scale, soft_cap=soft_cap)
    by_head = key.transpose(0, 1), value.transpose(0, 1)
    exact, exact_lse = reference(query, *by_head, **options)
    plain, plain_lse = reference(query, *by_head, dtype=dtype, **options)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert_as_good_as_plain(out, exact, plain)
    assert_as_good_as_plain(lse, exact_lse, plain_lse)


def test_case_17_the_lse_is_a_natural_logarithm_in_float32() -> None:
    """CASES 17: two equal keys give ln 2, not 1."""
    keys = torch.ones(1, 2, 32)
    _, lse = attend(torch.zeros(1, 1, 32), keys, keys, scale=1.0)
    assert lse.item() == pytest.approx(math.log(2), abs=1e-6)
    assert lse.dtype == torch.float32


def test_case_08_heads_of_each_rank_read_the_kv_head_that_they_would_read_alone() -> None:
    """CASES 8: KV heads of very different scale; rank r's slice of the heads equals what rank r computes alone."""
    query, keys, values = random_tensors(torch.float32, (3, 2 * 2 * 2, 32), (2, 9, 32), (2, 9, 32))
    values[1] *= 1000
    out, lse = attend(query, keys, values, scale=0.2, num_head_groups=2)
    for rank in range(2):
        mine = slice(rank * 4, rank * 4 + 4)
        alone, alone_lse = attend(query[:, mine], keys, values, scale=0.2)
        torch.testing.assert_close(out[:, mine], alone)
        torch.testing.assert_close(lse[:, mine], alone_lse)


def test_queries_in_another_dtype_than_the_cache_are_answered_in_theirs() -> None:
    query, keys, values = random_tensors(torch.float32, (2, 2, 64), (1, 5, 64), (1, 5, 64))
    out, _ = attend(query, keys.bfloat16(), values.bfloat16(), scale=0.1)
    assert out.dtype == torch.float32


BLOCK, KV_HEADS, HEAD = 16, 2, 32


def poisoned_cache(num_blocks: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((num_blocks, KV_HEADS, BLOCK, 2 * HEAD), math.nan, dtype=dtype)


@each_dtype
@pytest.mark.parametrize("num_tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_what_is_written_through_slots_is_read_through_the_block_table(num_tokens: int, dtype: torch.dtype) -> None:
    key, value = random_tensors(dtype, (num_tokens, KV_HEADS, HEAD), (num_tokens, KV_HEADS, HEAD))
    cache = poisoned_cache(8, dtype)
    row = torch.tensor([5, 2, 7, 0], dtype=torch.int32)
    positions = torch.arange(num_tokens)
    write_kv(key, value, cache, row[positions // BLOCK].long() * BLOCK + positions % BLOCK)
    keys, values = read_kv(cache, row, num_tokens)
    assert torch.equal(keys, key.transpose(0, 1))
    assert torch.equal(values, value.transpose(0, 1))


def test_pad_slots_write_nothing_and_all_other_slots_keep_what_they_hold() -> None:
    key, value = random_tensors(torch.float32, (4, KV_HEADS, HEAD), (4, KV_HEADS, HEAD))
    cache = poisoned_cache(3, torch.float32)
    # More slots than tokens: the rest belongs to padding.
    write_kv(key, value, cache, torch.tensor([-1, BLOCK + 3, -1, 2 * BLOCK, BLOCK + 5, 7]))
    written = ~cache.isnan().any(-1)
    assert written.nonzero().tolist() == [[1, 0, 3], [1, 1, 3], [2, 0, 0], [2, 1, 0]]
    assert torch.equal(cache[1, :, 3, :HEAD], key[1])
    assert torch.equal(cache[2, :, 0, HEAD:], value[3])


@pytest.mark.parametrize("slots", [[-1, -1], []], ids=["all_padded", "no_tokens"])
def test_a_rank_that_owns_none_of_the_tokens_writes_nothing(slots: list[int]) -> None:
    key, value = random_tensors(torch.float32, (len(slots), KV_HEADS, HEAD), (len(slots), KV_HEADS, HEAD))
    cache = poisoned_cache(2, torch.float32)
    write_kv(key, value, cache, torch.tensor(slots, dtype=torch.int64))
    assert cache.isnan().all()


def test_what_lies_behind_the_last_token_is_never_read() -> None:
    """Blocks are reused without being cleared: a NaN behind the end must not come back."""
    cache = poisoned_cache(4, torch.float32)
    cache[1, :, :3] = 1.0
    keys, values = read_kv(cache, torch.tensor([1, 2, 3], dtype=torch.int32), 3)
    assert keys.shape == values.shape == (KV_HEADS, 3, HEAD)
    assert keys.isfinite().all()
    assert values.isfinite().all()
