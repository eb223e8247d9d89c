# SPDX-License-Identifier: Apache-2.0
"""`verify`'s arithmetic: differences, measured bounds, verdicts."""

from __future__ import annotations

import math

import pytest

from vllm_dcp_hybrid.cli.verify.bounds import (
    FLOORS,
    LARGEST_FACTOR,
    MEAN_FACTOR,
    SENSITIVITY_FACTOR,
    Recall,
    Row,
    Verdict,
    bounds_for,
    difference_row,
    judge,
)

MANY = 64


def row(value: float, count: int = MANY) -> Row:
    return Row("scored", count + 1, (value,) * count)


def verdict(ours: list[Row], noise: list[Row], sensitivity: float = 10.0, dtype: str = "float32") -> Verdict:
    return judge(ours, noise, sensitivity, dtype).verdict


def test_rows_hold_absolute_differences() -> None:
    found = difference_row("decoded", 3, [-1.0, -2.0], [-1.5, -1.0], num_equal=1)
    assert found.differences == (0.5, 1.0)
    assert (found.mean, found.largest, found.num_equal, found.num_generated) == (0.75, 1.0, 1, 2)


def test_rows_of_unequal_length_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        difference_row("scored", 3, [-1.0], [-1.0, -2.0])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_with_dcp_is_an_infinite_difference(bad: float) -> None:
    assert difference_row("scored", 3, [bad, -1.0], [-1.0, -1.0]).differences == (math.inf, 0.0)


def test_a_number_that_is_none_without_dcp_is_no_reference() -> None:
    found = difference_row("scored", 3, [-1.0, -1.0], [math.nan, -1.0])
    assert not found.has_reference
    assert found.differences == (0.0,)


def test_bounds_are_multiples_of_the_oracles_noise() -> None:
    noise, bounds = bounds_for([row(0.1), row(0.3)], "bfloat16")
    assert noise == pytest.approx((0.3, 0.3))
    assert (bounds.mean, bounds.maximum) == pytest.approx((MEAN_FACTOR * 0.3, LARGEST_FACTOR * 0.3))


def test_few_tokens_of_noise_have_a_largest_and_no_mean() -> None:
    noise, _ = bounds_for([row(0.5, count=3), row(0.1)], "bfloat16")
    assert noise == pytest.approx((0.1, 0.5))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_oracle_without_noise_has_the_dtypes_floor(dtype: str) -> None:
    _, bounds = bounds_for([row(0.0)], dtype)
    assert (bounds.mean, bounds.maximum) == FLOORS[dtype]


def test_an_unknown_dtype_has_the_floor_of_bfloat16() -> None:
    assert bounds_for([], "fp8")[1].mean == bounds_for([], "bfloat16")[1].mean


def test_equal_answers_are_right() -> None:
    assert verdict([row(0.0)], [row(0.0)]) is Verdict.RIGHT


def test_what_exceeds_the_noise_is_wrong() -> None:
    noise = [row(0.01)]
    assert verdict([row(0.01 * MEAN_FACTOR - 0.001)], noise) is Verdict.RIGHT
    assert verdict([row(0.01 * MEAN_FACTOR + 0.001)], noise) is Verdict.WRONG


def test_one_wrong_request_among_many_is_wrong_and_named() -> None:
    bad = row(0.5)
    judgement = judge([row(0.0)] * 20 + [bad], [row(0.001)], 10.0, "float32")
    assert judgement.verdict is Verdict.WRONG
    assert judgement.outside == (bad,)


def test_one_wrong_token_is_wrong() -> None:
    assert verdict([Row("scored", 101, (*[0.0] * 99, 0.02))], [row(0.001)]) is Verdict.WRONG


def test_a_number_that_is_none_is_wrong_however_large_the_noise() -> None:
    assert verdict([Row("scored", 3, (math.inf,))], [row(5.0)], sensitivity=0.0) is Verdict.WRONG


def test_an_oracle_without_numbers_is_unclear() -> None:
    nothing = difference_row("scored", 3, [-1.0, -1.0], [math.nan, math.nan])
    judgement = judge([row(0.0), nothing], [row(0.0)], 10.0, "float32")
    assert judgement.verdict is Verdict.UNCLEAR
    assert "1 of 2 requests" in judgement.why_unclear


def test_noise_that_would_hide_a_fault_is_unclear() -> None:
    noise = [row(0.1)]
    enough = SENSITIVITY_FACTOR * MEAN_FACTOR * 0.1
    assert verdict([row(0.0)], noise, sensitivity=enough * 1.01) is Verdict.RIGHT
    assert verdict([row(0.0)], noise, sensitivity=enough * 0.99) is Verdict.UNCLEAR


def test_what_exceeds_even_large_noise_is_wrong() -> None:
    assert verdict([row(1.0)], [row(0.1)], sensitivity=0.0) is Verdict.WRONG


def test_a_lost_fact_is_wrong_within_all_bounds() -> None:
    recall = Recall(num_asked=48, num_with_dcp=47, num_without=48, num_lost=1)
    assert judge([row(0.0)], [row(0.0)], 10.0, "float32", recall).verdict is Verdict.WRONG


@pytest.mark.parametrize(("num_found", "verdict"), [(48, Verdict.RIGHT), (20, Verdict.UNCLEAR)])
def test_recall_shows_a_fault_that_log_probabilities_would_hide(num_found: int, verdict: Verdict) -> None:
    recall = Recall(num_asked=48, num_with_dcp=num_found, num_without=num_found, num_lost=0)
    assert judge([row(0.0)], [row(0.0)], 0.0, "float32", recall).verdict is verdict
