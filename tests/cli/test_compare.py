# SPDX-License-Identifier: Apache-2.0
"""Agreement of two runs in log-probabilities."""

from __future__ import annotations

import math

import pytest

from vllm_dcp_hybrid.cli.compare import BOUNDS, Bounds, Generation, compare, largest, mean, parse_choice

TIGHT = Bounds(0.01, 0.01, "a test")


def generation(*tops: dict[int, float], prompt: tuple[float, ...] = (-1.0, -2.0)) -> Generation:
    """The first token of each dictionary is the chosen one."""
    return Generation(len(prompt) + 1, prompt, tuple(next(iter(top)) for top in tops), tops)


def test_equal_runs_agree_exactly() -> None:
    one = generation({5: -0.1, 6: -3.0}, {7: -0.2, 8: -2.0})
    agreement = compare(one, one)
    assert agreement.first_difference is None
    assert (largest(agreement.prompt), largest(agreement.generated)) == (0.0, 0.0)
    assert agreement.is_within(TIGHT)


def test_nothing_is_compared_after_the_first_difference() -> None:
    one = generation({5: -0.1}, {7: -0.70, 8: -0.71}, {1: -0.1})
    other = generation({5: -0.1}, {8: -0.70, 7: -0.71}, {2: -9.0})
    agreement = compare(one, other)
    assert agreement.first_difference == 1
    assert len(agreement.generated) == 2
    assert agreement.generated[1] == pytest.approx(0.01)


def test_token_that_the_other_does_not_list_is_at_least_as_far_as_its_last() -> None:
    one = generation({7: -0.5, 8: -3.0})
    other = generation({9: -0.4, 8: -4.0})
    assert compare(one, other).generated == (pytest.approx(3.5),)


def test_shorter_answer_is_a_difference() -> None:
    one, other = generation({5: -0.1}, {6: -0.1}), generation({5: -0.1})
    assert compare(one, other).first_difference == 1


@pytest.mark.parametrize("part", ["prompt", "generated"])
def test_what_is_no_number_is_never_within_bounds(part: str) -> None:
    one = generation({5: -0.1})
    other = generation({5: math.nan}) if part == "generated" else generation({5: -0.1}, prompt=(math.nan, -2.0))
    assert not compare(one, other).is_within(BOUNDS["bfloat16"])


def test_bounds_hold_for_prompt_and_answer_apart() -> None:
    many = tuple([-1.0] * 1000)
    one = generation(*[{5: -0.1}] * 32, prompt=many)
    other = generation(*[{5: -0.25}] * 32, prompt=many)
    assert mean((*compare(one, other).prompt, *compare(one, other).generated)) < 0.1
    assert not compare(one, other).is_within(BOUNDS["bfloat16"])


def test_few_tokens_have_a_maximum_and_no_mean() -> None:
    bounds = BOUNDS["bfloat16"]
    assert bounds.hold_for([0.5])
    assert not bounds.hold_for([0.5] * 16)
    assert not bounds.hold_for([1.1])


def test_means_of_nothing_are_0() -> None:
    assert (mean(()), largest(())) == (0.0, 0.0)


def test_choice_of_the_completions_api() -> None:
    choice = {
        "token_ids": [7],
        "prompt_logprobs": [None, {"21": {"logprob": -12.5}, "3": {"logprob": -0.1}}, {"22": {"logprob": None}}],
        "logprobs": {"top_logprobs": [{"token_id:7": -0.5, "token_id:9": -1.5}]},
    }
    parsed = parse_choice(choice, [20, 21, 22])
    assert (parsed.num_prompt_tokens, parsed.token_ids, parsed.top) == (3, (7,), ({7: -0.5, 9: -1.5},))
    assert parsed.prompt[0] == -12.5
    assert math.isnan(parsed.prompt[1])
