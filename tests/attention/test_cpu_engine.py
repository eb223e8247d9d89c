# SPDX-License-Identifier: Apache-2.0
"""The whole CPU engine on N ranks, without an engine: one thread per rank, collectives through shared lists.

Everything between vLLM's interfaces is real: the builder, the plan, slot mapping, cache writes, attention, exchange and
combine.  The oracle is full attention in float64 over the whole sequences.
"""

from __future__ import annotations

import importlib
import math
import random
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from vllm_dcp_hybrid.attention import transport  # noqa: E402
from vllm_dcp_hybrid.geometry import GroupGeometry  # noqa: E402
from vllm_dcp_hybrid.placement import Placement  # noqa: E402
from vllm_dcp_hybrid.worker.slot_mapping import compute_slot_mapping_torch  # noqa: E402

pytestmark = pytest.mark.contract

BLOCK = 32
HEAD_SIZE = 32
NUM_BLOCKS = 64
CURRENT = threading.local()


class ThreadedCollectives:
    """What `torch.distributed` does in `transport`, among threads; refuses ranks that disagree on what they do."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size, timeout=30)
        self.sent: list[Any] = [None] * world_size
        self.world_size = world_size
        self.calls: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in range(world_size)]

    def _share(self, name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        rank = CURRENT.group.rank_in_group
        self.calls[rank].append((name, tuple(tensor.shape)))
        self.sent[rank] = (name, tensor)
        self.barrier.wait()
        everything = list(self.sent)
        assert {(n, t.shape, t.dtype) for n, t in everything} == {(name, tensor.shape, tensor.dtype)}
        copies = [t.clone() for _, t in everything]
        self.barrier.wait()
        return copies

    def all_gather_into_tensor(self, out: torch.Tensor, tensor: torch.Tensor, group: Any) -> None:
        out.copy_(torch.cat(self._share("all_gather", tensor)))

    def reduce_scatter_tensor(self, out: torch.Tensor, tensor: torch.Tensor, group: Any) -> None:
        total = torch.stack(self._share("reduce_scatter", tensor)).sum(0)
        out.copy_(total.chunk(self.world_size)[CURRENT.group.rank_in_group])

    def all_to_all_single(self, out: torch.Tensor, tensor: torch.Tensor, group: Any) -> None:
        rank = CURRENT.group.rank_in_group
        chunks = [sent.chunk(self.world_size)[rank] for sent in self._share("all_to_all", tensor)]
        out.copy_(torch.cat(chunks))


@dataclass(frozen=True)
class Sizes:
    dcp: int
    interleave: int = 1
    heads: int = 2
    kv_heads: int = 1
    dtype: torch.dtype = torch.float32
    backend: str = "ag_rs"
    soft_cap: float = 0.0


@pytest.fixture(scope="module")
def cpu() -> Any:
    """The module of the CPU engine; vLLM is imported with it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module("vllm_dcp_hybrid.attention.cpu")
    return module


@dataclass
class Batch:
    """`requests` are (context, new tokens); the tensors are equal on all ranks."""

    requests: list[tuple[int, int]]
    num_padded_rows: int = 0

    def make(self, sizes: Sizes, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(sizes.dtype)

        self.keys = [randn(c + q, sizes.kv_heads, HEAD_SIZE) for c, q in self.requests]
        self.values = [randn(c + q, sizes.kv_heads, HEAD_SIZE) for c, q in self.requests]
        total = sizes.heads * sizes.dcp
        self.queries = [randn(q, total, HEAD_SIZE) for _, q in self.requests]
        self.starts = [0]
        for _, query_len in self.requests:
            self.starts.append(self.starts[-1] + query_len)
        self.starts += [self.starts[-1]] * self.num_padded_rows
        self.seq_lens = [c + q for c, q in self.requests] + [0] * self.num_padded_rows
        ids = random.Random(seed).sample(range(1, NUM_BLOCKS), NUM_BLOCKS - 1)
        columns = max(-(-length // (BLOCK * sizes.dcp)) for length in self.seq_lens)
        self.table = torch.zeros(len(self.seq_lens), columns, dtype=torch.int32)
        for row, length in enumerate(self.seq_lens):
            for column in range(-(-length // (BLOCK * sizes.dcp))):
                self.table[row, column] = ids.pop()

    def new(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """The new tokens of per-sequence tensors, flattened over the batch."""
        return torch.cat([t[len(t) - q :] for t, (_, q) in zip(tensors, self.requests, strict=True)])

    def expected(self, sizes: Sizes, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """[T, H * N, D] full causal attention, every operation in `dtype`."""
        outs = []
        for (context, query), q, k, v in zip(self.requests, self.queries, self.keys, self.values, strict=True):
            # Heads of each rank, grouped by KV head.
            repeat = sizes.heads // sizes.kv_heads
            kk, vv = (x.to(dtype).repeat_interleave(repeat, 1).repeat(1, sizes.dcp, 1) for x in (k, v))
            logits = torch.einsum("thd,shd->hts", q.to(dtype), kk) * HEAD_SIZE**-0.5
            if sizes.soft_cap:
                logits = sizes.soft_cap * torch.tanh(logits / sizes.soft_cap)
            hidden = torch.arange(context + query) > torch.arange(query)[:, None] + context
            weights = logits.masked_fill(hidden, -math.inf).softmax(-1)
            outs.append(torch.einsum("hts,shd->thd", weights, vv))
        return torch.cat(outs)


def run_rank(cpu: Any, sizes: Sizes, batch: Batch, results: list[Any]) -> None:
    """One rank's step: context in the cache already, then the new tokens as vLLM's attention layer hands them over."""
    rank = CURRENT.group.rank_in_group
    geometry = GroupGeometry(
        placement=Placement.SHARDED,
        block_size=BLOCK,
        dcp_world_size=sizes.dcp,
        interleave_size=sizes.interleave,
    )
    cache = torch.full((NUM_BLOCKS, sizes.kv_heads, BLOCK, 2 * HEAD_SIZE), math.nan, dtype=sizes.dtype)

    def slots_of(starts: list[int], positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        slots = torch.full((len(positions) + 3,), -7, dtype=torch.int64)
        compute_slot_mapping_torch(
            torch.tensor(starts, dtype=torch.int32),
            positions,
            table,
            slots,
            block_size=BLOCK,
            kernel_block_size=BLOCK,
            dcp_world_size=sizes.dcp,
            dcp_rank=rank,
            interleave_size=sizes.interleave,
        )
        return slots

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
        slots = slots_of([0, context], torch.arange(context), batch.table[row : row + 1])
        key, value = batch.keys[row][:context], batch.values[row][:context]
        impl.do_kv_cache_update(None, key, value, cache, slots)

    positions = torch.cat([torch.arange(c, c + q) for c, q in batch.requests])
    slots = slots_of(batch.starts, positions, batch.table)
    builder = object.__new__(cpu.DCPCPUAttentionMetadataBuilder)
    builder.dcp_rank, builder.geometry = rank, geometry
    starts = torch.tensor(batch.starts, dtype=torch.int32)
    common = cpu.CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(batch.seq_lens, dtype=torch.int32),
        num_reqs=len(batch.seq_lens),
        num_actual_tokens=batch.starts[-1],
        max_query_len=max(q for _, q in batch.requests),
        max_seq_len=max(batch.seq_lens),
        block_table_tensor=batch.table,
        slot_mapping=slots,
    )
    metadata = builder.build(0, common)
    key, value = batch.new(batch.keys), batch.new(batch.values)
    query = torch.cat(batch.queries)[:, rank * sizes.heads : (rank + 1) * sizes.heads]
    impl.do_kv_cache_update(None, key, value, cache, slots)
    output = torch.full_like(query, math.nan)
    results[rank] = impl.forward(None, query, key, value, cache, metadata, output)


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
        results: list[Any] = [None] * sizes.dcp
        errors: list[BaseException] = []

        def be_rank(rank: int) -> None:
            CURRENT.group = SimpleNamespace(world_size=sizes.dcp, rank_in_group=rank, device_group=None)
            try:
                run_rank(cpu, sizes, batch, results)
            except BaseException as error:  # noqa: BLE001  # raised again below
                errors.append(error)
                collectives.barrier.abort()

        threads = [threading.Thread(target=be_rank, args=(rank,)) for rank in range(sizes.dcp)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        real = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
        if errors:
            raise (real or errors)[0]
        return torch.cat(results, dim=1), collectives.calls

    return run


def check(simulate: Callable[..., Any], sizes: Sizes, batch: Batch, seed: int = 0) -> list[Any]:
    found, calls = simulate(sizes, batch, seed)
    exact = batch.expected(sizes)
    assert found.isfinite().all()
    plain_error = (batch.expected(sizes, sizes.dtype).double() - exact).abs().max()
    # Noise of float32 beside, for a plain computation may be lucky.
    allowed = 2 * plain_error + 4 * torch.finfo(torch.float32).eps * exact.abs().max()
    error = (found.double() - exact).abs().max()
    assert error <= allowed, (float(error), float(allowed))
    return calls


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
