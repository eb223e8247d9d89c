# SPDX-License-Identifier: Apache-2.0
"""What the ranks did in a step, and where they first differ.  Text and integers only: no torch, no vLLM."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

END_OF_STEP = "the end of the step"


@dataclass(frozen=True)
class Progress:
    """One rank's way through a step.

    Attributes:
        calls: its collectives and the branches that it took, in order, as text that is equal on ranks that agree.
        is_complete: whether the step is over for it.
    """

    calls: tuple[str, ...]
    is_complete: bool

    @property
    def digest(self) -> str:
        """Equal for equal progress."""
        return f"{len(self.calls)} {hashlib.sha256(self.to_json().encode()).hexdigest()}"

    def call(self, number: int) -> str | None:
        """The call of this number, :data:`END_OF_STEP` behind the last one, None while nobody can know."""
        if number < len(self.calls):
            return self.calls[number]
        return END_OF_STEP if self.is_complete else None

    def to_json(self) -> str:
        return json.dumps([self.calls, self.is_complete])

    @staticmethod
    def from_json(text: str | bytes) -> Progress:
        calls, is_complete = json.loads(text)
        return Progress(tuple(calls), is_complete)


def first_difference(step: int, ranks: Mapping[int, Progress]) -> str | None:
    """One sentence that names the step, the ranks and the first call in which they differ; None where none is known.

    A rank that is in the middle of the step may still do what the others did.
    """
    for number in range(1 + max(len(progress.calls) for progress in ranks.values())):
        by_call: dict[str, list[int]] = {}
        for rank in sorted(ranks):
            call = ranks[rank].call(number)
            if call is not None:
                by_call.setdefault(call, []).append(rank)
        if len(by_call) > 1:
            sides = "; ".join(f"{name_ranks(members)}: {call}" for call, members in by_call.items())
            before = f", after {next(iter(ranks.values())).calls[number - 1]}" if number else ""
            return f"the ranks disagree in step {step}, call {number + 1}{before}. {sides}."
    return None


def describe_positions(step: int, ranks: Mapping[int, Progress | None]) -> str:
    """Where each rank is; None for one of which nothing is known."""
    return "; ".join(
        f"rank {rank}: {describe_position(progress)}" if progress else f"rank {rank}: nothing known of step {step}"
        for rank, progress in sorted(ranks.items())
    )


def describe_position(progress: Progress) -> str:
    if progress.is_complete:
        return f"{END_OF_STEP}, {len(progress.calls)} calls"
    return f"call {len(progress.calls)}, {progress.calls[-1] if progress.calls else 'none yet'}"


def name_ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def describe_collective(name: str, tensors: Sequence[tuple[Sequence[int], object]]) -> str:
    """A collective as text: its name, and the shape and dtype of each tensor that goes in."""
    described = " + ".join(f"{list(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype in tensors)
    return f"{name} of {described}" if described else name


def describe_branch(name: str, facts: Mapping[str, object]) -> str:
    """A branch as text: counts and numbers in clear, and a short digest of everything."""
    clear = ", ".join(
        f"{key} {len(value) if isinstance(value, (list, tuple)) else value}" for key, value in facts.items()
    )
    return f"{name} with {clear} ({hashlib.sha256(repr(facts).encode()).hexdigest()[:8]})"
