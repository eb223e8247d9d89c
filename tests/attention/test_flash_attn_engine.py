# SPDX-License-Identifier: Apache-2.0
"""The CUDA engine on N ranks without a GPU: FlashAttention's own calls are answered by torch, all else is real.

Real are the release's builder, metadata, cache shape and cache writes, and our rows, cache views, plan of calls,
exchange and merge.  The stand-ins check what the kernels require.
"""

from __future__ import annotations

import importlib
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from threaded_ranks import (  # noqa: E402
    BLOCK,
    CURRENT,
    HEAD_SIZE,
    NUM_BLOCKS,
    Batch,
    Sizes,
    ThreadedCollectives,
    check,
    run_on_all_ranks,
)

from vllm_dcp_hybrid.attention import transport  # noqa: E402
from vllm_dcp_hybrid.attention.combine import combine_torch  # noqa: E402
from vllm_dcp_hybrid.attention.local_lens import fill_local_lens_torch  # noqa: E402
from vllm_dcp_hybrid.cli.installed import find_vllm  # noqa: E402
from vllm_dcp_hybrid.declarations import FEATURE_PATCHES  # noqa: E402
from vllm_dcp_hybrid.patching import select  # noqa: E402

pytestmark = pytest.mark.contract

_OURS = "vllm_dcp_hybrid.attention"
_CUDA_MODULES = (f"{_OURS}.flash_attn", f"{_OURS}.flash_attn_kv_first")
_VLLM = find_vllm()
_REPLACEMENTS = {patch.name: patch.replacement for patch in (select(FEATURE_PATCHES, _VLLM.version) if _VLLM else ())}

if _REPLACEMENTS.get("worker-backends", "on_cpu").endswith("on_cpu"):
    pytest.skip("no release whose CUDA engine is ours", allow_module_level=True)


def attention_of_row(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, soft_cap: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[t, H, D]`` x ``[s, kv_heads, D]`` -> out ``[t, H, D]``, lse ``[H, t]``; no keys give zeros and -inf."""
    repeat = query.shape[1] // keys.shape[1]
    kk, vv = (x.float().repeat_interleave(repeat, 1) for x in (keys, values))
    logits = torch.einsum("thd,shd->hts", query.float(), kk) * scale
    if soft_cap:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    if causal:
        hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1 + logits.shape[2] - logits.shape[1])
        logits = logits.masked_fill(hidden, -math.inf)
    lse = torch.logsumexp(logits, dim=-1)
    weights = torch.exp(logits - lse.unsqueeze(-1)) if keys.shape[0] else logits
    return torch.einsum("hts,shd->thd", weights, vv), lse


def paged(cache: torch.Tensor, block_table: torch.Tensor, row: int, length: int) -> torch.Tensor:
    """The first ``length`` tokens of a row."""
    assert cache.shape[1] == BLOCK
    assert cache.stride(-1) == 1
    assert all(stride * cache.element_size() % 16 == 0 for stride in cache.stride()[:-1])
    return cache[block_table[row].long()].flatten(0, 1)[:length]


def varlen_stand_in(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    softcap: float,
    causal: bool,
    return_softmax_lse: bool,
    fa_version: int,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``flash_attn_varlen_func`` as the engine calls it."""
    assert return_softmax_lse
    assert fa_version in (2, 3)
    starts = cu_seqlens_q.tolist()
    assert starts[0] == 0
    assert out.shape == q.shape
    lse = torch.full((q.shape[1], q.shape[0]), -math.inf)
    out.zero_()
    for row, (begin, end) in enumerate(pairwise(starts)):
        assert end - begin <= max_seqlen_q
        if block_table is None:
            assert cu_seqlens_k is not None
            keys, values = k[cu_seqlens_k[row] : cu_seqlens_k[row + 1]], v[cu_seqlens_k[row] : cu_seqlens_k[row + 1]]
        else:
            assert seqused_k is not None
            keys, values = (paged(cache, block_table, row, int(seqused_k[row])) for cache in (k, v))
        assert len(keys) <= max_seqlen_k
        row_out, row_lse = attention_of_row(q[begin:end], keys, values, softmax_scale, softcap, causal)
        if fa_version == 2 and max_seqlen_q > 1 and not len(keys):
            # Left unwritten, as seen on an H200.
            row_out, row_lse = torch.full_like(row_out, 7.0), torch.ones_like(row_lse)
        out[begin:end], lse[:, begin:end] = row_out.to(out.dtype), row_lse
    return out, lse


def decode_rows_stand_in(
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
) -> torch.Tensor:
    """``fa3.attend_decode_rows``: queries and out ``[N, T, h, D]``, lse ``[N, T, h]``."""
    lse = torch.full(queries.shape[:3], -math.inf)
    for row, length in enumerate(seqused_k.tolist()):
        assert length <= max_seqlen_k
        kk, vv = (paged(cache, block_table, row, length) for cache in (keys, values))
        row_out, row_lse = attention_of_row(queries[:, row], kk, vv, softmax_scale, softcap, causal=False)
        out[:, row], lse[:, row] = row_out.to(out.dtype), row_lse.t()
    return lse


def write_stand_in(
    key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, *_: Any
) -> None:
    """``reshape_and_cache_flash``: ``[num_blocks, block_size, num_kv_heads, D]`` caches."""
    for token, slot in enumerate(slots[: len(key)].tolist()):
        if slot >= 0:
            keys[slot // BLOCK, slot % BLOCK] = key[token]
            values[slot // BLOCK, slot % BLOCK] = value[token]


def merge_stand_in(
    output: torch.Tensor, prefix: torch.Tensor, prefix_lse: torch.Tensor, suffix: torch.Tensor, suffix_lse: torch.Tensor
) -> None:
    """``merge_attn_states``: LSEs are ``[H, T]``."""
    outs, lses = torch.stack((prefix, suffix)), torch.stack((prefix_lse.t(), suffix_lse.t()))
    output.copy_(combine_torch(outs, lses)[0])


@pytest.fixture(scope="module")
def cuda() -> Iterator[Any]:
    """`module`, `backend` of this release, and `stock`, which a CPU build cannot import without the kernels' names."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(
            importlib.import_module("vllm.v1.attention.backends.fa_utils"),
            "flash_attn_varlen_func",
            varlen_stand_in,
            raising=False,
        )
        startup = importlib.import_module("vllm_dcp_hybrid.worker.startup")
        registered: dict[str, str] = {}
        patch.setattr(startup, "begin", lambda worker, config, backends: registered.update(backends))
        replacement = getattr(startup, _REPLACEMENTS["worker-backends"].partition(":")[2])
        replacement(lambda config: None, None, (object(),), {})
        path, _, name = registered["FLASH_ATTN"].rpartition(".")
        yield SimpleNamespace(
            module=importlib.import_module(f"{_OURS}.flash_attn"),
            stock=importlib.import_module("vllm.v1.attention.backends.flash_attn"),
            backend=getattr(importlib.import_module(path), name),
        )
        for imported in _CUDA_MODULES:
            sys.modules.pop(imported, None)


def engine_config(sizes: Sizes) -> Any:
    """What the builder and the layer read of a `VllmConfig`."""
    return SimpleNamespace(
        model_config=SimpleNamespace(
            dtype=sizes.dtype,
            rswa_window=None,
            get_num_attention_heads=lambda _: sizes.heads,
            get_num_kv_heads=lambda _: sizes.kv_heads,
            get_head_size=lambda: HEAD_SIZE,
        ),
        parallel_config=SimpleNamespace(
            cp_kv_cache_interleave_size=sizes.interleave,
            dcp_comm_backend=sizes.backend,
            decode_context_parallel_size=sizes.dcp,
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        compilation_config=SimpleNamespace(
            cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: False), max_cudagraph_capture_size=16
        ),
        attention_config=SimpleNamespace(flash_attn_max_num_splits_for_cuda_graph=32),
        scheduler_config=SimpleNamespace(max_num_seqs=16, max_num_batched_tokens=512),
    )


def step_of_rank(cuda: Any, config: Any, sizes: Sizes, batch: Batch, rank: int, fa_version: int) -> torch.Tensor:
    """Context in the cache already, then the new tokens as vLLM's attention layer hands them over."""
    specs = importlib.import_module("vllm.v1.kv_cache_interface")
    backend = cuda.backend
    shape = backend.get_kv_cache_shape(NUM_BLOCKS, BLOCK, sizes.kv_heads, HEAD_SIZE)
    cache = torch.full(shape, math.nan, dtype=sizes.dtype)
    if shape[0] == 2:
        # Where hybrids share pages, the runner of these releases lays the blocks out one after the other all the same.
        cache = torch.full((NUM_BLOCKS, 2, *shape[2:]), math.nan, dtype=sizes.dtype).transpose(0, 1)
    # One KV head: as a view of the runner may have it, with a stride that nobody steps along.
    strides = list(cache.stride())
    strides[3] = 1
    cache = cache.as_strided(cache.shape, strides)
    impl = backend.get_impl_cls()(
        num_heads=sizes.heads,
        head_size=HEAD_SIZE,
        scale=HEAD_SIZE**-0.5,
        num_kv_heads=sizes.kv_heads,
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype="auto",
        logits_soft_cap=sizes.soft_cap or None,
    )
    impl.vllm_flash_attn_version = fa_version
    layer = SimpleNamespace(_q_scale=None, _k_scale=None, _v_scale=None)
    for row, (context, _) in enumerate(batch.requests):
        key, value = batch.keys[row][:context], batch.values[row][:context]
        impl.do_kv_cache_update(layer, key, value, cache, batch.context_slots(sizes, rank, row))

    spec = specs.FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=sizes.kv_heads, head_size=HEAD_SIZE, dtype=sizes.dtype
    )
    builder = backend.get_builder_cls()(spec, ["layer"], config, torch.device("cpu"))
    slots = batch.slots(sizes, rank)
    common = batch.common_metadata(
        cuda.module.CommonAttentionMetadata, slots, seq_lens_cpu_upper_bound=torch.tensor(batch.seq_lens)
    )
    metadata = builder.build(0, common)
    key, value = batch.new(batch.keys), batch.new(batch.values)
    query = torch.cat(batch.queries)[:, rank * sizes.heads : (rank + 1) * sizes.heads]
    impl.do_kv_cache_update(layer, key, value, cache, slots)
    output = torch.full_like(query, math.nan)
    result: torch.Tensor = impl.forward(layer, query, key, value, cache, metadata, output)
    return result


@pytest.fixture(params=[2, 3])
def simulate(cuda: Any, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Run one step on all ranks with FlashAttention 2 or 3: (outputs [T, H * N, D], the collectives of each rank)."""

    def run(sizes: Sizes, batch: Batch, seed: int = 0) -> tuple[torch.Tensor, list[Any]]:
        batch.make(sizes, seed)
        collectives = ThreadedCollectives(sizes.dcp)
        config = engine_config(sizes)
        module, stock = cuda.module, cuda.stock
        state = importlib.import_module("vllm.distributed.parallel_state")
        monkeypatch.setattr(module, "get_current_vllm_config", lambda: config)
        monkeypatch.setattr(stock, "get_current_vllm_config_or_none", lambda: config, raising=False)
        monkeypatch.setattr(stock, "flash_attn_supports_quant_query_input", lambda: False, raising=False)
        monkeypatch.setattr(stock, "reshape_and_cache_flash", write_stand_in, raising=False)
        for holder in (module, stock, state):
            monkeypatch.setattr(holder, "get_dcp_group", lambda: CURRENT.group, raising=False)
        monkeypatch.setattr(module, "fill_local_lens_triton", fill_local_lens_torch)
        monkeypatch.setattr(module, "merge_attn_states", merge_stand_in)
        monkeypatch.setattr(module.fa3, "attend_decode_rows", decode_rows_stand_in)
        monkeypatch.setattr(transport, "dist", collectives)
        monkeypatch.setattr(module.exchange, "MAX_ROUND_BYTES", 64 * 2**20)

        def step(rank: int) -> torch.Tensor:
            return step_of_rank(cuda, config, sizes, batch, rank, request.param)

        return run_on_all_ranks(sizes, collectives, step), collectives.calls

    return run


DECODES = [(1, 1), (70, 1), (0, 1), (BLOCK, 1), (3 * BLOCK - 1, 1), (5, 1)]
CONTEXTS = [(33, 4), (2, 3), (BLOCK - 1, 2)]
PREFILLS = [(0, 5), (0, 40)]
each_backend = pytest.mark.parametrize("backend", ["ag_rs", "a2a"])


@each_backend
@pytest.mark.parametrize("interleave", [1, 16, BLOCK])
@pytest.mark.parametrize("dcp", [2, 4])
def test_a_decode_step_is_full_attention(simulate: Any, dcp: int, interleave: int, backend: str) -> None:
    check(simulate, Sizes(dcp, interleave, backend=backend), Batch(DECODES))


@each_backend
@pytest.mark.parametrize("interleave", [1, 16, BLOCK])
@pytest.mark.parametrize("dcp", [2, 4])
def test_all_kinds_of_rows_in_one_step_are_full_attention(
    simulate: Any, dcp: int, interleave: int, backend: str
) -> None:
    check(simulate, Sizes(dcp, interleave, backend=backend), Batch(DECODES + CONTEXTS + PREFILLS))


def test_a_step_without_context_makes_no_collective(simulate: Any) -> None:
    assert check(simulate, Sizes(2), Batch(PREFILLS)) == [[], []]


def test_a_soft_cap_holds_over_all_ranks(simulate: Any) -> None:
    check(simulate, Sizes(2, heads=4, soft_cap=3.0), Batch(DECODES + CONTEXTS))


def test_half_precision(simulate: Any) -> None:
    check(simulate, Sizes(2, 16, dtype=torch.bfloat16), Batch(DECODES + CONTEXTS + PREFILLS))


@each_backend
def test_the_ranks_exchange_by_our_own_collectives_and_combine(
    simulate: Any, cuda: Any, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """Stock's a2a buffers alias its input (0.21 - 0.23), and its combine lets 0 * NaN through (up to 0.24)."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("stock's exchange was called")

    for name in ("cp_lse_ag_out_rs", "dcp_a2a_lse_reduce"):
        monkeypatch.setattr(cuda.stock, name, fail)
    calls = check(simulate, Sizes(2, backend=backend), Batch(DECODES + CONTEXTS))
    names = [name for name, _ in calls[0]]
    assert names[0] == "all_gather"
    assert ("reduce_scatter" in names) == (backend == "ag_rs")
    assert any("all_to_all" in name for name in names) == (backend == "a2a")
