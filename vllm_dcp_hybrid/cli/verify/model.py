# SPDX-License-Identifier: Apache-2.0
"""What `verify` must know of a model before it is loaded: where it lies, which tokens prompts may have, its dtype."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_dcp_hybrid.cli.model_shape import ModelShape, UnreadableModel, read_model_shape

_FEWEST_WORDS = 16
_DEFAULT_MAX_LEN = 8192
_TOKEN_ID = "_token_id"


@dataclass(frozen=True)
class VerifiedModel:
    """A model's files, as far as they matter here.

    Attributes:
        path: the directory.
        shape: head counts and layers.
        words: token ids that prompts are made of, without special ones.
        max_model_len: longest sequence that the configuration names, tokens.
        dtype: of the weights.
    """

    path: Path
    shape: ModelShape
    words: tuple[int, ...]
    max_model_len: int
    dtype: str


def read_model(name: str, environment: Mapping[str, str]) -> VerifiedModel:
    """Find a model and read its configuration.

    Args:
        name: a directory, or the name of a model that has been downloaded to the Hugging Face cache.
        environment: says where that cache is.

    Raises:
        UnreadableModel: there is none, or its configuration says too little.
    """
    path = find_model(name, environment)
    shape = read_model_shape(path)
    config = json.loads((path / "config.json").read_text("utf-8"))
    text = {**config, **(config.get("text_config") or config.get("llm_config") or {})}
    if not isinstance(text.get("vocab_size"), int):
        raise UnreadableModel(f"{path / 'config.json'} does not say 'vocab_size', so no prompts can be made.")
    return VerifiedModel(
        path=path,
        shape=shape,
        words=tuple(_words(int(text["vocab_size"]), {*_special_tokens(path), *_named_tokens(config)})),
        max_model_len=int(text.get("max_position_embeddings") or _DEFAULT_MAX_LEN),
        dtype=shape.dtype,
    )


def find_model(name: str, environment: Mapping[str, str]) -> Path:
    """The directory of a model.  Nothing is downloaded: the time of a download has no bound.

    Raises:
        UnreadableModel: there is none.
    """
    path = Path(name).expanduser()
    if (path / "config.json").is_file():
        return path.resolve()
    repository = _cache(environment) / f"models--{name.replace('/', '--')}"
    reference = repository / "refs" / "main"
    if reference.is_file():
        snapshot = repository / "snapshots" / reference.read_text("utf-8").strip()
        if (snapshot / "config.json").is_file():
            return snapshot
    raise UnreadableModel(
        f"{name} is neither a directory with a config.json nor a model in the Hugging Face cache "
        f"{_cache(environment)}: download it first."
    )


def _cache(environment: Mapping[str, str]) -> Path:
    home = environment.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    return Path(environment.get("HF_HUB_CACHE") or os.path.join(home, "hub"))


def _words(vocab_size: int, without: set[int]) -> list[int]:
    """Token ids between the first and the last eighth of a vocabulary, where special tokens and padding tend to be."""
    margin = vocab_size // 8
    words = [token for token in range(margin, vocab_size - margin) if token not in without]
    if len(words) < _FEWEST_WORDS:
        raise UnreadableModel(f"A vocabulary of {vocab_size} tokens is too small to make prompts of.")
    return words


def _special_tokens(path: Path) -> Iterator[int]:
    """The ids that a tokenizer's files list apart from the ordinary ones."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        file = path / name
        content = json.loads(file.read_text("utf-8")) if file.is_file() else {}
        yield from (int(token["id"]) for token in content.get("added_tokens") or ())
        yield from (int(token) for token in content.get("added_tokens_decoder") or ())


def _named_tokens(config: Mapping[str, Any]) -> Iterator[int]:
    """The ids that a configuration names, such as those that stand for an image."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _named_tokens(value)
        elif key.endswith(_TOKEN_ID):
            yield from (token for token in (value if isinstance(value, list) else [value]) if isinstance(token, int))
