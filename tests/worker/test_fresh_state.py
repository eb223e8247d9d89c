# SPDX-License-Identifier: Apache-2.0
"""A prompt of one token starts from a state of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from vllm_dcp_hybrid.worker.fresh_state import update_states  # noqa: E402

pytestmark = [
    pytest.mark.contract,
    pytest.mark.replaces("vllm_dcp_hybrid.worker.fresh_state:update_states"),
]


def make_runner(scenes: Any, requests: dict[str, tuple[int, tuple[list[int], ...]]], dcp: int = 2) -> Any:
    """Two recurrent layers and one of attention, every state 1; `requests` are (computed tokens, block ids)."""
    groups = scenes.cache_config([scenes.recurrent_spec(), scenes.attention_spec()], layers_per_group=1)
    layers = {
        "layers.0.0": SimpleNamespace(kv_cache=[torch.ones(6, 2), torch.ones(6, 3)]),
        "layers.1.0": SimpleNamespace(kv_cache=torch.ones(6, 4)),
    }
    config = scenes.engine_config(dcp=dcp)
    return SimpleNamespace(
        vllm_config=config,
        compilation_config=SimpleNamespace(static_forward_context=layers),
        kv_cache_config=groups,
        requests={
            name: SimpleNamespace(req_id=name, num_computed_tokens=computed, block_ids=ids)
            for name, (computed, ids) in requests.items()
        },
    )


def scheduled(new: dict[str, int], resumed: dict[str, int] | None = None, running: dict[str, int] | None = None) -> Any:
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in new],
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set(resumed or ())),
        num_scheduled_tokens={**new, **(resumed or {}), **(running or {})},
    )


def zeroed_blocks(runner: Any) -> list[int]:
    """Of the recurrent layer, all kinds of state alike; the attention layer must not be touched."""
    layers = runner.compilation_config.static_forward_context
    assert (layers["layers.1.0"].kv_cache == 1).all()
    found = [(state == 0).all(1).nonzero().flatten().tolist() for state in layers["layers.0.0"].kv_cache]
    assert found[0] == found[1]
    assert all(set(state.unique().tolist()) <= {0.0, 1.0} for state in layers["layers.0.0"].kv_cache)
    return list(found[0])


def test_the_first_state_of_a_new_prompt_of_one_token_is_zeroed(scenes: Any) -> None:
    runner = make_runner(scenes, {"a": (0, ([3], [2])), "b": (0, ([4], [5]))})
    result = update_states(lambda *args: "stock", runner, (scheduled(new={"a": 1, "b": 7}),), {})
    assert result == "stock"
    assert zeroed_blocks(runner) == [3]


def test_a_resumed_prompt_is_a_new_one(scenes: Any) -> None:
    runner = make_runner(scenes, {"a": (0, ([1], [2]))})
    update_states(lambda **kwargs: None, runner, (), {"scheduler_output": scheduled(new={}, resumed={"a": 1})})
    assert zeroed_blocks(runner) == [1]


def test_decodes_and_prefix_hits_keep_their_state(scenes: Any) -> None:
    runner = make_runner(scenes, {"hit": (544, ([0, 3], [2])), "decode": (9, ([4], [5]))})
    update_states(lambda *args: None, runner, (scheduled(new={"hit": 1}, running={"decode": 1}),), {})
    assert zeroed_blocks(runner) == []


def test_idle_nothing_is_touched(scenes: Any) -> None:
    runner = make_runner(scenes, {"a": (0, ([3], [2]))}, dcp=1)
    update_states(lambda *args: None, runner, (scheduled(new={"a": 1}),), {})
    assert zeroed_blocks(runner) == []
