# SPDX-License-Identifier: Apache-2.0
"""Training batches ask for what they hold."""

from __future__ import annotations

import pytest
import task

pytestmark = pytest.mark.contract  # torch comes with vLLM


@pytest.fixture(scope="module")
def batch() -> list[tuple[list[int], list[bool]]]:
    """Sequences of 400 tokens, and which of them are answers."""
    from batches import BatchMaker

    tokens, is_answer = BatchMaker("cpu", seed=1).make(16, 400, num_facts=6, num_register_items=20)
    return list(zip(tokens.tolist(), is_answer.tolist(), strict=True))


def test_every_question_comes_after_its_fact_and_before_its_answer(batch) -> None:
    for tokens, is_answer in batch:
        questions = [at for at, token in enumerate(tokens) if token == task.QUERY]
        assert len(questions) == 6
        for at in questions:
            key, answer = tokens[at + 1 : at + 3], tokens[at + 4 : at + 7]
            fact = [task.KEY, *key, task.VALUE, *answer]
            assert fact in [tokens[begin : begin + len(fact)] for begin in range(at)]
            assert (tokens[at + 3], tokens[at + 7]) == (task.ANSWER, task.END)
            assert is_answer[at : at + 8] == [False] * 4 + [True] * 4


def test_registers_hold_what_was_written_last(batch) -> None:
    num_reads = 0
    for tokens, is_answer in batch:
        held: dict[int, int] = {}
        for at, token in enumerate(tokens):
            if token == task.SET:
                held[tokens[at + 1]] = tokens[at + 2]
            elif token == task.GET:
                num_reads += 1
                assert tokens[at + 2 : at + 5] == [task.ANSWER, held[tokens[at + 1]], task.END]
                assert is_answer[at + 3 : at + 5] == [True, True]
    assert num_reads > 50


def test_nothing_else_is_an_answer(batch) -> None:
    for tokens, is_answer in batch:
        reads = tokens.count(task.GET)
        assert sum(is_answer) == 4 * tokens.count(task.QUERY) + 2 * reads
