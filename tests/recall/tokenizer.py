# SPDX-License-Identifier: Apache-2.0
"""A tokenizer that writes the recall task down: markers by name, words as w008 ... w255, spaces between."""

from __future__ import annotations

import json
from pathlib import Path

import task


def vocabulary() -> dict[str, int]:
    """Token -> id."""
    names = [*task.MARKERS, *(f"w{number:03}" for number in range(task.FIRST_WORD, task.VOCAB_SIZE))]
    return {name: number for number, name in enumerate(names)}


def write_tokenizer(path: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel(vocabulary(), unk_token=task.MARKERS[task.PAD]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = [AddedToken(task.MARKERS[token], special=True, normalized=False) for token in (task.PAD, task.END)]
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 8192,
        "pad_token": task.MARKERS[task.PAD],
        "eos_token": task.MARKERS[task.END],
        "clean_up_tokenization_spaces": False,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
