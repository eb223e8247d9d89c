# SPDX-License-Identifier: Apache-2.0
"""The mid-size hybrid of the benchmarks: a config and a tokenizer; vLLM draws the weights (``--load-format dummy``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm_dcp_hybrid.tiny_models import architectures, tokenizer

NUM_HEADS = 16
NUM_KV_HEADS = 1
FEED_FORWARD_SIZE = 8192


def make_model(path: Path, *, num_layers: int = 32, head_size: int = 128, max_len: int = 140_000) -> Path:
    """Write an LFM2-shaped checkpoint without weights: every 4th layer is full attention over one KV head.

    Args:
        path: directory, made where it does not exist.
        num_layers: 32 with heads of 128 give 2.1 B parameters.
        max_len: longest sequence, tokens.
    """
    shape = architectures.TinyModel(
        kind="lfm2",
        num_layers=num_layers,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        head_size=head_size,
        max_position_embeddings=max_len,
    )
    # The vocabulary stays the tokenizer's: a token without text is not streamed, and clients would measure gaps.
    sizes = {"intermediate_size": FEED_FORWARD_SIZE, "block_ff_dim": FEED_FORWARD_SIZE}
    path.mkdir(parents=True, exist_ok=True)
    config = {**shape.config(), **sizes}
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tokenizer.write_tokenizer(path, model_max_length=max_len)
    return path


def num_parameters(config: dict[str, Any]) -> int:
    """Parameters of such a model, embeddings once."""
    hidden, feed_forward = config["hidden_size"], config["intermediate_size"]
    kv = config["num_key_value_heads"] * hidden // config["num_attention_heads"]
    mixers = {"full_attention": 2 * hidden * hidden + 2 * hidden * kv, "conv": 4 * hidden * hidden + 3 * hidden}
    layers = sum(3 * hidden * feed_forward + mixers[kind] for kind in config["layer_types"])
    return int(layers + config["vocab_size"] * hidden)
