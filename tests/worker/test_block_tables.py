# SPDX-License-Identifier: Apache-2.0
"""Block tables as vLLM's own runner and `MultiGroupBlockTable` build them under the plugin."""

from __future__ import annotations

import logging
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from vllm_dcp_hybrid.worker.slot_mapping import PAD_SLOT_ID, slot_mapping_naive  # noqa: E402

pytestmark = [
    pytest.mark.contract,
    pytest.mark.replaces("vllm_dcp_hybrid.worker.block_table:multi_group_block_table_init"),
]

B = 272


def tables_of(runner: Any) -> list[Any]:
    tables: list[Any] = runner.input_batch.block_table.block_tables
    return tables


@pytest.mark.parametrize("num_speculative_blocks", [0, 3])
@pytest.mark.parametrize("dcp", [1, 2, 4, 8])
@pytest.mark.parametrize("mode", ["align", "none"])
def test_case_02_rows_are_as_wide_as_sequences_are_long(
    scenes: Any, make_runner: Any, dcp: int, mode: str, num_speculative_blocks: int
) -> None:
    """CASES 2: max_len in {B*N, B*N + 1, 10^6}; blocks for draft tokens are added after."""
    for max_len, sharded in ((B * dcp, 1), (B * dcp + 1, 2), (10**6, -(-(10**6) // (B * dcp)))):
        recurrent = scenes.recurrent_spec(B if mode == "align" else max_len, mode, num_speculative_blocks)
        runner = make_runner([recurrent, scenes.attention_spec()], dcp=dcp, mode=mode, max_len=max_len)
        states = -(-max_len // B) if mode == "align" else 1
        widths = [table.max_num_blocks_per_req for table in tables_of(runner)]
        assert widths == [states + num_speculative_blocks, sharded]


@pytest.mark.parametrize("dcp", [2, 4])
def test_case_02_a_row_filled_to_its_end_leaves_its_neighbours_alone(scenes: Any, make_runner: Any, dcp: int) -> None:
    """CASES 2: canaries beside a request of the full length."""
    max_len = 40 * B + 1
    runner = make_runner(scenes.hybrid_groups(), dcp=dcp, max_len=max_len)
    tables = runner.input_batch.block_table
    geometry = scenes.adapter.cache_geometry(runner.kv_cache_config, runner.vllm_config)
    canary = -77
    for table in tables.block_tables:
        table.block_table.np[:] = canary
    row = tuple([5] * group.num_blocks(max_len) for group in geometry.groups)
    tables.add_row(row, 1)
    for table, ids in zip(tables.block_tables, row, strict=True):
        assert (table.block_table.np[1, : len(ids)] == 5).all()
        assert (table.block_table.np[[0, 2]] == canary).all()
    # One block more than a request can have is an error, not a write into the next row.
    for number, ids in enumerate(row):
        table = tables.block_tables[number]
        with pytest.raises(ValueError, match="broadcast"):
            table.add_row([5] * (table.max_num_blocks_per_req + 1), 1)
        assert len(ids) <= table.max_num_blocks_per_req


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_replicated_groups_are_not_sharded_and_sharded_ones_know_their_rank(
    scenes: Any, make_runner: Any, rank: int
) -> None:
    runner = make_runner(scenes.hybrid_groups(), dcp=4, rank=rank)
    assert [(table.dcp_world_size, table.dcp_rank) for table in tables_of(runner)] == [(1, 0)] * 3 + [(4, rank)]


@pytest.mark.parametrize("interleave", [1, 16, B])
def test_the_interleave_survives_the_tables_that_are_built_again(
    scenes: Any, make_runner: Any, interleave: int
) -> None:
    """TARGETS W1: stock forgets it, on every hybrid."""
    runner = make_runner(scenes.hybrid_groups(), dcp=2, interleave=interleave)
    assert tables_of(runner)[-1].cp_kv_cache_interleave_size == interleave


def test_encoder_only_groups_have_no_table(scenes: Any, make_runner: Any) -> None:
    encoder = scenes.specs.EncoderOnlyAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    runner = make_runner([encoder, *scenes.hybrid_groups()], dcp=2)
    assert [table.dcp_world_size for table in tables_of(runner)] == [1, 1, 1, 2]


def test_an_idle_runner_builds_stocks_tables(scenes: Any, make_runner: Any) -> None:
    runner = make_runner(scenes.hybrid_groups(), dcp=1, max_len=8192)
    assert [table.max_num_blocks_per_req for table in tables_of(runner)] == [31, 31, 31, 31]
    assert not any("_dcp_hybrid_geometry" in vars(table) for table in tables_of(runner))


def test_tables_that_were_kept_from_before_are_refused(scenes: Any, make_runner: Any) -> None:
    runner = make_runner(scenes.hybrid_groups(), dcp=2)
    del tables_of(runner)[-1]._dcp_hybrid_geometry
    with pytest.raises(RuntimeError, match="block tables were built for"):
        runner.may_reinitialize_input_batch(runner.kv_cache_config, [B] * 4)


def test_building_again_with_the_same_sizes_keeps_the_tables(scenes: Any, make_runner: Any) -> None:
    runner = make_runner(scenes.hybrid_groups(), dcp=2)
    before = runner.input_batch
    runner.may_reinitialize_input_batch(runner.kv_cache_config, [B] * 4)
    assert runner.input_batch is before


def test_a_dense_model_on_a_cpu_keeps_the_table_that_stock_built_first(scenes: Any, make_runner: Any) -> None:
    runner = make_runner([scenes.attention_spec()], dcp=2, rank=1, kind="llama")
    (table,) = tables_of(runner)
    del table._dcp_hybrid_geometry
    runner.may_reinitialize_input_batch(runner.kv_cache_config, [B])
    assert tables_of(runner) == [table]
    assert table._dcp_hybrid_geometry.effective_block_size == 2 * B
    assert (table.dcp_world_size, table.dcp_rank) == (2, 1)
    assert table.max_num_blocks_per_req >= table._dcp_hybrid_geometry.table_width(8192)


def test_one_line_of_rank_0_says_how_the_groups_are_laid_out(
    scenes: Any, make_runner: Any, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm_dcp_hybrid.core import report

    report._log_groups.cache_clear()  # another test of this process may have been told the same
    with caplog.at_level(logging.INFO, logger="vllm.dcp_hybrid"):
        make_runner(scenes.hybrid_groups(), dcp=2, rank=1)
        assert not [r for r in caplog.records if "worker" in r.getMessage()]
        make_runner(scenes.hybrid_groups(), dcp=2, rank=0)
        make_runner(scenes.hybrid_groups(), dcp=2, rank=0)
    (line,) = (r.getMessage() for r in caplog.records if "worker rank 0" in r.getMessage())
    assert "3 x recurrent (align) replicated: block 272, effective 272" in line
    assert "attention sharded: block 272, effective 544" in line


# Slot mapping


def fill_rows(runner: Any, num_blocks: int) -> list[list[int]]:
    """Unequal block ids in every table; the ids of the kernel blocks of the last one, per request."""
    tables = runner.input_batch.block_table
    for row in range(2):
        ids = [row * 100 + 1 + (7 * column) % 50 for column in range(num_blocks)]
        tables.add_row(
            tuple(ids[: t.max_num_blocks_per_req // t.blocks_per_kv_block] for t in tables.block_tables), row
        )
    tables.commit_block_table(2)
    ids_of_kernel_blocks: list[list[int]] = tables.block_tables[-1].block_table.gpu[:2].tolist()
    return ids_of_kernel_blocks


@pytest.mark.parametrize("kernel_block", [B, 16])
@pytest.mark.parametrize("interleave", [1, 16, 17, B])
@pytest.mark.parametrize("dcp", [2, 4])
def test_case_04_slots_of_a_sharded_group_follow_the_owner_rule(
    scenes: Any, make_runner: Any, dcp: int, interleave: int, kernel_block: int
) -> None:
    """CASES 4: also where the kernel's blocks are smaller, through vLLM's own method; every token has one owner."""
    num_owners = torch.zeros(140, dtype=torch.int64)
    for rank in range(dcp):
        runner = make_runner(
            scenes.hybrid_groups(),
            dcp=dcp,
            rank=rank,
            interleave=interleave,
            kernel_block_sizes=[B, B, B, kernel_block],
        )
        rows = fill_rows(runner, num_blocks=6)
        # A prefill across a virtual block, and a decode.
        positions = [*range(B * dcp - 60, B * dcp + 79), 1500]
        runner.input_batch.block_table.compute_slot_mapping(
            2, torch.tensor([0, 139, 140], dtype=torch.int32), torch.tensor(positions)
        )
        expected = slot_mapping_naive(
            [0, 139, 140],
            positions,
            rows,
            block_size=B,
            kernel_block_size=kernel_block,
            dcp_world_size=dcp,
            dcp_rank=rank,
            interleave_size=interleave,
            num_padded_tokens=512,
        )
        found = tables_of(runner)[-1].slot_mapping.gpu
        assert found.tolist() == expected
        num_owners += found[:140] != PAD_SLOT_ID
    assert (num_owners == 1).all()


def test_recurrent_groups_have_no_slots(scenes: Any, make_runner: Any) -> None:
    runner = make_runner(scenes.hybrid_groups(), dcp=2)
    fill_rows(runner, num_blocks=6)
    runner.input_batch.block_table.compute_slot_mapping(
        1, torch.tensor([0, 5], dtype=torch.int32), torch.arange(5, dtype=torch.int64)
    )
    *recurrent, attention = tables_of(runner)
    for table in recurrent:
        assert table.slot_mapping_mode.value == "none"
        assert (table.slot_mapping.gpu == PAD_SLOT_ID).all()
    assert (attention.slot_mapping.gpu[:5] != PAD_SLOT_ID).any()


def test_tables_may_be_asked_for_as_0_26_asks(scenes: Any, set_dcp_group: Any) -> None:
    """`slot_mapping_modes`, and the enumeration under its name in vLLM's module."""
    set_dcp_group(1, 0)
    modes = scenes.block_table.SlotMappingMode
    tables = scenes.block_table.MultiGroupBlockTable(
        max_num_reqs=2,
        max_model_len=64,
        max_num_batched_tokens=32,
        pin_memory=False,
        device=torch.device("cpu"),
        block_sizes=[16, 16],
        kernel_block_sizes=[16, 16],
        slot_mapping_modes=[modes.NONE, modes.TOKEN_TO_KV_SLOT],
    )
    assert (tables[0].slot_mapping.gpu == PAD_SLOT_ID).all()
    assert not hasattr(tables[1], "slot_mapping_mode")
