# SPDX-License-Identifier: Apache-2.0
"""What `demo` and `verify` ask a server: batches of unequal prompts with log-probabilities, a streamed completion."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from vllm_dcp_hybrid import tiny_models
from vllm_dcp_hybrid.cli.client import Client
from vllm_dcp_hybrid.cli.compare import Generation, parse_choice

# With DCP 2: a rank with a single token, one token past a block of 128, and several blocks on each rank.
PROMPT_LENGTHS = (2, 17, 129, 300, 700, 1403)
NUM_GENERATED = 32
STREAMED_PROMPT = "Once upon a time, tokens lived on two ranks:"
_NUM_STREAMED = 48
_NUM_TOP = 5


def random_prompts(seed: int = 0) -> list[list[int]]:
    """Token ids of one prompt per length, without special tokens."""
    generator = random.Random(seed)
    ids = range(tiny_models.NUM_SPECIAL_TOKENS, tiny_models.VOCAB_SIZE)
    return [generator.choices(ids, k=length) for length in PROMPT_LENGTHS]


def complete(
    client: Client,
    model: str,
    prompts: Sequence[Sequence[int]],
    *,
    has_prompt_logprobs: bool,
    num_generated: int = NUM_GENERATED,
    cache_salt: str | None = None,
    timeout: float | None = None,
) -> tuple[Generation, ...]:
    """Greedy answers to all prompts, sent as one request, which vLLM computes as one batch.

    Args:
        has_prompt_logprobs: also score the prompts; such a request never reads the prefix cache.
        num_generated: tokens of every answer.
        cache_salt: requests find only prefixes of their own salt in the cache; None for those without one.
        timeout: seconds to wait for the answers, the client's own if None.

    Raises:
        RequestFailed: the server refused, or did not answer in time.
    """
    body: dict[str, Any] = {
        "model": model,
        "prompt": [list(prompt) for prompt in prompts],
        "max_tokens": num_generated,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": _NUM_TOP,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    if has_prompt_logprobs:
        body["prompt_logprobs"] = 0
    if cache_salt is not None:
        body["cache_salt"] = cache_salt
    choices = sorted(client.post("/v1/completions", body, timeout)["choices"], key=lambda choice: choice["index"])
    return tuple(parse_choice(choice, prompt) for choice, prompt in zip(choices, prompts, strict=True))


def stream(client: Client, model: str) -> Iterator[str]:
    """Pieces of the answer to `STREAMED_PROMPT`, as they arrive, fit to be printed on one line.

    Raises:
        RequestFailed: the server refused, or did not answer in time.
    """
    body = {"model": model, "prompt": STREAMED_PROMPT, "max_tokens": _NUM_STREAMED, "temperature": 0}
    for piece in client.stream_text(body):
        # Random weights produce bytes that are no text.
        yield "".join(letter if letter.isprintable() and letter != "\ufffd" else "·" for letter in piece)
