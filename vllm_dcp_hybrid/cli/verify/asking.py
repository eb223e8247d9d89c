# SPDX-License-Identifier: Apache-2.0
"""The two interviews: everything of the engine with DCP, and of the oracle also what its own noise is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_dcp_hybrid.cli import questions
from vllm_dcp_hybrid.cli.client import Client, RequestFailed, metric_total
from vllm_dcp_hybrid.cli.compare import Generation
from vllm_dcp_hybrid.cli.verify.recall import RecallPrompt
from vllm_dcp_hybrid.cli.verify.work import NUM_AFTER_PREFIX, NUM_DECODED, Work

_PREFIX_HITS = "vllm:prefix_cache_hits"
# How a server answers that found a log-probability which is no number.
_NOT_A_NUMBER = "not JSON compliant"

Scores = tuple[float, ...]


class Deadline:
    """A limit on an engine's time, from its start to its last answer.

    Args:
        limit_seconds: the limit.
        clock: seconds since any moment.
    """

    def __init__(self, limit_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_seconds = limit_seconds
        self._clock = clock
        self._end = clock() + limit_seconds

    @property
    def remaining(self) -> float:
        """Seconds left; 0 where the limit has passed."""
        return max(0.0, self._end - self._clock())


class OutOfTime(RequestFailed):
    """The limit passed before the last answer."""


@dataclass(frozen=True)
class DCPAnswers:
    """What the engine with DCP said.

    Attributes:
        scored: log-probabilities of each prompt's tokens.
        decoded, repeated, tails: generations; the last two with prefixes from the cache, empty without prefix caching.
        prefix_hits: prompt tokens of `repeated` and `tails` that came from the cache.
        recalled: the answers to recall prompts.
    """

    scored: list[Scores]
    decoded: list[Generation]
    repeated: list[Generation]
    tails: list[Generation]
    prefix_hits: int
    recalled: list[tuple[int, ...]]


@dataclass(frozen=True)
class OracleAnswers:
    """What the engine without DCP said, all of it without the prefix cache.

    Attributes:
        scored: log-probabilities of each prompt's tokens.
        scored_alone: the same, one prompt after the other.
        decoded: its own generations.
        score_of: for a prompt with a generation, both engines': log-probabilities of its tokens after the first.
        probe_intact, probe_damaged: those of the probe's second half.
        recalled: the answers to recall prompts.
    """

    scored: list[Scores]
    scored_alone: list[Scores]
    decoded: list[Generation]
    score_of: dict[tuple[int, ...], Scores]
    probe_intact: Scores
    probe_damaged: Scores
    recalled: list[tuple[int, ...]]


@dataclass(frozen=True)
class OtherAnswers:
    """What an engine of another tensor-parallel size said without DCP: the first and the fourth of the oracle's."""

    scored: list[Scores]
    score_of: dict[tuple[int, ...], Scores]


class Asker:
    """Sends prompts to one server.

    Args:
        client: of the server.
        model: the name under which it serves.
        deadline: of all answers.
        say: told what is being asked.
    """

    def __init__(self, client: Client, model: str, deadline: Deadline, say: Callable[[str], None]) -> None:
        self._client, self._model, self._deadline, self.say = client, model, deadline, say

    def score(self, prompts: Sequence[Sequence[int]], salt: str) -> list[Scores]:
        """Log-probability of each prompt's tokens after the first."""
        return [answer.prompt for answer in self._ask(prompts, 1, salt, has_prompt_logprobs=True)]

    def generate(self, prompts: Sequence[Sequence[int]], num_generated: int, salt: str) -> list[Generation]:
        """Greedy answers, computed in one batch."""
        return self._ask(prompts, num_generated, salt, has_prompt_logprobs=False)

    def prefix_hits(self) -> int:
        """Prompt tokens that came from the prefix cache so far."""
        return int(metric_total(self._client.metrics(), _PREFIX_HITS))

    def _ask(
        self, prompts: Sequence[Sequence[int]], num_generated: int, salt: str, *, has_prompt_logprobs: bool
    ) -> list[Generation]:
        remaining = self._deadline.remaining
        if not remaining:
            raise OutOfTime(f"not all answers came within {self._deadline.limit_seconds:.0f} s")
        try:
            return list(
                questions.complete(
                    self._client,
                    self._model,
                    prompts,
                    has_prompt_logprobs=has_prompt_logprobs,
                    num_generated=num_generated,
                    cache_salt=salt,
                    timeout=remaining,
                )
            )
        except RequestFailed as error:
            if not self._deadline.remaining:
                raise OutOfTime(f"not all answers came within {self._deadline.limit_seconds:.0f} s") from error
            if _NOT_A_NUMBER not in str(error):
                raise
        if len(prompts) == 1:
            return [_not_a_number(prompts[0], num_generated)]
        # The server gives no answer at all where one number is none: which of them?
        return [
            answer
            for prompt in prompts
            for answer in self._ask([prompt], num_generated, salt, has_prompt_logprobs=has_prompt_logprobs)
        ]


def ask_dcp(asker: Asker, work: Work, recall: Sequence[RecallPrompt], *, has_prefix_caching: bool) -> DCPAnswers:
    """Everything, cold and, with prefix caching, warm.

    Raises:
        RequestFailed: the server refused, died, or took too long.
    """
    asker.say(f"{len(work.scored)} prompts of {len(work.scored[0]):,} - {len(work.scored[-1]):,} tokens are scored")
    scored = asker.score(work.scored, "scored")
    asker.say(f"{len(work.decoded)} unequal requests are decoded, {NUM_DECODED} tokens each")
    decoded = asker.generate(work.decoded, NUM_DECODED, "decoded")
    repeated: list[Generation] = []
    tails: list[Generation] = []
    hits = 0
    if has_prefix_caching:
        asker.say(f"the same again and {len(work.tails)} tails of one prefix, from the prefix cache")
        asker.generate([work.prefix], 1, "prefix")
        before = asker.prefix_hits()
        repeated = asker.generate(work.decoded, NUM_DECODED, "decoded")
        tails = asker.generate(work.tails, NUM_AFTER_PREFIX, "prefix")
        hits = asker.prefix_hits() - before
    return DCPAnswers(scored, decoded, repeated, tails, hits, _recalled(asker, recall))


def ask_oracle(asker: Asker, work: Work, recall: Sequence[RecallPrompt], theirs: DCPAnswers) -> OracleAnswers:
    """The same without the cache, the scores of what both engines generated, its noise and the probe.

    Raises:
        RequestFailed: the server refused, died, or took too long.
    """
    asker.say(f"the same {len(work.scored)} prompts are scored, in one batch and one by one")
    scored = asker.score(work.scored, "scored")
    alone = [asker.score([prompt], f"alone {place}")[0] for place, prompt in enumerate(work.scored)]
    asker.say(f"{len(work.decoded)} requests are decoded, {NUM_DECODED} tokens each")
    decoded = asker.generate(work.decoded, NUM_DECODED, "decoded")
    generations = [
        *zip(work.decoded, decoded, strict=True),
        *zip(work.decoded, theirs.decoded, strict=True),
        *zip(work.decoded[: len(theirs.repeated)], theirs.repeated, strict=True),
        *zip(work.tails[: len(theirs.tails)], theirs.tails, strict=True),
    ]
    sequences = list(dict.fromkeys((*prompt, *answer.token_ids) for prompt, answer in generations))
    asker.say(f"{len(sequences)} answers of both engines are scored")
    score_of = dict(zip(sequences, asker.score(sequences, "answers"), strict=True))
    asker.say("a prompt with tokens exchanged is scored, to see what a fault would do")
    probe = work.probe
    intact, damaged = (
        scores[probe.first_scored - 1 :] for scores in asker.score([probe.intact, probe.damaged], "probe")
    )
    return OracleAnswers(scored, alone, decoded, score_of, intact, damaged, _recalled(asker, recall))


def ask_other(asker: Asker, work: Work, oracle: OracleAnswers) -> OtherAnswers:
    """The scores only, of everything that the oracle scored.

    Raises:
        RequestFailed: the server refused, died, or took too long.
    """
    sequences = list(oracle.score_of)
    asker.say(f"the same {len(work.scored)} prompts and {len(sequences)} answers are scored")
    scored = asker.score(work.scored, "scored")
    return OtherAnswers(scored, dict(zip(sequences, asker.score(sequences, "answers"), strict=True)))


def _recalled(asker: Asker, recall: Sequence[RecallPrompt]) -> list[tuple[int, ...]]:
    if not recall:
        return []
    asker.say(f"{len(recall)} facts are asked for")
    num_generated = max(len(prompt.answer) for prompt in recall)
    answers = asker.generate([prompt.tokens for prompt in recall], num_generated, "recall")
    return [answer.token_ids for answer in answers]


def _not_a_number(prompt: Sequence[int], num_generated: int) -> Generation:
    """An answer without a single number, of the length that was asked for."""
    nothing = {0: math.nan}
    return Generation(len(prompt), (math.nan,) * (len(prompt) - 1), (0,) * num_generated, (nothing,) * num_generated)
