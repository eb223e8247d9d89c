# SPDX-License-Identifier: Apache-2.0
"""Blocks that a prefix hit shares in part are copied with all that they hold (from 0.29 on)."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from vllm_dcp_hybrid.worker import startup  # noqa: E402

pytestmark = [
    pytest.mark.contract,
    pytest.mark.replaces("vllm_dcp_hybrid.worker.block_copies:copy_kv_cache_blocks_inplace"),
]

NUM_BLOCKS, PAGE, STATE = 6, 64, 16


def views(num_layers: int, state_first: bool) -> tuple[Any, list[Any]]:
    """One allocation of some layers, layer by layer, and per layer the views of a state and of attention KV."""
    memory = torch.arange(num_layers * NUM_BLOCKS * PAGE, dtype=torch.int32).view(num_layers, NUM_BLOCKS, PAGE)
    found = []
    for layer in memory:
        pair = [layer[:, :STATE], layer.view(NUM_BLOCKS, 4, 16)]
        found += pair if state_first else pair[::-1]
    return memory, found


@pytest.fixture
def copy_blocks(scenes: Any) -> Callable[..., None]:
    """vLLM's function, as its runners hold it."""
    function: Callable[..., None] = scenes.runner.copy_kv_cache_blocks_inplace
    return function


@pytest.mark.parametrize("num_layers", [1, 2, 3])
@pytest.mark.parametrize("state_first", [True, False])
def test_the_whole_block_is_copied_whichever_view_comes_first(
    copy_blocks: Callable[..., None], monkeypatch: pytest.MonkeyPatch, num_layers: int, state_first: bool
) -> None:
    monkeypatch.setattr(startup, "_is_active", True)
    memory, caches = views(num_layers, state_first)
    before = memory.clone()
    copy_blocks(caches, NUM_BLOCKS, [(1, 4), (2, 5)])
    assert (memory[:, 4] == before[:, 1]).all()
    assert (memory[:, 5] == before[:, 2]).all()
    assert (memory[:, :4] == before[:, :4]).all()


def test_stock_copies_the_bytes_of_the_first_view_only(
    copy_blocks: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault that is mended: where one allocation holds several layers, and a state comes first."""
    monkeypatch.setattr(startup, "_is_active", False)
    memory, caches = views(2, state_first=True)
    before = memory.clone()
    copy_blocks(caches, NUM_BLOCKS, [(1, 4)])
    assert (memory[:, 4, :STATE] == before[:, 1, :STATE]).all()
    assert (memory[:, 4, STATE:] == before[:, 4, STATE:]).all()


def test_only_workers_with_dcp_are_active(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "_is_active", False)
    for device, is_hybrid, dcp, expected in (
        ("cuda", True, 2, True),
        ("cuda", False, 2, False),
        ("cuda", True, 1, False),
        ("cpu", False, 2, True),
    ):
        config = SimpleNamespace(
            additional_config={},
            parallel_config=SimpleNamespace(decode_context_parallel_size=dcp),
            model_config=SimpleNamespace(is_hybrid=is_hybrid),
            device_config=SimpleNamespace(device_type=device),
        )
        worker = SimpleNamespace(init_device=lambda: None)
        startup.worker_base_init_on_cpu(lambda *args: None, worker, (config,), {})
        assert startup.is_active() is expected
        assert startup.is_registered("CPU_ATTN") is (device == "cpu")
        assert not startup.is_registered("FLASH_ATTN")
    startup.withdraw_attention_backends()
