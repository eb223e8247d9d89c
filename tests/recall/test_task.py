# SPDX-License-Identifier: Apache-2.0
"""The recall task asks what it says it asks."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import task

from vllm_dcp_hybrid.cli.verify.recall import read_recall_task

ASSETS = Path(__file__).parent.with_name("assets")
PROMPTS = task.make_prompts(60, seed=1, num_questions=4)


def test_the_answer_of_a_prompt_stands_once_in_its_text() -> None:
    for prompt in PROMPTS:
        key = prompt.tokens[-1 - task.KEY_LENGTH : -1]
        fact = [task.KEY, *key, task.VALUE]
        places = [at for at in range(len(prompt.tokens)) if prompt.tokens[at : at + len(fact)] == fact]
        assert places == [len(prompt.tokens) - prompt.distance]
        begin = places[0] + len(fact)
        assert [*prompt.tokens[begin : begin + task.VALUE_LENGTH], task.END] == prompt.answer


def test_prompts_end_in_a_question_and_fit_into_the_longest_length() -> None:
    for prompt in PROMPTS:
        assert (prompt.tokens[-2 - task.KEY_LENGTH], prompt.tokens[-1]) == (task.QUERY, task.ANSWER)
        assert len(prompt.tokens) + len(prompt.answer) <= task.MAX_LENGTH


def test_questions_about_one_text_differ_in_nothing_but_the_question() -> None:
    prompts = task.make_document(random.Random(0), length=400, num_facts=8, num_questions=4)
    assert len({tuple(prompt.tokens[:-4]) for prompt in prompts}) == 1
    assert len({tuple(prompt.tokens[-4:]) for prompt in prompts}) == 4


def test_the_last_write_of_a_register_is_the_answer() -> None:
    for prompt in task.make_register_prompts(40, seed=1, max_length=500):
        register = prompt.tokens[-2]
        items = zip(prompt.tokens, prompt.tokens[1:], prompt.tokens[2:], strict=False)
        writes = [value for marker, name, value in items if (marker, name) == (task.SET, register)]
        assert prompt.answer == [writes[-1], task.END]


def test_equal_seeds_give_equal_prompts() -> None:
    assert task.make_prompts(8, seed=3) == task.make_prompts(8, seed=3) != task.make_prompts(8, seed=4)


def test_facts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="10 facts and a question do not fit into 64 tokens"):
        task.make_document(random.Random(0), length=64, num_facts=10, num_questions=1)


@pytest.mark.parametrize("model", sorted(ASSETS.glob("recall-*")), ids=lambda path: path.name)
def test_models_say_this_task_to_verify(model: Path) -> None:
    said = read_recall_task(model)
    assert said
    assert (said.first_word, said.end_word, said.max_length) == (task.FIRST_WORD, task.VOCAB_SIZE, task.MAX_LENGTH)
    assert (said.key_length, said.value_length) == (task.KEY_LENGTH, task.VALUE_LENGTH)
    assert said.question == (task.QUERY, "key", task.ANSWER)
    assert json.loads((model / "config.json").read_text())["vocab_size"] == task.VOCAB_SIZE
