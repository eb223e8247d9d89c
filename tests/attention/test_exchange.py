# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  # imports follow the check for torch
"""Exchange of attention between DCP ranks.

Run as a script, this file is one process of the gloo groups (see `gloo_results`).
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist

from vllm_dcp_hybrid.attention import exchange as module
from vllm_dcp_hybrid.attention.combine import combine_naive
from vllm_dcp_hybrid.attention.exchange import (
    by_rank,
    by_token,
    exchange_a2a,
    exchange_ag_rs,
    gather_queries,
    store_densely,
)
from vllm_dcp_hybrid.attention.transport import ProcessGroupTransport, PyNcclTransport, transport_of

NUM_PROCESSES = 4
WORLD_SIZES = (2, 4)
EXCHANGES = {"ag_rs": exchange_ag_rs, "a2a": exchange_a2a}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Case:
    num_tokens: int
    num_local_heads: int = 3
    head_size: int = 80
    dtype: torch.dtype = torch.float32
    has_sinks: bool = False
    stored_as: str = "tokens"
    max_round_bytes: int = module.MAX_ROUND_BYTES

    def __str__(self) -> str:
        options = ["has_sinks"] if self.has_sinks else []
        options += [f"stored_as_{self.stored_as}"] if self.stored_as != "tokens" else []
        options += ["rounds"] if self.max_round_bytes != module.MAX_ROUND_BYTES else []
        sizes = f"T{self.num_tokens}-h{self.num_local_heads}-D{self.head_size}"
        return "-".join([sizes, str(self.dtype).removeprefix("torch."), *options])


CASES = [Case(num_tokens, dtype=dtype) for num_tokens in (0, 1, 7, 33) for dtype in DTYPES]
CASES += [
    Case(7, num_local_heads=1, head_size=64, dtype=torch.bfloat16),
    Case(1, num_local_heads=1, head_size=5, dtype=torch.float16),
    Case(7, has_sinks=True),
    Case(7, dtype=torch.bfloat16, has_sinks=True),
    Case(7, stored_as="ranks"),
    Case(7, dtype=torch.bfloat16, stored_as="heads"),
    Case(33, dtype=torch.bfloat16, stored_as="ranks", max_round_bytes=20_000),
    Case(33, stored_as="heads", max_round_bytes=20_000),
    Case(33, dtype=torch.bfloat16, max_round_bytes=20_000),
    Case(33, has_sinks=True, max_round_bytes=1),
]
each_world = pytest.mark.parametrize("world_size", WORLD_SIZES)
each_exchange = pytest.mark.parametrize("name", EXCHANGES)
each_case = pytest.mark.parametrize("case", CASES, ids=str)


@dataclass
class Group:
    world_size: int
    rank_in_group: int
    device_group: Any = None
    device_communicator: Any = None


def make_partials(case: Case, world_size: int):
    """The same on every rank: q [N, T, h, D], outs [N, T, H, D], lses [N, T, H], sinks [H]; empty ranks hold NaN.

    The last row has nothing on any rank; in the others, rank t % N has nothing for token t.
    """
    generator = torch.Generator().manual_seed(world_size * 1000 + case.num_tokens * 10 + case.num_local_heads)
    num_heads = case.num_local_heads * world_size
    shape = (world_size, case.num_tokens, num_heads)
    q = torch.randn(world_size, case.num_tokens, case.num_local_heads, case.head_size, generator=generator)
    outs = torch.randn(*shape, case.head_size, generator=generator).to(case.dtype)
    lses = torch.randn(shape, generator=generator) * 3 + 4
    for token in range(case.num_tokens):
        empty_ranks = slice(None) if 1 < case.num_tokens == token + 1 else token % world_size
        outs[empty_ranks, token] = math.nan
        lses[empty_ranks, token] = (-math.inf, math.nan, math.inf)[token % 3]
    sinks = torch.randn(num_heads, generator=generator) * 3 if case.has_sinks else None
    return q.to(case.dtype), outs, lses, sinks


# How the partial outputs and their LSEs lie in memory: dimensions of [N, T, h, ...] in their order there.
STORED_AS = {
    "tokens": ((1, 0, 2, 3), (1, 0, 2)),  # [T, H, D] and [T, H]
    "ranks": ((0, 1, 2, 3), (1, 2, 0)),  # FlashAttention 3 with the ranks as query positions
    "heads": ((1, 0, 2, 3), (0, 2, 1)),  # FlashAttention's [H, T] for rows of any length
}


def store_as(of_ranks, order):
    """The same values, stored with the dimensions in `order`."""
    return of_ranks.permute(order).contiguous().permute([order.index(dim) for dim in range(len(order))])


def own_heads(case: Case, rank: int) -> slice:
    return slice(rank * case.num_local_heads, (rank + 1) * case.num_local_heads)


def run_case(case: Case, group: Group) -> dict[str, Any]:
    q, outs, lses, sinks = make_partials(case, group.world_size)
    rank = group.rank_in_group
    out, lse = (
        store_as(by_rank(of_tokens, group.world_size), order)
        for of_tokens, order in zip((outs[rank], lses[rank]), STORED_AS[case.stored_as], strict=True)
    )
    before = out.clone()
    local_sinks = None if sinks is None else sinks[own_heads(case, rank)]
    results: dict[str, Any] = {"q": gather_queries(q[rank], group)}
    module.MAX_ROUND_BYTES = case.max_round_bytes
    for name, exchange in EXCHANGES.items():
        into = torch.full((case.num_tokens, case.num_local_heads, case.head_size), 7.0, dtype=case.dtype)
        written, lse_again = exchange(out, lse, group, sinks=local_sinks, into=into)
        assert written is into
        results[name] = exchange(out, lse, group, sinks=local_sinks)
        assert torch.equal(into, results[name][0])
        assert torch.equal(lse_again, results[name][1])
        result_storage, out_storage = (x.untyped_storage().data_ptr() for x in (results[name][0], out))
        assert case.num_tokens == 0 or result_storage != out_storage
        assert torch.equal(out.nan_to_num(9.0), before.nan_to_num(9.0))
    return results


@pytest.fixture(scope="module")
def gloo_results(tmp_path_factory: pytest.TempPathFactory):
    """{world size: [results of each case of each rank]}: one set of processes serves all cases and world sizes.

    Groups of 2 are halves of the 4 processes. The second half is looked at: its group ranks are not its process ranks.
    """
    folder = tmp_path_factory.mktemp("gloo")
    env = os.environ | {"PYTHONPATH": str(Path(module.__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, __file__, str(folder), str(rank)], env=env, stderr=subprocess.PIPE, text=True)
        for rank in range(NUM_PROCESSES)
    ]
    try:
        errors = [rank.communicate(timeout=600)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(errors)
    of_rank = [torch.load(folder / f"{rank}.pt") for rank in range(NUM_PROCESSES)]
    return {world_size: [results[world_size] for results in of_rank[-world_size:]] for world_size in WORLD_SIZES}


@each_case
@each_world
def test_gathered_queries_are_in_rank_order(gloo_results, world_size: int, case: Case) -> None:
    q, *_ = make_partials(case, world_size)
    for results in gloo_results[world_size]:
        gathered = results[CASES.index(case)]["q"]
        assert gathered.is_contiguous()
        assert torch.equal(gathered, q)
        for rank in range(world_size):
            assert torch.equal(by_token(gathered)[:, own_heads(case, rank)], q[rank])
        assert torch.equal(by_rank(by_token(gathered), world_size), gathered)


@each_case
@each_exchange
@each_world
def test_cases_08_16_18_each_rank_gets_its_own_heads_of_the_combined_output(
    gloo_results, world_size: int, name: str, case: Case
) -> None:
    """CASES 8, 16, 18: the slice of rank r is heads r*h .. r*h + h - 1; empty ranks and padded rows reach no sum."""
    _, outs, lses, sinks = make_partials(case, world_size)
    expected_out, expected_lse = combine_naive(outs, lses, sinks=sinks)
    # One rounding to the dtype, of a value below 4, plus float32 noise.
    tolerance = {torch.float32: 4e-6, torch.bfloat16: 4 * 2**-8, torch.float16: 4 * 2**-11}[case.dtype]
    for rank, results in enumerate(gloo_results[world_size]):
        out, lse = results[CASES.index(case)][name]
        assert out.dtype == case.dtype
        assert lse.dtype == torch.float32
        mine = own_heads(case, rank)
        torch.testing.assert_close(out.double(), expected_out[:, mine], rtol=0, atol=tolerance)
        torch.testing.assert_close(lse.double(), expected_lse[:, mine], rtol=2e-6, atol=2e-6)


@each_case
@each_world
def test_case_17_both_exchanges_round_once_and_agree_within_one_step_of_the_dtype(
    gloo_results, world_size: int, case: Case
) -> None:
    """CASES 17: shares that travelled in the dtype of the output would be several steps apart."""
    for results in gloo_results[world_size]:
        (ag_rs, _), (a2a, _) = (results[CASES.index(case)][name] for name in EXCHANGES)
        step = torch.finfo(case.dtype).eps * (4 if case.dtype is torch.float32 else 1)
        torch.testing.assert_close(ag_rs.float(), a2a.float(), rtol=step, atol=1e-6)


@each_exchange
def test_a_group_of_one_applies_the_same_rule_without_a_collective(name: str) -> None:
    case = Case(7, dtype=torch.bfloat16, has_sinks=True, max_round_bytes=2_000)
    _, outs, lses, sinks = make_partials(case, 1)
    out, lse = run_case(case, Group(1, 0))[name]
    expected_out, expected_lse = combine_naive(outs, lses, sinks=sinks)
    torch.testing.assert_close(out.double(), expected_out, rtol=0, atol=4 * 2**-8)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=2e-6, atol=2e-6)


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="6 gathered heads are not a multiple of 4 DCP ranks"):
        by_rank(torch.zeros(1, 6, 64), 4)


@pytest.mark.parametrize("num_tokens", [1, 7])
@pytest.mark.parametrize("stored_as", STORED_AS)
def test_lses_travel_as_they_are_stored_and_arrive_by_sender(stored_as: str, num_tokens: int) -> None:
    lses = store_as(torch.randn(2, num_tokens, 3), STORED_AS[stored_as][1])
    dense = store_densely(lses)
    assert dense.stored.data_ptr() == lses.data_ptr()
    of_all_ranks = dense.new_of_all_ranks(2)
    of_all_ranks[0], of_all_ranks[1] = dense.stored, dense.stored + 1
    assert torch.equal(dense.by_sender(of_all_ranks), torch.stack([lses, lses + 1]))


class RecordingCommunicator:
    """Stands for vLLM's PyNcclCommunicator: what is enqueued, in order."""

    disabled = False

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.calls.append(name)


def test_a_swap_of_outputs_and_lses_is_one_group_of_messages() -> None:
    communicator = RecordingCommunicator()
    group = Group(2, 0)
    group.device_communicator = type("Communicator", (), {"pynccl_comm": communicator})()
    transport = transport_of(group)
    assert isinstance(transport, PyNcclTransport)
    outs, lses = torch.zeros(2, 3, 4), torch.zeros(2, 3)
    transport.swap((outs.clone(), lses.clone()), (outs, lses))
    assert communicator.calls == ["group_start", *["send", "recv"] * 4, "group_end"]


def test_a_disabled_communicator_leaves_the_process_group() -> None:
    group = Group(2, 0)
    communicator = RecordingCommunicator()
    communicator.disabled = True
    group.device_communicator = type("Communicator", (), {"pynccl_comm": communicator})()
    assert isinstance(transport_of(group), ProcessGroupTransport)
    assert isinstance(transport_of(Group(2, 0)), ProcessGroupTransport)


def test_case_17_a_long_chunk_is_exchanged_in_rounds_of_bounded_memory() -> None:
    """CASES 17: 8,192 tokens of 32 heads of 256."""
    row_bytes = 32 * 256 * 4
    rounds = list(module._rounds(8192, row_bytes))
    assert [rows.start for rows in rounds[1:]] == [rows.stop for rows in rounds[:-1]]
    assert (rounds[0].start, rounds[-1].stop) == (0, 8192)
    assert max(rows.stop - rows.start for rows in rounds) * row_bytes <= 64 * 2**20


def be_rank(folder: Path, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=NUM_PROCESSES)
    results = {}
    for world_size in WORLD_SIZES:
        # Every process takes part in making every group, and works in its own.
        for first in range(0, NUM_PROCESSES, world_size):
            process_group = dist.new_group(list(range(first, first + world_size)))
            if first <= rank < first + world_size:
                group = Group(world_size, rank - first, process_group)
        results[world_size] = [run_case(case, group) for case in CASES]
    torch.save(results, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    be_rank(Path(sys.argv[1]), int(sys.argv[2]))
