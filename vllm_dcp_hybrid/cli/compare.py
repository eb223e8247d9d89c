# SPDX-License-Identifier: Apache-2.0
"""How far two runs of the same requests agree, in log-probabilities.

With random weights near-ties are common and a greedy token may flip on rounding alone, so text is no criterion.  The
log-probabilities of tokens after equal prefixes are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# A mean over fewer tokens is little steadier than a single one.
_FEWEST_FOR_A_MEAN = 16


@dataclass(frozen=True)
class Bounds:
    """How far apart log-probabilities may lie.

    Attributes:
        mean: over the prompt's tokens of a request, and over its generated ones, where they are not too few.
        maximum: of any token.
        reason: where the noise comes from, and how large it and a fault are in comparison.
    """

    mean: float
    maximum: float
    reason: str

    def hold_for(self, differences: Sequence[float]) -> bool:
        """Whether these differences keep to the bounds."""
        has_good_mean = len(differences) < _FEWEST_FOR_A_MEAN or mean(differences) <= self.mean
        return has_good_mean and largest(differences) <= self.maximum


_NOISE = "Noise: DCP adds partial softmax sums in another order"
_FAULT = "a wrong half of the context moves the mean by 1 or more, one wrong token of 1,403 by 0.15"

# Measured with the models of this package, Qwen3-Next in bfloat16 and LFM2 in float32, on vLLM 0.25.1.
BOUNDS = {
    "float32": Bounds(0.01, 0.01, f"{_NOISE}, which float32 hardly shows; for scale, {_FAULT}."),
    "bfloat16": Bounds(
        0.1,
        1.0,
        f"{_NOISE}, and bfloat16 keeps 8 bits; for scale, TP 1 and TP 2 without DCP differ by 0.05 in the mean and "
        f"0.25 at most, {_FAULT}.",
    ),
}


@dataclass(frozen=True)
class Generation:
    """One request's answer.

    Attributes:
        num_prompt_tokens: length of the prompt.
        prompt: log-probability of each prompt token after the first; empty where they were not asked for.
        token_ids: the generated tokens.
        top: for each of them, token id -> log-probability of the likeliest tokens, the chosen one included.
    """

    num_prompt_tokens: int
    prompt: tuple[float, ...]
    token_ids: tuple[int, ...]
    top: tuple[dict[int, float], ...]


@dataclass(frozen=True)
class Agreement:
    """One request in two runs.

    Attributes:
        num_prompt_tokens: length of the prompt.
        prompt: differences in log-probability over the prompt's tokens.
        generated: the same over generated tokens, up to and including the first place where the greedy tokens differ
            (what comes after has another prefix).
        first_difference: index of that place, None where all tokens are equal.
        num_generated: tokens generated.
    """

    num_prompt_tokens: int
    prompt: tuple[float, ...]
    generated: tuple[float, ...]
    first_difference: int | None
    num_generated: int

    def is_within(self, bounds: Bounds) -> bool:
        """Whether both parts keep to the bounds."""
        return bounds.hold_for(self.prompt) and bounds.hold_for(self.generated)


def parse_choice(choice: dict[str, Any], prompt: Sequence[int]) -> Generation:
    """One choice of a completions answer.

    The request must ask for `logprobs`, `return_token_ids` and `return_tokens_as_token_ids`.
    """
    asked = choice.get("prompt_logprobs") or ()
    return Generation(
        num_prompt_tokens=len(prompt),
        # The first token has no prefix, hence no probability.
        prompt=tuple(
            _number(entry[str(token)]["logprob"]) for token, entry in zip(prompt, asked, strict=False) if entry
        ),
        token_ids=tuple(choice["token_ids"]),
        top=tuple(
            {int(name.removeprefix("token_id:")): _number(value) for name, value in entry.items()}
            for entry in choice["logprobs"]["top_logprobs"]
        ),
    )


def compare(one: Generation, other: Generation) -> Agreement:
    """Compare two answers to the same request."""
    pairs = zip(one.token_ids, other.token_ids, strict=False)
    first_difference = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
    num_compared = min(len(one.token_ids), len(other.token_ids))
    if first_difference is not None:
        num_compared = first_difference + 1
    elif len(one.token_ids) != len(other.token_ids):
        first_difference = num_compared
    generated = tuple(
        max(
            _difference_of(one.token_ids[place], one.top[place], other.top[place]),
            _difference_of(other.token_ids[place], other.top[place], one.top[place]),
        )
        for place in range(num_compared)
    )
    return Agreement(
        num_prompt_tokens=one.num_prompt_tokens,
        prompt=tuple(_distance(a, b) for a, b in zip(one.prompt, other.prompt, strict=True)),
        generated=generated,
        first_difference=first_difference,
        num_generated=len(one.token_ids),
    )


def mean(differences: Sequence[float]) -> float:
    """Their mean, 0 for none."""
    return math.fsum(differences) / len(differences) if differences else 0.0


def largest(differences: Sequence[float]) -> float:
    """The largest, 0 for none."""
    return max(differences, default=0.0)


def _difference_of(token: int, own: dict[int, float], others: dict[int, float]) -> float:
    """How far apart two distributions see a token; at least that far where the other one does not list it."""
    if token in others:
        return _distance(own[token], others[token])
    return max(0.0, own[token] - min(others.values(), default=-math.inf))


def _distance(a: float, b: float) -> float:
    """Infinite where one is not a number, so that no bound is kept by accident."""
    distance = abs(a - b)
    return math.inf if math.isnan(distance) else distance


def _number(value: Any) -> float:
    """vLLM's JSON has null where a number is not finite."""
    return math.nan if value is None else float(value)
