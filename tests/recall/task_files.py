# SPDX-License-Identifier: Apache-2.0
"""Files of a recall model that say its task: a tokenizer, and `recall.json` for `vllm-dcp-hybrid verify`.

The tokenizer writes markers by name and words as w008 ... w255, with spaces between.
"""

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


def write_recall_json(path: Path) -> None:
    """Write how the model is asked for a fact: `vllm_dcp_hybrid/cli/verify/recall.py` explains the format."""
    content = {
        "format": 1,
        "task": "key-value recall",
        "max_length": task.MAX_LENGTH,
        "words": [task.FIRST_WORD, task.VOCAB_SIZE],
        "key_length": task.KEY_LENGTH,
        "value_length": task.VALUE_LENGTH,
        "fact": [task.KEY, "key", task.VALUE, "value"],
        "question": [task.QUERY, "key", task.ANSWER],
        "answer": ["value", task.END],
    }
    (path / "recall.json").write_text(json.dumps(content, indent=2) + "\n")
