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
from dataclasses import dataclass
from itertools import zip_longest

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


def make_document(source: random.Random, length: int, num_facts: int, num_questions: int) -> list[Prompt]:
    """Prompts of ``length`` tokens with the same text, each with a question about another of its facts."""
    question_length = 1 + KEY_LENGTH + 1
    num_fillers = length - question_length - num_facts * FACT_LENGTH
    if num_fillers < 0:
        raise ValueError(f"{num_facts} facts and a question do not fit into {length} tokens")
    keys = distinct_keys(source, num_facts)
    values = [words(source, VALUE_LENGTH) for _ in keys]
    gaps = sorted(source.randint(0, num_fillers) for _ in keys)

    text: list[int] = []
    places = []
    num_written = 0
    for key, value, gap in zip(keys, values, gaps, strict=True):
        text += words(source, gap - num_written)
        num_written = gap
        places.append(len(text))
        text += [KEY, *key, VALUE, *value]
    text += words(source, num_fillers - num_written)
    return [
        Prompt([*text, QUERY, *keys[asked], ANSWER], [*values[asked], END], distance=length - places[asked])
        for asked in source.sample(range(num_facts), min(num_questions, num_facts))
    ]


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


def spread_lengths(source: random.Random, count: int, min_length: int, max_length: int) -> list[int]:
    """Lengths spread evenly on a logarithmic scale, in random order."""
    ratio = max_length / min_length
    lengths = [round(min_length * ratio ** (number / max(1, count - 1))) for number in range(count)]
    source.shuffle(lengths)
    return lengths


def make_prompts(
    count: int, *, seed: int, min_length: int = 64, max_length: int = MAX_LENGTH - 16, num_questions: int = 1
) -> list[Prompt]:
    """Prompts about texts of 1 to 32 facts: a question about each text, then another about each, and so on.

    Texts with fewer facts are asked about fewer times.
    """
    source = random.Random(seed)
    texts = []
    for length in spread_lengths(source, -(-count // num_questions), min_length, max_length):
        most = min(32, (length - 8) // (2 * FACT_LENGTH))
        num_facts = source.randint(min(num_questions, most), most)
        texts.append(make_document(source, length, num_facts, num_questions))
    rounds = zip_longest(*texts)
    return [prompt for prompts in rounds for prompt in prompts if prompt is not None][:count]


def make_register_prompts(
    count: int, *, seed: int, min_length: int = 64, max_length: int = MAX_LENGTH - 16
) -> list[Prompt]:
    """Register questions of the same lengths, with 1 to 64 writes each."""
    source = random.Random(seed)
    lengths = spread_lengths(source, count, min_length, max_length)
    return [make_register_prompt(source, length, source.randint(1, min(64, length // 8))) for length in lengths]
