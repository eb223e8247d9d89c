# SPDX-License-Identifier: Apache-2.0
"""Trains a recall model: ``python tests/recall/train.py --kind lfm2 --out DIR --minutes 4 --device cuda``.

Sequences start at 32 tokens and double whenever the model answers nearly everything.  The best checkpoint so far is in
DIR at any time, and DIR/state.pt holds what ``--resume`` needs.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import recall_models as models
import task
import torch
from batches import SLOT, BatchMaker
from torch.nn.functional import cross_entropy

STAGES = (32, 64, 128, 256, 512, 1024, 2048, task.MAX_LENGTH)
PROMOTION = 0.97
WARMUP_STEPS = 100
DECAY_FROM = 0.5
"""Share of the time after which the learning rate falls, linearly."""


@dataclass
class Progress:
    """What ``--resume`` restores beside the weights."""

    step: int = 0
    stage: int = 0
    accuracy: float = 0.0
    elapsed_s: float = 0.0
    best: float = -1.0
    history: list[dict[str, float]] = field(default_factory=list)


class Trainer:
    """One training run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = options.device
        self.model = models.build(options.kind, options.seed).to(self.device)
        matrices = [weight for weight in self.model.parameters() if weight.ndim >= 2]
        others = [weight for weight in self.model.parameters() if weight.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}],
            lr=options.lr,
            betas=(0.9, 0.98),
            fused=self.device.startswith("cuda"),
        )
        self.has_registers = options.kind != "lfm2"
        self.batches = BatchMaker(self.device, options.seed + 1)
        self.choices = torch.Generator().manual_seed(options.seed + 2)
        self.progress = Progress()
        self.loss = torch.zeros((), device=self.device)

    def precision(self) -> torch.autocast | nullcontext[None]:
        is_cuda = self.device.startswith("cuda")
        return torch.autocast("cuda", dtype=torch.bfloat16) if is_cuda else nullcontext()

    def choose(self, low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=self.choices))

    def next_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Mostly the longest length reached, else a shorter one; from few facts to as many as fill most of it."""
        stage = self.progress.stage
        if stage and self.choose(0, 4) == 0:
            stage = self.choose(0, stage)
        length = STAGES[stage]
        most = max(1, length // (SLOT * (4 if self.has_registers else 2)) * 3 // 4)
        num_facts = max(1, most >> self.choose(0, 4))
        batch_size = max(1, min(512, self.options.tokens_per_step // length))
        return self.batches.make(batch_size, length, num_facts, 2 * num_facts if self.has_registers else 0)

    def answers(self, tokens: torch.Tensor, is_answer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [num_answers, vocabulary] float32 and the right tokens [num_answers]."""
        with self.precision():
            hidden = self.model.model(input_ids=tokens[:, :-1]).last_hidden_state
            logits = self.model.lm_head(hidden[is_answer[:, 1:]])
        return logits.float(), tokens[is_answer]

    def learning_rate(self) -> float:
        share = self.progress.elapsed_s / (60 * self.options.minutes)
        warm = min(1.0, (self.progress.step + 1) / WARMUP_STEPS)
        return self.options.lr * warm * min(1.0, max(0.03, (1 - share) / (1 - DECAY_FROM)))

    def step(self) -> None:
        progress = self.progress
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        tokens, is_answer = self.next_batch()
        logits, right = self.answers(tokens, is_answer)
        loss = cross_entropy(logits, right)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        progress.step += 1
        self.loss = loss.detach()
        if tokens.shape[1] == STAGES[progress.stage]:
            accuracy = float((logits.detach().argmax(1) == right).float().mean())
            progress.accuracy += 0.1 * (accuracy - progress.accuracy)
            if progress.accuracy > PROMOTION and progress.stage + 1 < len(STAGES):
                progress.stage += 1
                progress.accuracy = 0.8

    @torch.no_grad()
    def evaluate(self, length: int, *, is_about_registers: bool = False) -> dict[str, float]:
        """Share of right answer tokens, and margins of the right ones over the next best, on the same data always."""
        batch_size, num_facts = max(2, self.options.eval_tokens // length), max(1, length // 64)
        items = (0, length // (2 * SLOT)) if is_about_registers else (num_facts, 0)
        tokens, is_answer = BatchMaker(self.device, 12345).make(batch_size, length, *items)
        self.model.eval()
        logits, right = self.answers(tokens, is_answer)
        self.model.train()
        own = logits.gather(1, right[:, None])[:, 0]
        other = logits.scatter(1, right[:, None], float("-inf")).max(1).values
        margins = own - other
        return {
            "length": length,
            "is_about_registers": is_about_registers,
            "recall": float((margins > 0).float().mean()),
            "margin_1pc": float(margins.quantile(0.01)),
            "margin_min": float(margins.min()),
        }

    def report(self) -> None:
        """Print where training is, and keep the checkpoint if it is the best so far."""
        progress = self.progress
        lengths = sorted({*self.options.eval_lengths, STAGES[progress.stage]})
        figures = [self.evaluate(length) for length in lengths if length <= self.options.max_length]
        if self.has_registers:
            figures.append(self.evaluate(self.options.max_length, is_about_registers=True))
        score = sum(figure["recall"] + 0.001 * max(0.0, figure["margin_1pc"]) for figure in figures)
        text = "  ".join(
            f"{'reg. ' * f['is_about_registers']}{f['length']}: {f['recall']:.4f} ({f['margin_1pc']:+.1f})"
            for f in figures
        )
        print(
            f"{progress.elapsed_s:6.0f} s  step {progress.step:5d}  length {STAGES[progress.stage]:4d}  "
            f"loss {float(self.loss):.4f}  recall (margin 1 %): {text}",
            flush=True,
        )
        progress.history.append({"step": progress.step, "elapsed_s": progress.elapsed_s, "loss": float(self.loss)})
        if score >= progress.best:
            progress.best = score
            models.save(self.model, self.options.kind, self.options.out)
            training = {"step": progress.step, "elapsed_s": round(progress.elapsed_s), "figures": figures}
            (self.options.out / "training.json").write_text(json.dumps(training, indent=2) + "\n")
        self.save_state()

    def save_state(self) -> None:
        path = self.options.out / "state.pt"
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": vars(self.progress),
            "batches": self.batches.generator.get_state(),
            "choices": self.choices.get_state(),
        }
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def load_state(self) -> None:
        state = torch.load(self.options.out / "state.pt", map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress = Progress(**state["progress"])
        self.batches.generator.set_state(state["batches"].cpu())
        self.choices.set_state(state["choices"].cpu())

    def steps(self) -> Iterator[None]:
        """Runs until the time is over."""
        last = time.monotonic()
        while self.progress.elapsed_s < 60 * self.options.minutes:
            self.step()
            now = time.monotonic()
            self.progress.elapsed_s += now - last
            last = now
            yield

    def run(self) -> None:
        reported = self.progress.elapsed_s
        for _ in self.steps():
            if self.progress.elapsed_s - reported >= self.options.report_s:
                self.report()
                reported = self.progress.elapsed_s
        self.report()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=models.KINDS, required=True)
    parser.add_argument("--out", type=Path, required=True, help="directory of the checkpoint")
    parser.add_argument("--minutes", type=float, default=4, help="length of the whole training, resumed parts included")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--tokens-per-step", type=int, default=65536)
    parser.add_argument("--eval-tokens", type=int, default=65536)
    parser.add_argument("--eval-lengths", type=int, nargs="*", default=[64, 512, 4096])
    parser.add_argument("--max-length", type=int, default=task.MAX_LENGTH, help="longest sequence to evaluate")
    parser.add_argument("--report-s", type=float, default=15, help="seconds between reports and checkpoints")
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(options)
    if options.resume:
        trainer.load_state()
    num_weights = sum(weight.numel() for weight in trainer.model.parameters())
    print(f"{options.kind}: {num_weights / 1e6:.2f} M weights, seed {options.seed}, {options.device}", flush=True)
    trainer.run()


if __name__ == "__main__":
    main()
