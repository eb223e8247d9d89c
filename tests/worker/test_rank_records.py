# SPDX-License-Identifier: Apache-2.0
"""Where ranks first differ."""

from __future__ import annotations

import pytest

from vllm_dcp_hybrid.worker.rank_records import (
    Progress,
    describe_collective,
    describe_positions,
    first_difference,
)


def done(*calls: str) -> Progress:
    return Progress(calls, is_complete=True)


def under_way(*calls: str) -> Progress:
    return Progress(calls, is_complete=False)


def test_ranks_that_did_the_same_do_not_differ() -> None:
    assert first_difference(3, {0: done("a", "b"), 1: done("a", "b")}) is None
    assert first_difference(3, {0: done(), 1: done()}) is None


def test_the_first_different_call_is_named_with_the_ranks_on_each_side() -> None:
    found = first_difference(7, {0: done("a", "b", "x"), 2: done("a", "c", "y"), 1: done("a", "b", "x")})
    assert found == "the ranks disagree in step 7, call 2, after a. ranks 0, 1: b; rank 2: c."


def test_a_rank_that_ended_the_step_early_skipped_what_the_others_are_in() -> None:
    found = first_difference(1, {0: done("a"), 1: under_way("a", "b")})
    assert found == "the ranks disagree in step 1, call 2, after a. rank 0: the end of the step; rank 1: b."


def test_a_rank_in_the_middle_of_a_step_may_still_follow() -> None:
    assert first_difference(1, {0: under_way("a"), 1: done("a", "b")}) is None
    assert first_difference(1, {0: under_way(), 1: under_way("a")}) is None


def test_a_difference_in_the_middle_of_a_step_is_one() -> None:
    assert first_difference(0, {0: under_way("a"), 1: under_way("b")}) == (
        "the ranks disagree in step 0, call 1. rank 0: a; rank 1: b."
    )


def test_digests_tell_calls_apart_and_are_short() -> None:
    assert done("a", "b").digest == done("a", "b").digest
    others = [done("ab"), done("b", "a"), done(), under_way("a", "b")]
    assert len({progress.digest for progress in (done("a", "b"), *others)}) == 5
    assert len(done(*["call"] * 10_000).digest) < 100


@pytest.mark.parametrize("progress", [done(), under_way("all_gather of [2, 3] float32", "b")])
def test_progress_survives_the_store(progress: Progress) -> None:
    assert Progress.from_json(progress.to_json().encode()) == progress


def test_a_collective_is_described_by_shapes_and_dtypes() -> None:
    torch = pytest.importorskip("torch")
    tensors = [(torch.Size([2, 3]), torch.float32), (torch.Size([5]), torch.bfloat16)]
    assert describe_collective("dcp swap", tensors) == "dcp swap of [2, 3] float32 + [5] bfloat16"


def test_positions_say_what_is_not_known() -> None:
    text = describe_positions(4, {1: None, 0: under_way("a", "b"), 2: done("a")})
    assert text == "rank 0: call 2, b; rank 1: nothing known of step 4; rank 2: the end of the step, 1 calls"
