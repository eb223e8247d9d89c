# SPDX-License-Identifier: Apache-2.0
"""What a model's `config.json` says about DCP: head counts and the kinds of its layers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm_dcp_hybrid import placement
from vllm_dcp_hybrid.cli.refusals import refusal_of_spec
from vllm_dcp_hybrid.engine import checks
from vllm_dcp_hybrid.errors import IllegalWorldSize

# The words that configurations use for their layers, by what the layer keeps.
_ATTENTION = frozenset({"full_attention", "attention", "*", "mla"})
_RECURRENT = frozenset(
    {"linear_attention", "conv", "short_conv", "mamba", "mamba1", "mamba2", "M", "kda", "gated_delta_net", "recurrent"}
)
_WINDOWED = {"sliding_attention": "SlidingWindowSpec", "chunked_attention": "ChunkedLocalAttentionSpec"}
_NO_CACHE = frozenset({"mlp", "moe", "-", "E"})
_BYTES_PER_ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2}


class UnreadableModel(ValueError):
    """A path that holds no model configuration, or one that says too little."""


@dataclass(frozen=True)
class ModelShape:
    """The parts of a model's configuration that DCP depends on.

    Attributes:
        architecture: class name, for messages.
        num_query_heads: over all ranks.
        num_kv_heads: over all ranks; 1 for MLA.
        head_size: elements of one key head.
        is_mla: whether one latent vector stands in for keys and values.
        latent_size: elements of that vector, 0 without MLA.
        dtype: of the weights, which the KV cache follows by default.
        layers: (word, count) for each kind of layer, in the order of the model.
    """

    architecture: str
    num_query_heads: int
    num_kv_heads: int
    head_size: int
    is_mla: bool
    latent_size: int
    dtype: str
    layers: tuple[tuple[str, int], ...]

    @property
    def is_hybrid(self) -> bool:
        """Whether some layers are recurrent and some are not: what vLLM calls a hybrid model."""
        words = {word for word, _ in self.layers}
        return bool(words & _RECURRENT) and bool(words - _RECURRENT - _NO_CACHE)

    @property
    def num_attention_layers(self) -> int:
        """Layers whose KV is sharded."""
        return sum(count for word, count in self.layers if word in _ATTENTION)

    def largest_dcp_world_size(self, tp_size: int) -> int:
        """The largest legal DCP size at this tensor-parallel size."""
        return placement.largest_dcp_world_size(tp_size, self.num_kv_heads, self.num_query_heads, is_mla=self.is_mla)

    def illegal_because(self, tp_size: int, dcp_size: int) -> str | None:
        """The sentence with which `vllm serve` would refuse the sizes; None where they are legal."""
        if self.num_query_heads % tp_size:
            return f"Stock vLLM refuses -tp {tp_size}: it does not divide the {self.num_query_heads} query heads."
        if dcp_size <= 1:
            return None
        model_config = SimpleNamespace(
            use_mla=self.is_mla,
            get_total_num_kv_heads=lambda: self.num_kv_heads,
            model_arch_config=SimpleNamespace(total_num_attention_heads=self.num_query_heads),
        )
        try:
            checks.check_world_size(model_config, tp_size=tp_size, dcp_size=dcp_size)
        except IllegalWorldSize as error:
            return str(error)
        return None

    def attention_bytes_per_token(self, tp_size: int, dcp_size: int) -> float | None:
        """Bytes of sharded KV that one rank stores per token of a long sequence; None for an unknown dtype."""
        size = _BYTES_PER_ELEMENT.get(self.dtype)
        if size is None:
            return None
        heads_per_rank = max(1, self.num_kv_heads // tp_size)
        elements = self.latent_size if self.is_mla else 2 * heads_per_rank * self.head_size
        return self.num_attention_layers * elements * size / dcp_size


def layer_placement(word: str) -> str:
    """Where the tokens of a layer of this kind live under DCP, for a human."""
    if word in _ATTENTION:
        return "sharded"
    if word in _RECURRENT:
        return "replicated"
    if word in _NO_CACHE:
        return "no KV cache"
    if word in _WINDOWED:
        refusal = refusal_of_spec(_WINDOWED[word])
        return f"refused: {refusal.why}" if refusal else "replicated"
    return "decided by its KV cache spec when the model loads"


def read_model_shape(path: Path) -> ModelShape:
    """Read a `config.json`, or the one in a model's directory.

    Raises:
        UnreadableModel: there is none, or it lacks head counts or layer kinds.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise UnreadableModel(f"{path} is neither a directory with a config.json nor such a file.")
    try:
        whole = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise UnreadableModel(f"{file} is not JSON: {error}.") from error
    if not isinstance(whole, dict):
        raise UnreadableModel(f"{file} is not the configuration of a model.")
    text = {**whole, **(whole.get("text_config") or whole.get("llm_config") or {})}
    try:
        return _shape(whole, text)
    except KeyError as error:
        raise UnreadableModel(f"{file} does not say {error}, so nothing can be said about DCP.") from error


def _shape(whole: Mapping[str, Any], text: Mapping[str, Any]) -> ModelShape:
    num_query_heads = int(text["num_attention_heads"])
    latent_size = int(text.get("kv_lora_rank") or 0) and int(text["kv_lora_rank"]) + int(text["qk_rope_head_dim"])
    num_kv_heads = 1 if latent_size else int(text.get("num_key_value_heads") or num_query_heads)
    head_size = text.get("head_dim") or text.get("attention_head_dim") or int(text["hidden_size"]) // num_query_heads
    return ModelShape(
        architecture=str((whole.get("architectures") or ["an unnamed model"])[0]),
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        head_size=int(head_size),
        is_mla=bool(latent_size),
        latent_size=latent_size,
        dtype=str(text.get("dtype") or text.get("torch_dtype")),
        layers=tuple(Counter(_layer_words(text)).items()),
    )


def _layer_words(text: Mapping[str, Any]) -> list[str]:
    """One word per layer, from whichever of the known keys a configuration has."""
    for key in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
        if text.get(key):
            return [str(word) for word in text[key]]
    num_layers = int(text["num_hidden_layers"])
    linear = text.get("linear_attn_config")
    if linear:  # Kimi Linear counts layers from 1
        full = {int(layer) for layer in linear["full_attn_layers"]}
        return ["full_attention" if layer + 1 in full else "kda" for layer in range(num_layers)]
    interval = text.get("full_attention_interval")
    if interval:
        return ["full_attention" if (layer + 1) % interval == 0 else "linear_attention" for layer in range(num_layers)]
    period = text.get("attn_layer_period")
    if period:
        offset = int(text.get("attn_layer_offset", 0))
        return ["attention" if layer % period == offset else "mamba" for layer in range(num_layers)]
    if text.get("sliding_window") and text.get("use_sliding_window", True):
        return ["sliding_attention"] * num_layers
    return ["full_attention"] * num_layers
