# SPDX-License-Identifier: Apache-2.0
"""Training batches of the recall task, made where the model is: a sequence asks about every fact that it holds."""

from __future__ import annotations

import task
import torch

SLOT = 8
"""Tokens of a fact or a question, with the word that may follow it."""


class BatchMaker:
    """Makes batches from one seeded stream."""

    def __init__(self, device: str, seed: int) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator, device=self.device)

    def make(
        self, batch_size: int, length: int, num_facts: int, num_register_items: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sequences, and which of their tokens are answers.

        Facts, questions and register items lie in slots at random places; every question comes after its fact.

        Args:
            num_register_items: writes and reads of registers.

        Returns:
            tokens [batch_size, length] int64, is_answer [batch_size, length] bool.
        """
        num_slots = 2 * num_facts + num_register_items
        num_fillers = length - SLOT * num_slots
        if num_fillers < 0:
            raise ValueError(f"{num_slots} items do not fit into {length} tokens")
        tokens = self.integers(task.FIRST_WORD, task.VOCAB_SIZE, batch_size, length)
        slots = self.integers(task.FIRST_WORD, task.VOCAB_SIZE, batch_size, num_slots, SLOT)
        is_answer = torch.zeros(batch_size, num_slots, SLOT, dtype=torch.bool, device=self.device)

        order = torch.rand(batch_size, num_slots, generator=self.generator, device=self.device).argsort(dim=1)
        if num_facts:
            self._write_facts(slots, is_answer, order[:, : 2 * num_facts])
        if num_register_items:
            self._write_registers(slots, is_answer, order[:, 2 * num_facts :].sort(dim=1).values)

        starts = self.integers(0, num_fillers + 1, batch_size, num_slots).sort(dim=1).values
        starts = starts + SLOT * torch.arange(num_slots, device=self.device)
        places = (starts[:, :, None] + torch.arange(SLOT, device=self.device)).flatten(1)
        all_answers = torch.zeros(batch_size, length, dtype=torch.bool, device=self.device)
        return tokens.scatter(1, places, slots.flatten(1)), all_answers.scatter(1, places, is_answer.flatten(1))

    def _write_facts(self, slots: torch.Tensor, is_answer: torch.Tensor, places: torch.Tensor) -> None:
        pairs = places.unflatten(1, (-1, 2)).sort(dim=2).values
        rows = torch.arange(len(slots), device=self.device)[:, None]
        facts, questions = pairs.unbind(2)
        slots[rows, facts, 0] = task.KEY
        slots[rows, facts, 3] = task.VALUE
        slots[rows, questions] = slots[rows, facts]
        slots[rows, questions, 0] = task.QUERY
        slots[rows, questions, 3] = task.ANSWER
        slots[rows, questions, 7] = task.END
        is_answer[rows, questions, 4:] = True

    def _write_registers(self, slots: torch.Tensor, is_answer: torch.Tensor, places: torch.Tensor) -> None:
        batch_size, count = places.shape
        rows = torch.arange(batch_size, device=self.device)[:, None]
        registers = self.integers(0, task.NUM_REGISTERS, batch_size, count)
        values = self.integers(task.FIRST_WORD, task.VOCAB_SIZE, batch_size, count)
        is_write = self.integers(0, 2, batch_size, count).bool()

        # The number of the last write to each register, up to each item: [batch, item, register].
        numbers = torch.arange(count, device=self.device)[None, :, None]
        is_own = registers[:, :, None] == torch.arange(task.NUM_REGISTERS, device=self.device)
        written = torch.where(is_own & is_write[:, :, None], numbers, -1).cummax(dim=1).values
        latest = written.gather(2, registers[:, :, None]).squeeze(2)
        is_write = is_write | (latest < 0)
        read = values.gather(1, latest.clamp(min=0))

        items = slots[rows, places]
        items[:, :, 0] = torch.where(is_write, task.SET, task.GET)
        items[:, :, 1] = registers + task.FIRST_WORD
        items[:, :, 2] = torch.where(is_write, values, task.ANSWER)
        items[:, :, 3] = torch.where(is_write, items[:, :, 3], read)
        items[:, :, 4] = torch.where(is_write, items[:, :, 4], task.END)
        slots[rows, places] = items
        is_answer[rows, places, 3] = ~is_write
        is_answer[rows, places, 4] = ~is_write
