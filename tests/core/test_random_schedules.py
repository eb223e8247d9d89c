# SPDX-License-Identifier: Apache-2.0
"""Random lives of requests over vLLM's real scheduler, for every mix of KV cache groups and DCP size.

The same examples in every run; ``DCP_HYBRID_MACHINE=N`` runs N times as many, for N above 1 other ones each time.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from scheduling_machine import MIXES, SchedulingMachine

pytestmark = pytest.mark.contract

TIMES = float(os.environ.get("DCP_HYBRID_MACHINE", "1"))
EXAMPLES = settings(
    max_examples=max(1, round(45 * TIMES)),
    stateful_step_count=30,
    derandomize=TIMES <= 1,
    database=None,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


def run(scenes: Any, mix: str, dcp: int, examples: settings = EXAMPLES) -> Counter[str]:
    """What happened in all examples."""
    seen: Counter[str] = Counter()
    run_state_machine_as_test(lambda: SchedulingMachine(scenes, MIXES[mix], dcp, seen), settings=examples)
    return seen


@pytest.mark.parametrize("dcp", [1, 2, 4])
@pytest.mark.parametrize("mix", MIXES)
def test_cases_10_11_14_20_blocks_and_hits_are_right_whatever_requests_do(scenes: Any, mix: str, dcp: int) -> None:
    """CASES 10, 11, 14, 20: the invariants of the machine; and that it got where faults could be."""
    seen = run(scenes, mix, dcp)
    print(dict(seen))
    if TIMES < 1:
        return  # too few examples to get everywhere
    expected = {"evictions", "resets", "aborts", "reads"}
    if MIXES[mix].mode != "none":
        expected |= {"hits", "shared blocks"}
    if mix == "recurrent":
        expected.add("preemptions")
    assert expected <= {name for name, number in seen.items() if number}


Plant = Callable[[Any, pytest.MonkeyPatch], None]


def end_chunks_anywhere(scenes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that is cached as that of a whole block is of fewer tokens."""
    monkeypatch.setattr(
        scenes.Scheduler, "_mamba_block_aligned_split", lambda self, request, wanted, *rest, **more: wanted
    )


def hash_without_the_last_token(scenes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sha256 = scenes.sha256
    monkeypatch.setattr(scenes, "sha256", lambda value: sha256((value[0], value[1][:-1], *value[2:])))


def lose_a_block(scenes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = scenes.kv_cache_coordinator.BlockPool
    free = pool.free_blocks

    def free_all_but_one(self: Any, blocks: Iterable[Any], *rest: Any, **more: Any) -> Any:
        return free(self, list(blocks)[1:], *rest, **more)

    monkeypatch.setattr(pool, "free_blocks", free_all_but_one)


def scale_recurrent_blocks(scenes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """CASES 1."""

    def scaled(groups: Any, dcp: int) -> Any:
        return replace(
            groups,
            kv_cache_groups=[
                replace(
                    group, kv_cache_spec=replace(group.kv_cache_spec, block_size=group.kv_cache_spec.block_size * dcp)
                )
                for group in groups.kv_cache_groups
            ],
        )

    monkeypatch.setattr(scenes.adapter, "scheduler_kv_cache_config", scaled)


def forget_to_scale(scenes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenes.adapter, "scheduler_kv_cache_config", lambda groups, dcp: groups)


OURS = pytest.mark.replaces("vllm_dcp_hybrid.core.coordinator:get_kv_cache_coordinator")


@pytest.mark.parametrize(
    "plant",
    [
        end_chunks_anywhere,
        hash_without_the_last_token,
        lose_a_block,
        pytest.param(scale_recurrent_blocks, marks=OURS),
        pytest.param(forget_to_scale, marks=OURS),
    ],
)
def test_a_planted_fault_is_found(scenes: Any, monkeypatch: pytest.MonkeyPatch, plant: Plant) -> None:
    plant(scenes, monkeypatch)
    with pytest.raises((AssertionError, ValueError, LookupError)):
        run(scenes, "recurrent", 2, settings(EXAMPLES, phases=[Phase.generate], derandomize=True))
