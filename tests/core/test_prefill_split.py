# SPDX-License-Identifier: Apache-2.0
"""Where prefill chunks end."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_dcp_hybrid.core.prefill_split import end_on_boundary, mamba_block_aligned_split

B = 272


@given(
    start=st.integers(0, 5000),
    chunk=st.integers(0, 5000),
    block=st.integers(1, 600),
    num_kept=st.integers(0, 20),
)
def test_a_chunk_ends_on_the_last_boundary_that_it_reaches(start: int, chunk: int, block: int, num_kept: int) -> None:
    last_kept = num_kept * block
    end = start + end_on_boundary(start, chunk, block, last_kept)
    reached = [kept for kept in range(block, last_kept + 1, block) if start < kept <= start + chunk]
    assert end == (reached[-1] if reached else start + chunk)


def fake_scheduler(*, dcp: int, block_size: int = B, use_eagle: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        block_size=block_size * dcp,
        cache_config=SimpleNamespace(block_size=block_size),
        dcp_world_size=dcp,
        use_eagle=use_eagle,
    )


def fake_request(num_prompt_tokens: int, num_computed_tokens: int = 0, num_output_tokens: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        num_prompt_tokens=num_prompt_tokens,
        num_tokens=num_prompt_tokens + num_output_tokens,
        num_computed_tokens=num_computed_tokens,
    )


def original_that_records(scheduler: SimpleNamespace, answer: int = 7) -> tuple[Callable[..., int], list[Any]]:
    seen: list[Any] = []

    def original(*args: Any, **kwargs: Any) -> int:
        seen.append((args, kwargs, scheduler.cache_config.block_size))
        return answer

    return original, seen


def test_the_original_decides_with_the_scheduler_block_in_place_of_one_ranks() -> None:
    scheduler = fake_scheduler(dcp=2)
    original, seen = original_that_records(scheduler)
    request = fake_request(5000)
    assert mamba_block_aligned_split(original, scheduler, (request, 7), {}) == 7
    ((args, kwargs, block),) = seen
    assert args == (request, 7)
    assert kwargs == {}
    assert block == 2 * B
    assert scheduler.cache_config.block_size == B


def test_the_block_size_is_put_back_when_the_original_fails() -> None:
    scheduler = fake_scheduler(dcp=2)

    def original(*args: Any) -> int:
        raise RuntimeError("stock")

    with pytest.raises(RuntimeError, match="stock"):
        mamba_block_aligned_split(original, scheduler, (fake_request(5000), 7), {})
    assert scheduler.cache_config.block_size == B


def test_a_decode_is_not_cut() -> None:
    scheduler = fake_scheduler(dcp=2)
    original, _ = original_that_records(scheduler, answer=4)
    request = fake_request(540, num_computed_tokens=542, num_output_tokens=3)
    assert mamba_block_aligned_split(original, scheduler, (request, 4), {}) == 4


@pytest.fixture(scope="module")
def split(scenes: Any) -> Callable[..., int]:
    """The patched method, called on one of vLLM's own schedulers that has only what the method reads."""

    def call(stand_in: SimpleNamespace, *args: Any, is_stock: bool = False, **kwargs: Any) -> int:
        if not scenes.keeps_states_of_common_prefixes():
            kwargs.pop("num_uncached_common_prefix_tokens", None)
        scheduler = object.__new__(scenes.Scheduler)
        vars(scheduler).update(vars(stand_in))
        method = scheduler._mamba_block_aligned_split
        return (method.__wrapped__ if is_stock else method)(*args, **kwargs)

    return call


@st.composite
def situations(draw: Any) -> tuple[int, int, int, int, int, int, int, bool]:
    dcp = draw(st.sampled_from([1, 2, 3, 4]))
    block = draw(st.sampled_from([16, 272]))
    num_prompt_tokens = draw(st.integers(1, 12 * block))
    # Steps end anywhere, hits on scheduler blocks.
    computed = draw(st.integers(0, num_prompt_tokens - 1))
    local = draw(st.integers(0, 2)) * block * dcp if draw(st.booleans()) else 0
    left = max(num_prompt_tokens - computed - local, 1)
    wanted = draw(st.integers(1, left))
    uncached = draw(st.integers(0, 3)) * block
    return dcp, block, num_prompt_tokens, computed, local, wanted, uncached, draw(st.booleans())


@pytest.mark.replaces("vllm_dcp_hybrid.core.prefill_split:mamba_block_aligned_split")
@pytest.mark.contract
@settings(max_examples=400, deadline=None)
@given(situation=situations())
def test_it_gets_on_where_stock_would_and_ends_on_the_last_boundary_it_reaches(
    split: Callable[..., int], situation: tuple[int, int, int, int, int, int, int, bool]
) -> None:
    dcp, block, length, computed, local, wanted, uncached, use_eagle = situation
    request = fake_request(length, computed)
    stock = split(
        fake_scheduler(dcp=1, block_size=block, use_eagle=use_eagle),
        request,
        wanted,
        local,
        0,
        num_uncached_common_prefix_tokens=uncached,
        is_stock=True,
    )
    scheduler = fake_scheduler(dcp=dcp, block_size=block, use_eagle=use_eagle)
    chunk = split(
        scheduler,
        request,
        wanted,
        num_new_local_computed_tokens=local,
        num_uncached_common_prefix_tokens=uncached,
    )
    assert 0 <= chunk <= wanted
    assert scheduler.cache_config.block_size == block
    if dcp == 1:
        assert chunk == stock
        return
    if stock > 0:
        assert chunk > 0
    start, whole = computed + local, block * dcp
    last_kept = length // whole * whole
    if use_eagle:
        last_kept = max(last_kept - whole, 0)
    if start < length:
        boundaries = range(whole, last_kept + 1, whole)
        reached = [boundary for boundary in boundaries if start < boundary <= start + chunk]
        assert not reached or reached[-1] == start + chunk


@pytest.mark.replaces("vllm_dcp_hybrid.core.prefill_split:mamba_block_aligned_split")
@pytest.mark.contract
@pytest.mark.parametrize(
    ("dcp", "length", "budget", "ends"),
    [
        (2, 1377, 2048, [1088, 1377]),
        (2, 1649, 2048, [1632, 1649]),
        (2, 3000, 2048, [1632, 2720, 3000]),
        (2, 1377, 512, [272, 544, 816, 1088, 1377]),
        (4, 1377, 512, [272, 544, 816, 1088, 1377]),
        (4, 3000, 2048, [1088, 2176, 3000]),
        (1, 1377, 2048, [1360, 1377]),
    ],
)
def test_the_examples_of_targets(
    split: Callable[..., int], dcp: int, length: int, budget: int, ends: list[int]
) -> None:
    """TARGETS 5.4."""
    assert chunk_ends(split, fake_scheduler(dcp=dcp), length, budget) == ends


@pytest.mark.replaces("vllm_dcp_hybrid.core.prefill_split:mamba_block_aligned_split")
@pytest.mark.contract
@pytest.mark.parametrize(("dcp", "ends"), [(1, [1904, 2720, 3000]), (2, [1632, 2176, 3000]), (4, [1088, 3000])])
def test_with_an_eagle_drafter_no_chunk_is_cut_for_a_state_that_is_dropped(
    split: Callable[..., int], dcp: int, ends: list[int]
) -> None:
    """The lookup drops the last block, so the last state that can be hit is one scheduler block earlier."""
    assert chunk_ends(split, fake_scheduler(dcp=dcp, use_eagle=True), 3000, 2048) == ends


def chunk_ends(split: Callable[..., int], scheduler: SimpleNamespace, length: int, budget: int) -> list[int]:
    """Where the chunks of a prompt end that has all of every step's budget."""
    request, found = fake_request(length), []
    while request.num_computed_tokens < length:
        wanted = min(budget, length - request.num_computed_tokens)
        request.num_computed_tokens += split(scheduler, request, wanted)
        found.append(request.num_computed_tokens)
    return found
