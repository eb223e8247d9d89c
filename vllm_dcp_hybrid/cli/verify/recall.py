# SPDX-License-Identifier: Apache-2.0
"""Recall: a model that was trained to find facts in its context says in `recall.json` how to ask it for them.

An example of the file, for a model with the tokens 2 `KEY`, 3 `VALUE`, 4 `QUERY`, 5 `ANSWER` and 1 `END`::

    {"format": 1, "task": "key-value recall", "max_length": 4096, "words": [8, 256], "key_length": 2, "value_length": 3,
     "fact": [2, "key", 3, "value"], "question": [4, "key", 5], "answer": ["value", 1]}

A prompt is random words with facts among them, and ends in a question about one fact.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_dcp_hybrid.cli.model_shape import UnreadableModel

MARKER = "recall.json"
_FORMAT = 1
_TASK = "key-value recall"
_SHORTEST = 64
_MOST_FACTS = 32

Template = tuple[int | str, ...]


@dataclass(frozen=True)
class RecallTask:
    """What `recall.json` says.

    Attributes:
        max_length: longest prompt and answer, tokens.
        first_word, end_word: the range of tokens that fillers, keys and values are drawn from.
        key_length, value_length: tokens.
        fact, question, answer: token ids, with "key" and "value" where those of a fact go.
    """

    max_length: int
    first_word: int
    end_word: int
    key_length: int
    value_length: int
    fact: Template
    question: Template
    answer: Template

    @property
    def answer_length(self) -> int:
        """Tokens of an answer."""
        return len(_filled(self.answer, (0,) * self.key_length, (0,) * self.value_length))


@dataclass(frozen=True)
class RecallPrompt:
    """A question whose answer is somewhere in its own text."""

    tokens: list[int]
    answer: list[int]


def read_recall_task(model: Path) -> RecallTask | None:
    """The task of a recall model; None for any other model.

    Raises:
        UnreadableModel: the file is there, and is not of this format.
    """
    file = model / MARKER
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text("utf-8"))
        if (content["format"], content["task"]) != (_FORMAT, _TASK):
            raise UnreadableModel(f"{file} is not of format {_FORMAT} of the task {_TASK!r}.")
        first_word, end_word = content["words"]
        return RecallTask(
            max_length=int(content["max_length"]),
            first_word=int(first_word),
            end_word=int(end_word),
            key_length=int(content["key_length"]),
            value_length=int(content["value_length"]),
            fact=tuple(content["fact"]),
            question=tuple(content["question"]),
            answer=tuple(content["answer"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, UnreadableModel):
            raise
        raise UnreadableModel(f"{file} does not say what its model recalls: {error}.") from error


def recall_prompts(task: RecallTask, count: int, *, max_length: int, seed: int = 0) -> list[RecallPrompt]:
    """Prompts of lengths spread evenly on a logarithmic scale, up to `max_length` tokens with their answers."""
    source = random.Random(seed)
    longest = min(task.max_length, max_length) - task.answer_length
    ratio = max(1.0, longest / _SHORTEST)
    lengths = [min(longest, round(_SHORTEST * ratio ** (place / max(1, count - 1)))) for place in range(count)]
    return [_recall_prompt(task, source, length) for length in lengths]


def num_recalled(prompts: Sequence[RecallPrompt], answers: Sequence[Sequence[int]]) -> int:
    """How many answers are right in every token."""
    return sum(is_recalled(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True))


def is_recalled(prompt: RecallPrompt, answer: Sequence[int]) -> bool:
    """Whether an answer begins with the right one."""
    return list(answer[: len(prompt.answer)]) == prompt.answer


def _recall_prompt(task: RecallTask, source: random.Random, length: int) -> RecallPrompt:
    def words(count: int) -> tuple[int, ...]:
        return tuple(source.randrange(task.first_word, task.end_word) for _ in range(count))

    fact_length = len(_filled(task.fact, words(task.key_length), words(task.value_length)))
    question_length = len(_filled(task.question, words(task.key_length), ()))
    most = max(1, min(_MOST_FACTS, (length - question_length) // (2 * fact_length)))
    facts: Mapping[tuple[int, ...], tuple[int, ...]] = {
        words(task.key_length): words(task.value_length) for _ in range(source.randint(1, most))
    }
    num_fillers = max(0, length - question_length - fact_length * len(facts))
    tokens: list[int] = []
    done = 0
    for place, (key, value) in zip(sorted(source.randint(0, num_fillers) for _ in facts), facts.items(), strict=True):
        tokens += [*words(place - done), *_filled(task.fact, key, value)]
        done = place
    key, value = source.choice(list(facts.items()))
    tokens += [*words(num_fillers - done), *_filled(task.question, key, ())]
    return RecallPrompt(tokens, _filled(task.answer, key, value))


def _filled(template: Template, key: Sequence[int], value: Sequence[int]) -> list[int]:
    tokens: list[int] = []
    for part in template:
        tokens += {"key": key, "value": value}[part] if isinstance(part, str) else [part]
    return tokens
