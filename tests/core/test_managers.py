# SPDX-License-Identifier: Apache-2.0
"""Block sizes and block counts of vLLM's own managers, once the plugin has told them what a block covers."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytestmark = pytest.mark.contract

B = 272


def manager_block_sizes(manager: Any) -> list[int]:
    return [single.block_size for single in manager.coordinator.single_type_managers]


def num_blocks_after(scenes: Any, config: Any, groups: Any, num_tokens: int) -> list[int]:
    """Entries per group once a request of `num_tokens` tokens is allocated in one piece."""
    manager = scenes.make_manager(config, groups)
    _, hash_block = scenes.block_sizes(config, groups)
    request = scenes.make_request("r", list(range(3, 3 + num_tokens)), hash_block)
    assert manager.allocate_slots(request, num_tokens) is not None
    return [len(ids) for ids in manager.get_block_ids("r")]


@pytest.mark.parametrize(
    ("dcp", "mode", "block_size", "recurrent_block", "expected"),
    [
        # the examples of TARGETS 5.4
        (2, "align", 272, 272, (544, 272)),
        (2, "none", 272, 8192, (139264, 139264)),
        (4, "align", 528, 528, (2112, 528)),
        (1, "align", 272, 272, (272, 272)),
        (4, "align", 272, 272, (1088, 272)),
    ],
)
def test_the_scheduler_block_and_the_hash_unit(
    scenes: Any, dcp: int, mode: str, block_size: int, recurrent_block: int, expected: tuple[int, int]
) -> None:
    head_size = 256 if block_size == B else 512
    attention = scenes.attention_spec(block_size, head_size=head_size)
    groups = scenes.cache_config([*(scenes.recurrent_spec(recurrent_block, mode) for _ in range(3)), attention])
    assert scenes.block_sizes(scenes.engine_config(dcp=dcp, mode=mode, block_size=block_size), groups) == expected


@pytest.mark.parametrize("dcp", [1, 2, 4])
def test_cases_01_03_only_sharded_groups_are_scaled_and_once(scenes: Any, dcp: int) -> None:
    """CASES 1, 3: a sharded block covers exactly B * N tokens, a recurrent one its own."""
    config, groups = scenes.engine_config(dcp=dcp), scenes.cache_config(scenes.hybrid_groups())
    assert manager_block_sizes(scenes.make_manager(config, groups)) == [B, B, B, B * dcp]


@pytest.mark.parametrize("dcp", [1, 2, 4])
def test_cases_01_03_also_without_prefix_caching(scenes: Any, dcp: int) -> None:
    """CASES 1, 3: there stock builds managers, and scales the recurrent ones too."""
    config = scenes.engine_config(dcp=dcp, mode="none")
    groups = scenes.cache_config(scenes.hybrid_groups("none", recurrent_block=8192))
    assert manager_block_sizes(scenes.make_manager(config, groups)) == [8192, 8192, 8192, B * dcp]


def test_case_03_latent_kv_is_sharded_like_keys_and_values(scenes: Any) -> None:
    """CASES 3, for MLA."""
    groups = scenes.cache_config(scenes.hybrid_groups(attention=scenes.mla_spec()))
    assert manager_block_sizes(scenes.make_manager(scenes.engine_config(dcp=4), groups)) == [B, B, B, 4 * B]


@pytest.mark.parametrize(
    "mode",
    [
        # Upstream's own block sizes of mode `all` do not suit its coordinator.
        pytest.param(
            "all", marks=pytest.mark.replaces("vllm_dcp_hybrid.core.block_sizes:resolve_kv_cache_block_sizes")
        ),
        "align",
    ],
)
def test_case_01_sixty_four_tokens_fill_two_sharded_and_four_recurrent_blocks(scenes: Any, mode: str) -> None:
    """CASES 1: {attention B=16, recurrent M=16}, N=2, 64 tokens."""
    config = scenes.engine_config(dcp=2, block_size=16)
    config.cache_config.mamba_cache_mode = mode
    groups = scenes.cache_config([scenes.recurrent_spec(16, mode), scenes.attention_spec(16, head_size=4352)])
    assert num_blocks_after(scenes, config, groups, 64) == [4, 2]


@pytest.mark.parametrize(("dcp", "num_attention_blocks"), [(1, 12), (2, 6), (4, 3)])
def test_without_prefix_caching_a_request_has_one_state_per_group(
    scenes: Any, dcp: int, num_attention_blocks: int
) -> None:
    """TARGETS 5.4, example B: 2,999 tokens."""
    config = scenes.engine_config(dcp=dcp, mode="none")
    groups = scenes.cache_config(scenes.hybrid_groups("none", recurrent_block=8192))
    assert num_blocks_after(scenes, config, groups, 2999) == [1, 1, 1, num_attention_blocks]


@pytest.mark.parametrize("mode", ["align", "none"])
def test_blocks_for_draft_tokens_are_added_and_not_scaled(scenes: Any, mode: str) -> None:
    config = scenes.engine_config(dcp=2, mode=mode)
    recurrent = scenes.recurrent_spec(B if mode == "align" else 8192, mode, num_speculative_blocks=3)
    groups = scenes.cache_config([recurrent, scenes.attention_spec()])
    num_states, num_attention = num_blocks_after(scenes, config, groups, 2 * B)
    assert (num_states, num_attention) == ((2 if mode == "align" else 1) + 3, 1)


def test_case_06_sizes_come_from_the_specs_not_from_the_cache_config(scenes: Any) -> None:
    """CASES 6: an explicit --block-size smaller than the recurrent block is what the cache config still says."""
    config = scenes.engine_config(dcp=2, mode="none", block_size=64)
    groups = scenes.cache_config(scenes.hybrid_groups("none"))
    assert scenes.block_sizes(config, groups) == (544, 544)
    assert manager_block_sizes(scenes.make_manager(config, groups)) == [B, B, B, 544]


def test_what_the_rest_of_vllm_sees_is_not_scaled(scenes: Any) -> None:
    """Page sizes, connectors and KV layout read one rank's block size."""
    config, groups = scenes.engine_config(dcp=2), scenes.cache_config(scenes.hybrid_groups())
    before = copy.deepcopy(groups)
    manager = scenes.make_manager(config, groups)
    assert groups == before
    assert manager.kv_cache_config is groups
    assert config.cache_config.block_size == B
    assert config.parallel_config.decode_context_parallel_size == 2


@pytest.mark.replaces("vllm_dcp_hybrid.core.block_sizes:resolve_kv_cache_block_sizes")
def test_the_users_hash_unit_is_kept_and_a_wrong_one_is_stocks_error(scenes: Any) -> None:
    config, groups = scenes.engine_config(dcp=2), scenes.cache_config(scenes.hybrid_groups())
    config.cache_config.hash_block_size = 136
    assert scenes.block_sizes(config, groups) == (544, 136)
    config.cache_config.hash_block_size = 100
    with pytest.raises(ValueError, match="hash_block_size"):
        scenes.block_sizes(config, groups)


def test_a_dense_model_has_stocks_sizes(scenes: Any) -> None:
    config = scenes.engine_config(dcp=2, kind="llama")
    groups = scenes.cache_config([scenes.attention_spec()])
    assert scenes.block_sizes(config, groups) == (544, 544)
    assert manager_block_sizes(scenes.make_manager(config, groups)) == [544]


@pytest.mark.replaces("vllm_dcp_hybrid.core.block_sizes:resolve_kv_cache_block_sizes")
@pytest.mark.parametrize("mode", ["align", "none"])
def test_case_30_switched_off_the_user_sees_stocks_refusal(scenes: Any, mode: str) -> None:
    """CASES 30."""
    config = scenes.engine_config(dcp=2, mode=mode)
    config.additional_config = {"dcp_hybrid": {"enabled": False}}
    groups = scenes.cache_config(scenes.hybrid_groups(mode))
    with pytest.raises(ValueError, match="Hybrid KV cache groups with multiple block sizes do not support context"):
        scenes.block_sizes(config, groups)


@pytest.mark.replaces("vllm_dcp_hybrid.core.block_sizes:resolve_kv_cache_block_sizes")
def test_case_30_a_model_that_is_not_hybrid_sees_stocks_refusal(scenes: Any) -> None:
    """CASES 30: several groups without recurrent layers are not this plugin's business."""
    config = scenes.engine_config(dcp=2, kind="llama")
    config.device_config.device_type = "cuda"
    groups = scenes.cache_config([scenes.attention_spec(), scenes.attention_spec(16, head_size=4352)])
    with pytest.raises(ValueError, match="do not support context parallelism"):
        scenes.block_sizes(config, groups)


@pytest.mark.replaces("vllm_dcp_hybrid.core.block_sizes:resolve_kv_cache_block_sizes")
def test_dcp_1_is_stocks_answer(scenes: Any) -> None:
    config, groups = scenes.engine_config(dcp=1), scenes.cache_config(scenes.hybrid_groups())
    stock = scenes.kv_cache_utils.resolve_kv_cache_block_sizes.__wrapped__
    assert scenes.block_sizes(config, groups) == stock(groups, config) == (B, B)
