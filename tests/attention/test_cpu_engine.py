# SPDX-License-Identifier: Apache-2.0
"""The whole CPU engine on N ranks, without an engine: one thread per rank, collectives through shared lists.

Everything between vLLM's interfaces is real: the builder, the plan, slot mapping, cache writes, attention, exchange and
combine.  The oracle is full attention in float64 over the whole sequences.
"""

from __future__ import annotations

import importlib
import math
import random
import warnings
from collections.abc import Callable
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
from vllm_dcp_hybrid.geometry import GroupGeometry  # noqa: E402
from vllm_dcp_hybrid.placement import Placement  # noqa: E402

pytestmark = pytest.mark.contract


@pytest.fixture(scope="module")
def cpu() -> Any:
    """The module of the CPU engine; vLLM is imported with it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module("vllm_dcp_hybrid.attention.cpu")
    return module


def step_of_rank(cpu: Any, sizes: Sizes, batch: Batch, rank: int) -> torch.Tensor:
    """Context in the cache already, then the new tokens as vLLM's attention layer hands them over."""
    shape = cpu.DCPCPUAttentionBackend.get_kv_cache_shape(NUM_BLOCKS, BLOCK, sizes.kv_heads, HEAD_SIZE)
    cache = torch.full(shape, math.nan, dtype=sizes.dtype)
    impl = cpu.DCPCPUAttentionImpl(
        num_heads=sizes.heads,
        head_size=HEAD_SIZE,
        scale=HEAD_SIZE**-0.5,
        num_kv_heads=sizes.kv_heads,
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype="auto",
        logits_soft_cap=sizes.soft_cap or None,
    )
    for row, (context, _) in enumerate(batch.requests):
        key, value = batch.keys[row][:context], batch.values[row][:context]
        impl.do_kv_cache_update(None, key, value, cache, batch.context_slots(sizes, rank, row))

    slots = batch.slots(sizes, rank)
    builder = object.__new__(cpu.DCPCPUAttentionMetadataBuilder)
    builder.dcp_rank = rank
    builder.geometry = GroupGeometry(
        placement=Placement.SHARDED,
        block_size=BLOCK,
        dcp_world_size=sizes.dcp,
        interleave_size=sizes.interleave,
    )
    metadata = builder.build(0, batch.common_metadata(cpu.CommonAttentionMetadata, slots))
    key, value = batch.new(batch.keys), batch.new(batch.values)
    query = torch.cat(batch.queries)[:, rank * sizes.heads : (rank + 1) * sizes.heads]
    impl.do_kv_cache_update(None, key, value, cache, slots)
    output = torch.full_like(query, math.nan)
    result: torch.Tensor = impl.forward(None, query, key, value, cache, metadata, output)
    return result


@pytest.fixture
def simulate(cpu: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[Sizes, Batch], Any]:
    """Run one step on all ranks: (outputs [T, H * N, D], the collectives of each rank)."""

    def run(sizes: Sizes, batch: Batch, seed: int = 0) -> tuple[torch.Tensor, list[Any]]:
        batch.make(sizes, seed)
        collectives = ThreadedCollectives(sizes.dcp)
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(dcp_comm_backend=sizes.backend),
            model_config=SimpleNamespace(dtype=sizes.dtype),
            cache_config=SimpleNamespace(block_size=BLOCK),
        )
        stock = importlib.import_module("vllm.v1.attention.backends.cpu_attn")
        for module in (cpu, stock):  # stock's asks from 0.24 on
            monkeypatch.setattr(module, "get_current_vllm_config", lambda: config, raising=False)
        monkeypatch.setattr(cpu, "get_dcp_group", lambda: CURRENT.group)
        monkeypatch.setattr(transport, "dist", collectives)
        monkeypatch.setattr(cpu.exchange, "MAX_ROUND_BYTES", 64 * 2**20)
        found = run_on_all_ranks(sizes, collectives, lambda rank: step_of_rank(cpu, sizes, batch, rank))
        return found, collectives.calls

    return run


MIXED = [(0, 5), (1, 1), (70, 1), (33, 4), (0, 1), (2, 3), (BLOCK, 1), (BLOCK - 1, 2), (5, 1)]
each_backend = pytest.mark.parametrize("backend", ["ag_rs", "a2a"])
each_dcp = pytest.mark.parametrize("dcp", [1, 2, 3, 4])
each_interleave = pytest.mark.parametrize("interleave", [1, 16, BLOCK])


@each_backend
@each_dcp
@each_interleave
def test_all_kinds_of_rows_in_one_batch_are_full_attention(
    simulate: Any, dcp: int, interleave: int, backend: str
) -> None:
    check(simulate, Sizes(dcp, interleave, backend=backend), Batch(MIXED, num_padded_rows=2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dcp", [2, 4])
@each_backend
def test_low_precision_is_as_good_as_a_plain_computation_in_it(
    simulate: Any, dtype: torch.dtype, dcp: int, backend: str
) -> None:
    check(simulate, Sizes(dcp, 16, dtype=dtype, backend=backend), Batch(MIXED), seed=3)


@each_dcp
@each_interleave
def test_case_15_ranks_with_nothing_count_for_nothing(simulate: Any, dcp: int, interleave: int) -> None:
    """CASES 15: L in 1..N+1, and L=1 beside L=5B: no NaN, no empty rank with an LSE of 0."""
    for length in range(1, dcp + 2):
        # The last of `length` tokens alone, and all but the first.
        check(simulate, Sizes(dcp, interleave), Batch([(length - 1, 1), (1, length), (length, 1)]), seed=length)
    check(simulate, Sizes(dcp, interleave), Batch([(0, 1), (5 * BLOCK - 1, 1), (1, 1)]))


@pytest.mark.parametrize("dcp", [2, 3])
@each_interleave
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_lengths_around_interleaves_and_blocks(simulate: Any, dcp: int, interleave: int, offset: int) -> None:
    edges = {interleave, interleave * dcp, BLOCK, BLOCK * dcp, 2 * BLOCK * dcp}
    lengths = sorted({max(edge + offset, 1) for edge in edges})
    check(simulate, Sizes(dcp, interleave), Batch([(length, 1) for length in lengths]))
    check(simulate, Sizes(dcp, interleave), Batch([(length, 3) for length in lengths]))


@each_backend
def test_case_08_gqa_heads_come_back_to_the_rank_that_asked(simulate: Any, backend: str) -> None:
    """CASES 8: two KV heads per rank with unequal values, three query heads each."""
    batch = Batch(MIXED)
    sizes = Sizes(2, heads=6, kv_heads=2, backend=backend)
    check(simulate, sizes, batch)


def test_a_soft_cap_holds_over_all_ranks(simulate: Any) -> None:
    check(simulate, Sizes(2, 16, soft_cap=3.0), Batch(MIXED))


@each_backend
def test_case_21_all_ranks_make_the_same_collectives(simulate: Any, backend: str) -> None:
    """CASES 21: a context of one token leaves three of four ranks empty; unequal calls would be refused."""
    calls = check(simulate, Sizes(4, 16, backend=backend), Batch([(1, 1), (0, 3)]))
    assert calls[0]
    assert all(of_rank == calls[0] for of_rank in calls)


def test_a_step_without_context_makes_no_collective(simulate: Any) -> None:
    calls = check(simulate, Sizes(4), Batch([(0, 5), (0, 1), (0, 40)]))
    assert calls == [[], [], [], []]


@each_backend
def test_a_decode_step_exchanges_once(simulate: Any, backend: str) -> None:
    """One gather of queries and one exchange for all rows, decode and context alike."""
    calls = check(simulate, Sizes(2, backend=backend), Batch([(9, 1), (3, 2), (40, 1)]))
    names = [name for name, _ in calls[0]]
    assert (
        names == {"ag_rs": ["all_gather", "all_gather", "reduce_scatter"], "a2a": ["all_gather", "all_to_all"]}[backend]
    )


@each_dcp
def test_random_batches_are_full_attention(simulate: Any, dcp: int) -> None:
    rng = random.Random(dcp)
    for seed in range(8):
        requests = [
            (rng.choice([0, rng.randrange(1, 150)]), rng.choice([1, 1, rng.randrange(1, 20)])) for _ in range(6)
        ]
        sizes = Sizes(dcp, rng.choice([1, 2, 8, 16, BLOCK]), backend=rng.choice(["ag_rs", "a2a"]))
        check(simulate, sizes, Batch(requests, num_padded_rows=rng.randrange(3)), seed=seed)


def test_metadata_of_a_foreign_kind_goes_to_stock(cpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Profile runs have no metadata, cross attention has its own."""
    impl = object.__new__(cpu.DCPCPUAttentionImpl)
    seen = []
    monkeypatch.setattr(cpu.CPUAttentionBackendImpl, "forward", lambda self, *args: seen.append(args))
    arguments = [torch.zeros(1) for _ in range(5)]
    impl.forward(*arguments, None, arguments[0])
    assert len(seen) == 1
    assert all(given is passed for given, passed in zip(arguments, seen[0], strict=False))
