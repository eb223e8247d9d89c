# SPDX-License-Identifier: Apache-2.0
"""Engines that answer the recall prompts, and what their answers are held against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import task
from engines import Engine, Engines, Run

ASSETS = Path(__file__).parent.with_name("assets")
KINDS = sorted(path.name.removeprefix("recall-") for path in ASSETS.glob("recall-*"))
INTERLEAVES = (1, 16, "B")

BLOCK_SIZES = {"lfm2": 128, "qwen3-next": 288}
"""Tokens of an attention block, the same at every TP: recurrent states of a rank fit into its bytes."""

CHUNK_BLOCKS = 4.5
"""Tokens of a step, in blocks: more than 4, since under DCP 4 a prefill ends its chunks at every 4th block."""


def recall_engine(kind: str, tp: int, dcp: int = 1, interleave: int | str = 1) -> Engine:
    """An engine with prefix caching and chunked prefill."""
    block_size = BLOCK_SIZES[kind]
    return Engine(
        kind,
        tp=tp,
        dcp=dcp,
        interleave=block_size if interleave == "B" else int(interleave),
        prefix_caching=True,
        block_size=block_size,
        max_num_batched_tokens=int(CHUNK_BLOCKS * block_size),
    )


class RecallEngines(Engines):
    """Engines that load the trained checkpoints."""

    def model(self, engine: Engine) -> Path:
        return ASSETS / f"recall-{engine.kind}"


def recall_phases(prompts: Sequence[task.Prompt]) -> list[dict[str, Any]]:
    """All prompts, of which the first about a text is cold; then the last ones again, the newest first."""
    phase = {"max_tokens": len(prompts[0].answer), "has_margins": True}
    texts = [prompt.tokens for prompt in prompts]
    return [{**phase, "prompts": texts}, {**phase, "prompts": texts[: -len(texts) // 8 - 1 : -1]}]


@dataclass(frozen=True)
class Verdict:
    """An engine's answers beside the right ones and another engine's."""

    num_prompts: int
    num_right: int
    num_differing: int
    num_repeats_differing: int
    smallest_margin: float
    num_cached_tokens: int


def judge(run: Run, oracle: Run, prompts: Sequence[task.Prompt]) -> Verdict:
    """Compare answer by answer, token by token."""
    first, again = run.phases
    answers = [request["tokens"] for request in first]
    repeats = [request["tokens"] for request in again]
    return Verdict(
        num_prompts=len(prompts),
        num_right=sum(answer == prompt.answer for answer, prompt in zip(answers, prompts, strict=True)),
        num_differing=sum(ours != theirs["tokens"] for ours, theirs in zip(answers, oracle.phases[0], strict=True)),
        num_repeats_differing=sum(warm != cold for warm, cold in zip(repeats, reversed(answers), strict=False)),
        smallest_margin=round(min(value for request in (*first, *again) for value in request["margins"]), 2),
        num_cached_tokens=sum(request["num_cached_tokens"] for request in (*first, *again)),
    )
