# SPDX-License-Identifier: Apache-2.0
"""The plan of one step: which rows of the batch need which attention, decided once on the host.

Every decision here is made from global lengths, which are equal on all ranks.  A rank that stores nothing of a row
still takes part in the row's collectives.  Integers only: no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Row:
    """One request's new tokens.

    Attributes:
        req: the request's index in the batch, which is its row in the block table.
        start, end: its tokens in the flattened batch.
        context_len: tokens of the whole sequence before them, over all ranks.
        local_kv_len: tokens of this rank's cache that the row's gathered queries attend to; may be 0.
    """

    req: int
    start: int
    end: int
    context_len: int
    local_kv_len: int

    @property
    def query_len(self) -> int:
        """New tokens."""
        return self.end - self.start


@dataclass(frozen=True)
class AttentionPlan:
    """The rows of one step by kind.

    Attributes:
        decode_rows: one new token, with context.  Its KV is in the cache of its owner before attention runs, so one
            call over the local tokens (the new one included) and one combine is the whole answer.
        context_rows: several new tokens, with context.  The local context for all heads, combined, is merged with
            causal attention among the new tokens for this rank's heads.
        prefill_rows: no context: causal attention for this rank's heads, and no collective.
    """

    decode_rows: tuple[Row, ...]
    context_rows: tuple[Row, ...]
    prefill_rows: tuple[Row, ...]

    @property
    def needs_exchange(self) -> bool:
        """Whether the ranks exchange queries and partial results in this step: the same on every rank."""
        return bool(self.decode_rows or self.context_rows)

    @property
    def exchange_rows(self) -> tuple[Row, ...]:
        """The rows whose queries are gathered, in the order in which they are packed."""
        return self.decode_rows + self.context_rows


def make_plan(
    query_start_loc: Sequence[int], seq_lens: Sequence[int], local_len: Callable[[int], int]
) -> AttentionPlan:
    """Sort the batch's rows.

    Args:
        query_start_loc: ``[num_reqs + 1]``, first token of each request in the flattened batch.
        seq_lens: ``[num_reqs]``, global length of each sequence, its new tokens included; more entries are ignored.
        local_len: this rank's share of a global length (``GroupGeometry.local_len`` with the rank filled in).

    Padded rows (no new tokens) appear in no kind.
    """
    decode_rows: list[Row] = []
    context_rows: list[Row] = []
    prefill_rows: list[Row] = []
    for req, (start, end) in enumerate(pairwise(query_start_loc)):
        if end <= start:
            continue
        seq_len = seq_lens[req]
        context_len = seq_len - (end - start)
        if context_len <= 0:
            prefill_rows.append(Row(req, start, end, 0, 0))
        elif end - start == 1:
            decode_rows.append(Row(req, start, end, context_len, local_len(seq_len)))
        else:
            context_rows.append(Row(req, start, end, context_len, local_len(context_len)))
    return AttentionPlan(tuple(decode_rows), tuple(context_rows), tuple(prefill_rows))
