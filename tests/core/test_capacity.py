# SPDX-License-Identifier: Apache-2.0
"""Tokens that fit: the geometry predicts what vLLM reports and what its block pool really takes."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.contract

B = 272


@pytest.mark.parametrize("num_speculative_blocks", [0, 2])
@pytest.mark.parametrize("max_len", [1, B - 1, B * 4, B * 4 + 1, 8192, 100_000])
@pytest.mark.parametrize("mode", ["align", "none"])
@pytest.mark.parametrize("dcp", [1, 2, 4])
def test_case_09_the_geometry_predicts_what_vllm_reports(
    scenes: Any, dcp: int, mode: str, max_len: int, num_speculative_blocks: int
) -> None:
    """CASES 9: to the token."""
    config = scenes.engine_config(dcp=dcp, mode=mode, max_len=max_len)
    recurrent = scenes.recurrent_spec(B if mode == "align" else max_len, mode, num_speculative_blocks)
    groups = scenes.cache_config([recurrent, recurrent, recurrent, scenes.attention_spec()], num_blocks=977)
    reported = scenes.kv_token_capacity(config, groups)
    assert scenes.adapter.cache_geometry(groups, config).kv_token_capacity(977, max_len) == reported


@pytest.mark.parametrize("mode", ["align", "none"])
def test_case_09_capacity_grows_with_the_dcp_size(scenes: Any, mode: str) -> None:
    """CASES 9: vllm#57431 shrank instead."""
    reported = []
    for dcp in (1, 2, 4):
        config = scenes.engine_config(dcp=dcp, mode=mode, max_len=100_000)
        recurrent_block = B if mode == "align" else 100_000
        groups = scenes.cache_config(scenes.hybrid_groups(mode, recurrent_block=recurrent_block))
        reported.append(scenes.kv_token_capacity(config, groups))
    assert reported[0] < reported[1] < reported[2]
    # Long sequences are nearly all attention: the states cost next to nothing.
    assert reported[2] > 3.8 * reported[0]


@pytest.mark.parametrize("dcp", [1, 2, 4])
def test_case_09_requests_of_the_full_length_fit_as_often_as_predicted(scenes: Any, dcp: int) -> None:
    """CASES 9: by vLLM's own managers, in the steps in which a prompt is computed."""
    max_len, num_blocks = 8 * B, 101
    config = scenes.engine_config(dcp=dcp, max_len=max_len, num_blocks=num_blocks)
    groups = scenes.cache_config(scenes.hybrid_groups(), num_blocks)
    geometry = scenes.adapter.cache_geometry(groups, config)
    manager = scenes.make_manager(config, groups)
    _, hash_block = scenes.block_sizes(config, groups)
    num_requests = 0
    while True:
        tokens = [3 + num_requests, *range(5, 4 + max_len)]
        request = scenes.make_request(str(num_requests), tokens, hash_block)
        while request.num_computed_tokens < max_len:
            if manager.allocate_slots(request, 2 * B) is None:
                break
            request.num_computed_tokens += 2 * B
        if request.num_computed_tokens < max_len:
            break
        num_requests += 1
    # The null block is not for requests.
    assert num_requests >= geometry.kv_token_capacity(num_blocks - 1, max_len) // max_len > 0


def test_case_09_sharded_and_replicated_bytes_are_stated_apart(scenes: Any) -> None:
    """CASES 9."""
    page = scenes.attention_spec().page_size_bytes
    for dcp in (1, 2, 4):
        groups = scenes.cache_config(scenes.hybrid_groups(), layers_per_group=2)
        geometry = scenes.adapter.cache_geometry(groups, scenes.engine_config(dcp=dcp))
        assert geometry.bytes_per_token() == 2 * page / (B * dcp)
        assert geometry.state_bytes_per_request(8192) == 3 * 2 * page * 2


@pytest.mark.parametrize("dcp", [1, 2])
def test_case_09_layers_of_unequal_shape_in_one_group_count_once_each(scenes: Any, dcp: int) -> None:
    """CASES 9: a group of `UniformTypeKVCacheSpecs` holds one spec per layer, and its page is the sum of theirs."""
    small, large = scenes.attention_spec(head_size=64), scenes.attention_spec(head_size=256)
    uniform = scenes.specs.UniformTypeKVCacheSpecs(block_size=B, kv_cache_specs={"a": small, "b": large})
    config = scenes.engine_config(dcp=dcp)
    groups = scenes.cache_config([scenes.recurrent_spec(), uniform])
    groups.kv_cache_groups[1].layer_names = ["a", "b"]
    recurrent, attention = scenes.adapter.cache_geometry(groups, config).groups
    assert attention.is_sharded
    assert attention.effective_block_size == B * dcp
    assert attention.num_layers == 2
    expected = (small.page_size_bytes + large.page_size_bytes) / (B * dcp)
    assert scenes.adapter.cache_geometry(groups, config).bytes_per_token() == expected
    assert not recurrent.is_sharded


def test_a_uniform_group_has_the_same_geometry_on_the_scheduler_side(scenes: Any) -> None:
    """CASES 5: vLLM hands the scheduler one layer's spec of such a group, and the workers all of them."""
    uniform = scenes.specs.UniformTypeKVCacheSpecs(
        block_size=B, kv_cache_specs={"a": scenes.attention_spec(head_size=64), "b": scenes.attention_spec()}
    )
    config, groups = scenes.engine_config(dcp=2), scenes.cache_config([scenes.recurrent_spec(), uniform])
    groups.kv_cache_groups[1].layer_names = ["a", "b"]
    scheduler_groups = scenes.kv_cache_utils.generate_scheduler_kv_cache_config([groups])
    worker_side = scenes.adapter.cache_geometry(groups, config)
    scheduler_side = scenes.adapter.cache_geometry(scheduler_groups, config)
    assert scheduler_side.effective_block_sizes == worker_side.effective_block_sizes == (B, 2 * B)
    assert scheduler_side.blocks_per_request(8192) == worker_side.blocks_per_request(8192)
