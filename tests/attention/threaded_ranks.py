# SPDX-License-Identifier: Apache-2.0
"""One step of attention on N ranks without an engine: one thread per rank, collectives through shared lists.

The oracle is full attention in float64 over the whole sequences.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from vllm_dcp_hybrid.worker.slot_mapping import compute_slot_mapping_torch

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

    def positions(self) -> torch.Tensor:
        """Of the new tokens."""
        return torch.cat([torch.arange(c, c + q) for c, q in self.requests])

    def slots(self, sizes: Sizes, rank: int) -> torch.Tensor:
        """Of the new tokens on one rank, and some padding."""
        return slots_of(sizes, rank, self.starts, self.positions(), self.table)

    def context_slots(self, sizes: Sizes, rank: int, row: int) -> torch.Tensor:
        """Of the tokens of one request before its new ones."""
        context = self.requests[row][0]
        return slots_of(sizes, rank, [0, context], torch.arange(context), self.table[row : row + 1])

    def common_metadata(self, metadata_class: Any, slots: torch.Tensor, **fields: Any) -> Any:
        """vLLM's ``CommonAttentionMetadata`` of the step."""
        starts = torch.tensor(self.starts, dtype=torch.int32)
        return metadata_class(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(self.seq_lens, dtype=torch.int32),
            num_reqs=len(self.seq_lens),
            num_actual_tokens=self.starts[-1],
            max_query_len=max(q for _, q in self.requests),
            max_seq_len=max(self.seq_lens),
            block_table_tensor=self.table,
            slot_mapping=slots,
            **fields,
        )


def slots_of(sizes: Sizes, rank: int, starts: list[int], positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The slots of a batch's tokens on one rank."""
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


def run_on_all_ranks(
    sizes: Sizes, collectives: ThreadedCollectives, step: Callable[[int], torch.Tensor]
) -> torch.Tensor:
    """The outputs ``[T, H, D]`` of ``step(rank)`` on all ranks, side by side: ``[T, H * N, D]``."""
    results: list[Any] = [None] * sizes.dcp
    errors: list[BaseException] = []

    def be_rank(rank: int) -> None:
        CURRENT.group = SimpleNamespace(world_size=sizes.dcp, rank_in_group=rank, device_group=None)
        try:
            results[rank] = step(rank)
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
    return torch.cat(results, dim=1)


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
