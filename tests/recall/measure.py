# SPDX-License-Identifier: Apache-2.0
"""Measures a recall model in float32 with transformers: ``python tests/recall/measure.py DIR --count 500``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import task
import torch
from transformers import AutoModelForCausalLM


@dataclass(frozen=True)
class Recall:
    """How well prompts were answered; margins are between the right token and the next best, in nats."""

    num_prompts: int
    num_right: int
    smallest_margin: float
    first_percentile_margin: float
    longest_prompt: int

    @property
    def share(self) -> float:
        return self.num_right / self.num_prompts


def answer_margins(model: torch.nn.Module, prompt: task.Prompt) -> list[float]:
    """Of each token of the right answer, given those before it; negative where another token would be chosen."""
    tokens = torch.tensor([[*prompt.tokens, *prompt.answer[:-1]]], device=next(model.parameters()).device)
    with torch.no_grad():
        logits = model(input_ids=tokens).logits[0, -len(prompt.answer) :].float()
    right = torch.tensor(prompt.answer, device=logits.device)[:, None]
    own = logits.gather(1, right)
    other = logits.scatter(1, right, float("-inf")).max(dim=1, keepdim=True).values
    return (own - other).flatten().tolist()


def summarise(margins: Sequence[Sequence[float]], prompts: Sequence[task.Prompt]) -> Recall:
    """Figures from the margins of each prompt's answer."""
    flat = sorted(value for answer in margins for value in answer)
    return Recall(
        num_prompts=len(prompts),
        num_right=sum(min(answer) > 0 for answer in margins),
        smallest_margin=round(flat[0], 2),
        first_percentile_margin=round(flat[len(flat) // 100], 2),
        longest_prompt=max(len(prompt.tokens) for prompt in prompts),
    )


@torch.no_grad()
def forget(model: torch.nn.Module) -> torch.nn.Module:
    """Take the memory from all recurrent layers: only attention still sees earlier tokens."""
    for module in model.modules():
        if isinstance(module, torch.nn.Conv1d):
            module.weight[..., :-1] = 0
        if hasattr(module, "A_log"):
            module.A_log.fill_(10)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--registers", action="store_true", help="ask for registers instead of facts")
    parser.add_argument("--forget", action="store_true", help="without the memory of recurrent layers")
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    if options.forget:
        forget(model)
    make = task.make_register_prompts if options.registers else task.make_prompts
    prompts = make(options.count, seed=options.seed)
    margins = [answer_margins(model, prompt) for prompt in prompts]
    for prompt, answer in zip(prompts, margins, strict=True):
        if min(answer) < 2 and not options.forget:
            print(f"{len(prompt.tokens)} tokens, {prompt.distance} back: {[round(value, 1) for value in answer]}")
    print(json.dumps(asdict(summarise(margins, prompts))))


if __name__ == "__main__":
    main()
