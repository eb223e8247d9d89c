# SPDX-License-Identifier: Apache-2.0
"""CASES 5: every place that must know where a group's tokens live, asked for the same group."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from vllm_dcp_hybrid.placement import Placement  # noqa: E402
from vllm_dcp_hybrid.worker.slot_mapping import PAD_SLOT_ID  # noqa: E402

pytestmark = [
    pytest.mark.contract,
    pytest.mark.replaces("vllm_dcp_hybrid.worker.block_table:multi_group_block_table_init"),
]

B = 272
MAX_LEN = 40 * B + 5
INTERLEAVE = 16

KINDS = ("attention", "latent", "state_align", "state_none", "state_all")


def group_specs(scenes: Any, kind: str) -> tuple[list[Any], str]:
    """The group that is asked for, first, with one that makes the model hybrid; and the mode of the engine."""
    if kind == "attention":
        return [scenes.attention_spec(), scenes.recurrent_spec()], "align"
    if kind == "latent":
        return [scenes.mla_spec(), scenes.recurrent_spec()], "align"
    mode = kind.removeprefix("state_")
    state = scenes.recurrent_spec(MAX_LEN if mode == "none" else B, mode, num_speculative_blocks=1)
    return [state, scenes.attention_spec()], mode


@pytest.mark.parametrize("dcp", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_case_05_all_places_give_the_same_answer(scenes: Any, make_runner: Any, kind: str, dcp: int) -> None:
    """CASES 5."""
    specs, mode = group_specs(scenes, kind)
    runner = make_runner(specs, dcp=dcp, rank=dcp - 1, mode=mode, max_len=MAX_LEN, interleave=INTERLEAVE)
    config, groups = runner.vllm_config, runner.kv_cache_config
    manager = scenes.make_manager(config, groups)
    geometry = scenes.adapter.cache_geometry(groups, config)
    group, spec = geometry.groups[0], specs[0]
    single = manager.coordinator.single_type_managers[0]
    table = runner.input_batch.block_table.block_tables[0]
    is_attention = not kind.startswith("state")
    num_ranks = dcp if is_attention else 1

    # Where the tokens live, and how many of them are under one block id.
    assert group.placement is (Placement.SHARDED if is_attention else Placement.REPLICATED)
    assert group.effective_block_size == spec.block_size * num_ranks
    assert single.block_size == group.effective_block_size
    assert manager.coordinator.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size == single.block_size
    assert (table.dcp_world_size, table.dcp_rank) == (num_ranks, num_ranks - 1)
    if dcp > 1:
        assert table._dcp_hybrid_geometry == group

    # What the groups agree on.
    scheduler_block, hash_block = scenes.block_sizes(config, groups)
    assert scheduler_block == geometry.scheduler_block_size == math.lcm(*geometry.effective_block_sizes)
    assert all(size % hash_block == 0 for size in geometry.effective_block_sizes) or mode == "none"

    # The width of a row, in the worker and under the name of 0.26.
    assert table.max_num_blocks_per_req == group.table_width(MAX_LEN)
    assert spec.max_num_blocks_per_req(config, MAX_LEN) == group.table_width(MAX_LEN)

    # Blocks of a request: in the memory estimate, and as allocated.
    estimated = spec.max_memory_usage_bytes(config) // spec.page_size_bytes
    # In mode `all` vLLM counts the states of drafts from 0.22.1 on.
    is_without_drafts = mode == "all" and estimated == group.num_blocks(MAX_LEN)
    assert estimated == group.resident_blocks(MAX_LEN) or is_without_drafts
    num_tokens = 9 * B + 3
    request = scenes.make_request("r", range(3, 3 + num_tokens), hash_block)
    assert manager.allocate_slots(request, num_tokens) is not None
    num_entries = len(manager.get_block_ids("r")[0])
    assert num_entries == group.num_blocks(num_tokens) + group.num_speculative_blocks
    assert num_entries <= table.max_num_blocks_per_req

    # Tokens of each rank: by length, and by the slots that ranks write.
    assert sum(group.local_len(num_tokens, rank) for rank in range(dcp)) == num_tokens * (dcp // num_ranks)
    if is_attention and dcp > 1:
        table.add_row(list(range(1, 1 + num_entries)), 0)
        table.commit_block_table(1)
        num_written = 0
        for start in range(0, num_tokens, 500):
            positions = torch.arange(start, min(start + 500, num_tokens))
            table.compute_slot_mapping(1, torch.tensor([0, len(positions)], dtype=torch.int32), positions)
            num_written += int((table.slot_mapping.gpu[: len(positions)] != PAD_SLOT_ID).sum())
        assert num_written == group.local_len(num_tokens, table.dcp_rank)
    assert group.uses_slot_mapping is is_attention


@pytest.mark.parametrize("dcp", [2, 4])
def test_case_05_the_attention_engine_asks_the_same_geometry(
    scenes: Any, make_runner: Any, monkeypatch: pytest.MonkeyPatch, dcp: int
) -> None:
    """CASES 5: the CPU engine's metadata builder, of a sharded and of a recurrent group's neighbour."""
    from vllm_dcp_hybrid.attention import cpu

    runner = make_runner(scenes.hybrid_groups(), dcp=dcp, rank=1, interleave=INTERLEAVE)
    monkeypatch.setattr(cpu, "get_dcp_group", scenes.block_table.get_dcp_group)
    group = runner.kv_cache_config.kv_cache_groups[-1]
    builder = cpu.DCPCPUAttentionMetadataBuilder(
        group.kv_cache_spec, group.layer_names, runner.vllm_config, torch.device("cpu")
    )
    geometry = scenes.adapter.cache_geometry(runner.kv_cache_config, runner.vllm_config).groups[-1]
    assert builder.dcp_rank == 1
    for length in (0, 1, INTERLEAVE, B, B * dcp, B * dcp + 1, 10**5):
        assert builder.geometry.local_len(length, 1) == geometry.local_len(length, 1)
    assert builder.geometry.interleave_size == INTERLEAVE
