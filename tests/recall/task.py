# SPDX-License-Identifier: Apache-2.0
"""The task of the recall models: facts among random words, and a question about one of them at the end.

    KEY k k VALUE v v v   ...   QUERY k k ANSWER  ->  v v v END

Models with a recurrent state also keep registers, of which the last write counts:

    SET r v   ...   SET r w   ...   GET r ANSWER  ->  w END

Words, keys and values are the same tokens, so that a fact is known by its neighbours only: these are what short
convolutions and recurrent states carry to the attention layers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

MARKERS = ("<pad>", "END", "KEY", "VALUE", "QUERY", "ANSWER", "SET", "GET")
PAD, END, KEY, VALUE, QUERY, ANSWER, SET, GET = range(len(MARKERS))
VOCAB_SIZE = 256
FIRST_WORD = len(MARKERS)
NUM_REGISTERS = 8
"""Registers have the first words as names."""

KEY_LENGTH = 2
VALUE_LENGTH = 3
FACT_LENGTH = 1 + KEY_LENGTH + 1 + VALUE_LENGTH
MAX_LENGTH = 4096


@dataclass(frozen=True)
class Prompt:
    """A question whose answer is somewhere in its own text."""

    tokens: list[int]
    answer: list[int]
    distance: int
    """From the fact to the question, tokens."""


def words(source: random.Random, count: int) -> list[int]:
    return [source.randrange(FIRST_WORD, VOCAB_SIZE) for _ in range(count)]


def distinct_keys(source: random.Random, count: int) -> list[tuple[int, ...]]:
    keys: dict[tuple[int, ...], None] = {}
    while len(keys) < count:
        keys[tuple(words(source, KEY_LENGTH))] = None
    return list(keys)


def make_prompt(source: random.Random, length: int, num_facts: int, *, stem: Sequence[int] = ()) -> Prompt:
    """A prompt of ``length`` tokens that ends in a question about one of its facts.

    Args:
        stem: words that the prompt begins with, as prompts do that share a prefix.
    """
    question_length = 1 + KEY_LENGTH + 1
    num_fillers = length - len(stem) - question_length - num_facts * FACT_LENGTH
    if num_fillers < 0:
        raise ValueError(f"{num_facts} facts and a question do not fit into {length} tokens")
    keys = distinct_keys(source, num_facts)
    values = [words(source, VALUE_LENGTH) for _ in keys]
    gaps = sorted(source.randint(0, num_fillers) for _ in keys)
    asked = source.randrange(num_facts)

    tokens = list(stem)
    fact_at, num_written = 0, 0
    for number, (key, value, gap) in enumerate(zip(keys, values, gaps, strict=True)):
        tokens += words(source, gap - num_written)
        num_written = gap
        if number == asked:
            fact_at = len(tokens)
        tokens += [KEY, *key, VALUE, *value]
    tokens += words(source, num_fillers - num_written)
    tokens += [QUERY, *keys[asked], ANSWER]
    return Prompt(tokens, [*values[asked], END], distance=length - fact_at)


def make_register_prompt(source: random.Random, length: int, num_writes: int) -> Prompt:
    """A prompt that ends in a question about a register that was written several times."""
    num_fillers = length - 3 - 3 * num_writes
    if num_fillers < 0:
        raise ValueError(f"{num_writes} writes and a question do not fit into {length} tokens")
    gaps = sorted(source.randint(0, num_fillers) for _ in range(num_writes))
    tokens: list[int] = []
    latest: dict[int, tuple[int, int]] = {}
    num_written = 0
    for gap in gaps:
        tokens += words(source, gap - num_written)
        num_written = gap
        register, value = FIRST_WORD + source.randrange(NUM_REGISTERS), *words(source, 1)
        latest[register] = (value, len(tokens))
        tokens += [SET, register, value]
    tokens += words(source, num_fillers - num_written)
    register = source.choice(sorted(latest))
    value, written_at = latest[register]
    tokens += [GET, register, ANSWER]
    return Prompt(tokens, [value, END], distance=length - written_at)


def make_prompts(count: int, *, seed: int, min_length: int = 64, max_length: int = MAX_LENGTH - 16) -> list[Prompt]:
    """Prompts of lengths spread evenly on a logarithmic scale, in random order, with 1 to 32 facts each."""
    source = random.Random(seed)
    ratio = max_length / min_length
    lengths = [round(min_length * ratio ** (number / max(1, count - 1))) for number in range(count)]
    source.shuffle(lengths)
    prompts = []
    for length in lengths:
        most = min(32, (length - 8) // (2 * FACT_LENGTH))
        prompts.append(make_prompt(source, length, source.randint(1, most)))
    return prompts


def make_register_prompts(
    count: int, *, seed: int, min_length: int = 64, max_length: int = MAX_LENGTH - 16
) -> list[Prompt]:
    """Register questions of the same lengths, with 1 to 64 writes each."""
    source = random.Random(seed)
    ratio = max_length / min_length
    lengths = [round(min_length * ratio ** (number / max(1, count - 1))) for number in range(count)]
    source.shuffle(lengths)
    return [make_register_prompt(source, length, source.randint(1, min(64, length // 8))) for length in lengths]
