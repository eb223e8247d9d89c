# SPDX-License-Identifier: Apache-2.0
"""From two interviews to rows of differences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_dcp_hybrid.cli.compare import Generation, mean
from vllm_dcp_hybrid.cli.verify.asking import DCPAnswers, OracleAnswers, OtherAnswers, Scores
from vllm_dcp_hybrid.cli.verify.bounds import Recall, Row, difference_row
from vllm_dcp_hybrid.cli.verify.recall import RecallPrompt, is_recalled
from vllm_dcp_hybrid.cli.verify.work import Work

OTHER = "answers"
SCORED, DECODED, REPEATED, TAIL = "scored", "decoded", "decoded, warm", "tail, warm"


@dataclass(frozen=True)
class Measured:
    """What the judgement needs.

    Attributes:
        rows: DCP against the oracle.
        noise: the oracle against itself, or against an engine without DCP whose tensor-parallel size is another.
        sensitivity: mean difference that the probe's exchanged tokens make.
        recall: None for a model without a recall task.
    """

    rows: list[Row]
    noise: list[Row]
    sensitivity: float
    recall: Recall | None


def measure(work: Work, ours: DCPAnswers, oracle: OracleAnswers, recall: Sequence[RecallPrompt]) -> Measured:
    """Compare every request."""
    rows = [
        difference_row(SCORED, len(prompt), a, b)
        for prompt, a, b in zip(work.scored, ours.scored, oracle.scored, strict=True)
        if len(prompt) > 1
    ]
    for phase, prompts, answers in (
        (DECODED, work.decoded, ours.decoded),
        (REPEATED, work.decoded, ours.repeated),
        (TAIL, work.tails, ours.tails),
    ):
        others = oracle.decoded if prompts is work.decoded else [None] * len(prompts)
        rows += [
            _decoded_row(phase, prompt, answer, oracle.score_of, other)
            for prompt, answer, other in zip(prompts[: len(answers)], answers, others[: len(answers)], strict=True)
        ]
    noise = [
        difference_row(SCORED, len(prompt), a, b)
        for prompt, a, b in zip(work.scored, oracle.scored_alone, oracle.scored, strict=True)
    ]
    # In some releases stock itself answers a prompt of one token wrongly, which is no noise.
    noise += [
        _decoded_row(DECODED, prompt, answer, oracle.score_of, None)
        for prompt, answer in zip(work.decoded, oracle.decoded, strict=True)
        if len(prompt) > 1
    ]
    return Measured(rows, noise, _sensitivity(oracle), _recall(recall, ours, oracle))


def noise_between_sizes(work: Work, oracle: OracleAnswers, other: OtherAnswers) -> list[Row]:
    """What the order of summation alone changes: two engines without DCP, of different tensor-parallel sizes."""
    scored = [
        difference_row(SCORED, len(prompt), a, b)
        for prompt, a, b in zip(work.scored, other.scored, oracle.scored, strict=True)
    ]
    return scored + [
        difference_row(OTHER, len(sequence), other.score_of[sequence], reference)
        for sequence, reference in oracle.score_of.items()
    ]


def _decoded_row(
    phase: str,
    prompt: Sequence[int],
    answer: Generation,
    score_of: dict[tuple[int, ...], Scores],
    other: Generation | None,
) -> Row:
    """A generation's own log-probabilities against the oracle's scores of the same tokens."""
    own = [top[token] for token, top in zip(answer.token_ids, answer.top, strict=True)]
    reference = score_of[(*prompt, *answer.token_ids)][len(prompt) - 1 :]
    num_equal = None if other is None else _num_equal(answer.token_ids, other.token_ids)
    return difference_row(phase, len(prompt), own, reference, num_equal=num_equal)


def _num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _sensitivity(oracle: OracleAnswers) -> float:
    pairs = zip(oracle.probe_intact, oracle.probe_damaged, strict=True)
    moved = mean([abs(a - b) for a, b in pairs])
    return moved if math.isfinite(moved) else 0.0


def _recall(recall: Sequence[RecallPrompt], ours: DCPAnswers, oracle: OracleAnswers) -> Recall | None:
    if not recall:
        return None
    with_dcp = [is_recalled(prompt, answer) for prompt, answer in zip(recall, ours.recalled, strict=True)]
    without = [is_recalled(prompt, answer) for prompt, answer in zip(recall, oracle.recalled, strict=True)]
    lost = [found and not kept for kept, found in zip(with_dcp, without, strict=True)]
    return Recall(len(recall), sum(with_dcp), sum(without), sum(lost))
