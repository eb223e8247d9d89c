# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  # imports follow the check for torch
"""Slot mapping: three twins, one rule.

Run as a script, this file maps slots with the Triton kernel (see `triton_slots`).
"""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_dcp_hybrid.worker import slot_mapping as module
from vllm_dcp_hybrid.worker.slot_mapping import (
    PAD_SLOT_ID,
    compute_slot_mapping_torch,
    compute_slot_mapping_triton,
    slot_mapping_naive,
)


@dataclass(frozen=True)
class Sizes:
    block_size: int
    kernel_block_size: int
    interleave_size: int
    dcp_world_size: int

    def __str__(self) -> str:
        return f"B{self.block_size}-KB{self.kernel_block_size}-I{self.interleave_size}-N{self.dcp_world_size}"


SIZES = [
    Sizes(128, 64, 128, 4),
    Sizes(64, 16, 1, 2),
    Sizes(528, 16, 16, 2),
    Sizes(272, 16, 1, 4),
    Sizes(272, 16, 272, 2),
    Sizes(272, 16, 17, 2),
    Sizes(64, 16, 1, 1),
    Sizes(272, 16, 16, 1),
]
each_size = pytest.mark.parametrize("sizes", SIZES, ids=str)


@dataclass
class Batch:
    query_start_loc: list[int]
    positions: list[int]
    block_table: list[list[int]]
    num_padded_tokens: int


def make_batch(sizes: Sizes, lengths: list[tuple[int, int]], *, num_padding: int = 0, seed: int = 0) -> Batch:
    """A batch of (context length, query length) requests; kernel blocks in an order that no arithmetic produces."""
    rng = random.Random(seed)
    query_start_loc, positions = [0], []
    for context_len, query_len in lengths:
        positions += range(context_len, context_len + query_len)
        query_start_loc.append(len(positions))
    longest = max((context + query for context, query in lengths), default=1)
    virtual_block_size = sizes.block_size * sizes.dcp_world_size
    num_columns = -(-longest // virtual_block_size) * (sizes.block_size // sizes.kernel_block_size)
    ids = rng.sample(range(1, 1 + 2 * num_columns * max(len(lengths), 1)), num_columns * len(lengths))
    table = [ids[row * num_columns : (row + 1) * num_columns] for row in range(len(lengths))]
    return Batch(query_start_loc, positions, table, len(positions) + num_padding)


def naive(sizes: Sizes, batch: Batch, dcp_rank: int) -> list[int]:
    return slot_mapping_naive(**asdict(batch), dcp_rank=dcp_rank, **asdict(sizes))


def run_twin(twin, sizes: Sizes, batch: Batch, dcp_rank: int, *, stale_tail: int = 0) -> list[int]:
    """Slots by a tensor twin, over a poisoned slot mapping and a slice of a wider, poisoned block table."""
    num_rows, num_columns = len(batch.block_table), max(map(len, batch.block_table), default=1)
    wide = torch.full((num_rows + 2, num_columns + 5), -(10**6), dtype=torch.int32)
    for row, ids in enumerate(batch.block_table):
        wide[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    slots = torch.full((batch.num_padded_tokens,), -777, dtype=torch.int64)
    twin(
        torch.tensor(batch.query_start_loc, dtype=torch.int32),
        torch.tensor(batch.positions + [10**9] * stale_tail, dtype=torch.int64),
        wide[:, :num_columns],
        slots,
        dcp_rank=dcp_rank,
        **asdict(sizes),
    )
    return slots.tolist()


def edge_lengths(sizes: Sizes) -> list[tuple[int, int]]:
    """Prompts and decodes one either side of the interleave, the kernel block, the block and the virtual block."""
    edges = {1, sizes.interleave_size, sizes.kernel_block_size, sizes.block_size}
    edges |= {edge * sizes.dcp_world_size for edge in edges}
    lengths = sorted({max(edge + step, 1) for edge in edges for step in (-1, 0, 1)})
    return [(0, length) for length in lengths] + [(length, 1) for length in lengths] + [(5, 0), (7, 2)]


BATCHES = {
    "edges": (edge_lengths, {"num_padding": 300}),
    "empty": (lambda sizes: [], {"num_padding": 9}),
    "no_tokens_no_padding": (lambda sizes: [], {}),
    "padded_rows": (lambda sizes: [(0, 3), (sizes.block_size, 2), (0, 0), (0, 0)], {"num_padding": 4}),
    "one_long_prompt": (lambda sizes: [(0, 3 * sizes.block_size * sizes.dcp_world_size + 1)], {}),
    "many_decodes": (lambda sizes: [(7 * row, 1) for row in range(70)], {"num_padding": 2}),
}
each_batch = pytest.mark.parametrize("batch_name", BATCHES)


def build(batch_name: str, sizes: Sizes) -> Batch:
    lengths_of, options = BATCHES[batch_name]
    return make_batch(sizes, lengths_of(sizes), **options)


@pytest.fixture(scope="module")
def triton_slots(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, Sizes, int], list[int]]:
    """Slots of all batches by the Triton kernel under its interpreter, chosen before the import of triton."""
    pytest.importorskip("triton")
    result = tmp_path_factory.mktemp("triton") / "slots.pickle"
    root = str(Path(module.__file__).parents[2])
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, __file__, str(result)],
        check=False,
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return {
        (name, Sizes(*sizes), rank): slots for (name, sizes, rank), slots in pickle.loads(result.read_bytes()).items()
    }


@st.composite
def sizes_and_lengths(draw) -> tuple[Sizes, list[tuple[int, int]]]:
    kernel_block_size = draw(st.integers(1, 24))
    block_size = kernel_block_size * draw(st.integers(1, 6))
    divisors = [size for size in range(1, block_size + 1) if block_size % size == 0]
    sizes = Sizes(block_size, kernel_block_size, draw(st.sampled_from(divisors)), draw(st.integers(1, 5)))
    length = st.integers(0, 3 * block_size * sizes.dcp_world_size)
    return sizes, draw(st.lists(st.tuples(length, st.integers(0, 40)), max_size=4))


def check_partition(sizes: Sizes, batch: Batch) -> None:
    slots_of_rank = [naive(sizes, batch, rank) for rank in range(sizes.dcp_world_size)]
    used = set()
    for token in range(len(batch.positions)):
        placed = [(rank, slots[token]) for rank, slots in enumerate(slots_of_rank) if slots[token] != PAD_SLOT_ID]
        assert len(placed) == 1
        assert placed[0] not in used
        used.add(placed[0])


@each_size
def test_case_04_every_position_has_one_rank_and_slot_and_no_slot_is_used_twice(sizes: Sizes) -> None:
    """CASES 4: whole sequences, over several virtual blocks, and requests beside one another."""
    virtual_block_size = sizes.block_size * sizes.dcp_world_size
    check_partition(sizes, make_batch(sizes, [(0, 2 * virtual_block_size + 3), (0, virtual_block_size), (0, 1)]))


@settings(max_examples=150, deadline=None)
@given(sizes_and_lengths())
def test_case_04_the_partition_holds_for_any_sizes_that_divide(case) -> None:
    """CASES 4, generated."""
    sizes, lengths = case
    check_partition(sizes, make_batch(sizes, lengths))


@settings(max_examples=100, deadline=None)
@given(sizes_and_lengths())
def test_case_04_torch_equals_naive_for_any_sizes_that_divide(case) -> None:
    """CASES 4, generated."""
    sizes, lengths = case
    batch = make_batch(sizes, lengths, num_padding=3)
    for rank in range(sizes.dcp_world_size):
        assert run_twin(compute_slot_mapping_torch, sizes, batch, rank) == naive(sizes, batch, rank)


@each_size
def test_case_04_the_kth_owned_token_is_where_attention_reads_local_token_k(sizes: Sizes) -> None:
    """CASES 4: attention pages local token k at column k // KB, whatever the interleaving."""
    batch = make_batch(sizes, [(0, 3 * sizes.block_size * sizes.dcp_world_size - 1)])
    for rank in range(sizes.dcp_world_size):
        written = [slot for slot in naive(sizes, batch, rank) if slot != PAD_SLOT_ID]
        kernel_block_size = sizes.kernel_block_size
        read = [
            batch.block_table[0][k // kernel_block_size] * kernel_block_size + k % kernel_block_size
            for k in range(len(written))
        ]
        assert written == read


@each_size
def test_the_owner_is_the_rank_whose_turn_the_interleaving_says(sizes: Sizes) -> None:
    batch = make_batch(sizes, [(0, 2 * sizes.block_size * sizes.dcp_world_size)])
    for rank in range(sizes.dcp_world_size):
        slots = naive(sizes, batch, rank)
        for position, slot in zip(batch.positions, slots, strict=True):
            is_owner = position // sizes.interleave_size % sizes.dcp_world_size == rank
            assert (slot != PAD_SLOT_ID) == is_owner


def test_a_group_of_one_rank_has_the_ordinary_mapping_whatever_the_interleave() -> None:
    sizes = Sizes(block_size=32, kernel_block_size=16, interleave_size=7, dcp_world_size=1)
    batch = make_batch(sizes, [(0, 70), (40, 5)])
    table = batch.block_table
    expected = [table[0][p // 16] * 16 + p % 16 for p in range(70)]
    expected += [table[1][p // 16] * 16 + p % 16 for p in range(40, 45)]
    assert naive(sizes, batch, 0) == expected


@each_batch
@each_size
def test_case_04_torch_equals_naive(sizes: Sizes, batch_name: str) -> None:
    """CASES 4."""
    batch = build(batch_name, sizes)
    for rank in range(sizes.dcp_world_size):
        assert run_twin(compute_slot_mapping_torch, sizes, batch, rank) == naive(sizes, batch, rank)


@each_batch
@each_size
def test_case_04_triton_equals_naive(triton_slots, sizes: Sizes, batch_name: str) -> None:
    """CASES 4, through Triton's interpreter."""
    batch = build(batch_name, sizes)
    for rank in range(sizes.dcp_world_size):
        assert triton_slots[batch_name, sizes, rank] == naive(sizes, batch, rank)


def test_tokens_beyond_the_last_request_get_the_pad_slot_however_stale_their_positions(triton_slots) -> None:
    sizes = SIZES[1]
    batch = make_batch(sizes, [(0, 5)], num_padding=6)
    expected = naive(sizes, batch, 0)
    assert expected[5:] == [PAD_SLOT_ID] * 6
    assert run_twin(compute_slot_mapping_torch, sizes, batch, 0, stale_tail=4) == expected
    assert triton_slots["stale_tail", sizes, 0] == expected


@pytest.mark.parametrize("twin", [compute_slot_mapping_torch, compute_slot_mapping_triton])
@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"kernel_block_size": 48}, "kernel block size 48 does not divide block size 64"),
        ({"interleave_size": 3}, "interleave size 3 does not divide block size 64"),
        ({"dcp_rank": 2}, "DCP rank 2 is outside a group of 2"),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit_are_refused(twin, changed: dict[str, int], reason: str) -> None:
    sizes = {
        "block_size": 64,
        "kernel_block_size": 16,
        "interleave_size": 1,
        "dcp_world_size": 2,
        "dcp_rank": 0,
    }
    tensors = [torch.zeros(2), torch.zeros(1), torch.zeros(1, 1), torch.zeros(1)]
    with pytest.raises(ValueError, match=reason):
        twin(*tensors, **(sizes | changed))
    with pytest.raises(ValueError, match=reason):
        slot_mapping_naive([0], [], [], num_padded_tokens=0, **(sizes | changed))


def test_a_token_beyond_the_block_table_is_an_error_not_a_neighbours_slot() -> None:
    sizes = SIZES[1]
    batch = make_batch(sizes, [(0, 5)])
    batch.positions[0] = 10**6 * sizes.dcp_world_size
    with pytest.raises(IndexError):
        naive(sizes, batch, 0)
    with pytest.raises(IndexError):
        run_twin(compute_slot_mapping_torch, sizes, batch, 0)


def test_without_triton_the_module_imports_and_the_kernel_says_what_to_use_instead() -> None:
    code = (
        "import importlib.util as util, sys\n"
        "find_spec = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'triton' else find_spec(name, *rest)\n"
        "sys.modules['triton'] = None\n"
        "import vllm_dcp_hybrid.worker.slot_mapping as module\n"
        "sizes = dict(block_size=1, kernel_block_size=1, dcp_world_size=1, dcp_rank=0, interleave_size=1)\n"
        "try:\n"
        "    module.compute_slot_mapping_triton(None, None, None, None, **sizes)\n"
        "except ModuleNotFoundError as error:\n"
        "    assert 'use compute_slot_mapping_torch' in str(error)\n"
        "else:\n"
        "    raise AssertionError('not refused')\n"
    )
    env = os.environ | {"PYTHONPATH": str(Path(module.__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def write_triton_slots(result: Path) -> None:
    slots = {}
    for sizes in SIZES:
        for name in BATCHES:
            for rank in range(sizes.dcp_world_size):
                slots[name, tuple(asdict(sizes).values()), rank] = run_twin(
                    compute_slot_mapping_triton, sizes, build(name, sizes), rank
                )
    sizes = SIZES[1]
    slots["stale_tail", tuple(asdict(sizes).values()), 0] = run_twin(
        compute_slot_mapping_triton, sizes, make_batch(sizes, [(0, 5)], num_padding=6), 0, stale_tail=4
    )
    result.write_bytes(pickle.dumps(slots))


if __name__ == "__main__":
    write_triton_slots(Path(sys.argv[1]))
