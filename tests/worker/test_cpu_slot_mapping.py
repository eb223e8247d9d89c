# SPDX-License-Identifier: Apache-2.0
"""Slots on CPUs where block tables are upstream's own (from 0.26 on)."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from vllm_dcp_hybrid.worker import cpu_slot_mapping, startup  # noqa: E402
from vllm_dcp_hybrid.worker.slot_mapping import PAD_SLOT_ID, slot_mapping_naive  # noqa: E402

pytestmark = [
    pytest.mark.contract,
    pytest.mark.replaces("vllm_dcp_hybrid.worker.startup:worker_base_init_on_cpu"),
]

B = 128


def groups_of(scenes: Any, mode: str = "align") -> list[Any]:
    attention = scenes.attention_spec(B, head_size=544)
    return [*(scenes.recurrent_spec(B, mode) for _ in range(2)), attention]


@pytest.mark.usefixtures("cpu_engine")
@pytest.mark.parametrize("dcp", [2, 4])
@pytest.mark.parametrize("interleave", [1, 16, B])
@pytest.mark.parametrize("kernel_block", [32, B])
def test_case_04_every_token_has_one_slot_on_one_rank(
    scenes: Any, make_runner: Any, dcp: int, interleave: int, kernel_block: int
) -> None:
    """CASES 4: against the rule, rank by rank; where tables hold whole blocks the kernel's size does not matter."""
    lengths = (1, 3 * B + 3, 90)
    starts = [0, 1, 1 + lengths[1], sum(lengths)]
    positions = [pos for length in lengths for pos in range(length)]
    num_owners = [0] * len(positions)
    for rank in range(dcp):
        runner = make_runner(
            groups_of(scenes),
            dcp=dcp,
            rank=rank,
            interleave=interleave,
            block_size=B,
            kernel_block_sizes=[B, B, kernel_block],
        )
        *recurrent, table = runner.input_batch.block_table.block_tables
        for row in range(3):
            table.add_row([5 + 10 * row, 2 + 10 * row, 9 + 10 * row], row)
        table.commit_block_table(3)
        runner.input_batch.block_table.compute_slot_mapping(
            3, torch.tensor(starts, dtype=torch.int32), torch.tensor(positions)
        )
        slots = table.slot_mapping.gpu.tolist()
        expected = slot_mapping_naive(
            starts,
            positions,
            table.block_table.gpu.tolist(),
            block_size=B,
            kernel_block_size=table.block_size,
            dcp_world_size=dcp,
            dcp_rank=rank,
            interleave_size=interleave,
            num_padded_tokens=len(slots),
        )
        assert slots == expected
        assert all(state_table.slot_mapping_mode.value == "none" for state_table in recurrent)
        num_owners = [
            number + (slot != PAD_SLOT_ID) for number, slot in zip(num_owners, slots[: len(positions)], strict=True)
        ]
    assert set(num_owners) == {1}


@pytest.mark.usefixtures("cpu_engine")
@pytest.mark.parametrize("dcp", [2, 4])
@pytest.mark.parametrize("mode", ["align", "none"])
def test_case_05_upstreams_tables_are_as_wide_as_our_geometry_says(
    scenes: Any, make_runner: Any, dcp: int, mode: str
) -> None:
    """CASES 5: upstream's answer and the one that the CPU engine computes with."""
    max_len = 40 * B + 5
    specs = (
        groups_of(scenes, mode) if mode == "align" else [scenes.recurrent_spec(max_len, mode), *groups_of(scenes)[2:]]
    )
    runner = make_runner(specs, dcp=dcp, rank=1, mode=mode, block_size=B, max_len=max_len)
    geometry = scenes.adapter.cache_geometry(runner.kv_cache_config, runner.vllm_config)
    tables = runner.input_batch.block_table.block_tables
    for table, group, spec in zip(tables, geometry.groups, specs, strict=True):
        assert spec.max_num_blocks_per_req(runner.vllm_config, max_len) == group.table_width(max_len)
        assert table.max_num_blocks_per_req >= group.table_width(max_len)
        assert (table.slot_mapping_mode.value != "none") is group.uses_slot_mapping
    assert scenes.block_sizes(runner.vllm_config, runner.kv_cache_config)[0] == geometry.scheduler_block_size


def test_stock_decides_where_the_cpu_engine_does_not_serve(scenes: Any, make_runner: Any) -> None:
    """A dormant plugin leaves stock's own refusal."""
    table = make_runner(groups_of(scenes), dcp=2, block_size=B).input_batch.block_table.block_tables[-1]
    assert not cpu_slot_mapping.is_ours(table)
    startup.register_attention_backends(startup._CPU)
    try:
        assert cpu_slot_mapping.is_ours(table)
        assert not cpu_slot_mapping.is_ours(
            make_runner(groups_of(scenes), dcp=1, block_size=B).input_batch.block_table.block_tables[-1]
        )
    finally:
        startup.withdraw_attention_backends()
