# SPDX-License-Identifier: Apache-2.0
"""Slots of random geometries through vLLM's own block tables, against tokens dealt out one at a time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dealt_tokens import Case, expected_slots, make_case, opened_blocks  # noqa: E402

from vllm_dcp_hybrid.worker.slot_mapping import PAD_SLOT_ID  # noqa: E402

pytestmark = pytest.mark.contract

NUM_CASES = 120


def whole_block_rows(case: Case) -> list[list[int]]:
    """Ids of allocation blocks, as many as each request needs."""
    opened = opened_blocks(case.num_shards, case.interleave_size, case.block_size)
    ids = random.Random(case.number).sample(range(1, 2000), 200)
    return [[ids.pop() for _ in range(opened[context + new])] for context, new in case.requests]


def sharded_cases() -> Iterator[Case]:
    """Of DCP sizes that an engine of TP 4 and 8 can have."""
    cases = (make_case(number) for number in count())
    return islice((case for case in cases if case.is_sharded and case.dcp_world_size in (2, 4, 8)), NUM_CASES)


@pytest.mark.usefixtures("cpu_engine")
def test_case_04_slots_of_any_geometry_are_where_dealt_tokens_lie(scenes: Any, make_runner: Any) -> None:
    """CASES 4: kernel blocks smaller than allocation blocks, rows beside one another, a recurrent group beside."""
    for case in sharded_cases():
        size = case.block_size
        runner = make_runner(
            [scenes.recurrent_spec(size), scenes.attention_spec(size)],
            dcp=case.dcp_world_size,
            rank=case.rank,
            interleave=case.interleave_size,
            block_size=size,
            kernel_block_sizes=[size, case.kernel_block_size],
            max_num_reqs=5,
            max_len=max((context + new for context, new in case.requests), default=1),
        )
        recurrent, table = runner.input_batch.block_table.block_tables
        rows = whole_block_rows(case)
        for number, row in enumerate(rows):
            table.add_row(row, number)
        table.commit_block_table(len(rows))
        runner.input_batch.block_table.compute_slot_mapping(
            len(rows), torch.tensor(case.query_start_loc(), dtype=torch.int32), torch.tensor(case.positions())
        )
        # Whatever pages the kernel reads, a block's tokens lie together.
        expected = expected_slots(
            replace(case, kernel_block_size=size, rows=rows, num_padding=0), case.rank, PAD_SLOT_ID
        )
        slots = table.slot_mapping.gpu.tolist()
        assert slots[: len(expected)] == expected, case
        assert set(slots[len(expected) :]) <= {PAD_SLOT_ID}, case
        assert recurrent.slot_mapping_mode.value == "none"
