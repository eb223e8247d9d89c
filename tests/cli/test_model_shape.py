# SPDX-License-Identifier: Apache-2.0
"""What a `config.json` says about DCP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_dcp_hybrid.cli.model_shape import ModelShape, UnreadableModel, layer_placement, read_model_shape
from vllm_dcp_hybrid.tiny_models.architectures import TINY_MODELS, TinyModel

BASE = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512, "num_hidden_layers": 8}


def shape_of(tmp_path: Path, **config: Any) -> ModelShape:
    (tmp_path / "config.json").write_text(json.dumps({**BASE, **config}))
    return read_model_shape(tmp_path)


@pytest.mark.parametrize("kind", TINY_MODELS)
def test_tiny_models_are_read(tmp_path: Path, kind: str) -> None:
    model = TinyModel(kind=kind, num_key_value_heads=1)
    shape = shape_of(tmp_path, **model.config())
    assert shape.is_hybrid == (kind != "llama")
    assert shape.num_attention_layers == model.layer_types.count("full_attention")
    assert shape.largest_dcp_world_size(2) == 2
    assert shape.attention_bytes_per_token(2, 2) == shape.num_attention_layers * model.head_size * 2


@pytest.mark.parametrize(
    ("config", "num_attention"),
    [
        ({"full_attention_interval": 4}, 2),
        ({"hybrid_override_pattern": "M-M*M-M*"}, 2),
        ({"layers_block_type": ["mamba", "attention"] * 4}, 4),
        ({"attn_layer_period": 8, "attn_layer_offset": 4}, 1),
        ({"linear_attn_config": {"full_attn_layers": [4, 8], "kda_layers": [1, 2, 3, 5, 6, 7]}}, 2),
    ],
)
def test_hybrids_in_their_own_words(tmp_path: Path, config: dict[str, Any], num_attention: int) -> None:
    shape = shape_of(tmp_path, **config)
    assert shape.is_hybrid
    assert shape.num_attention_layers == num_attention


def test_text_model_of_a_multimodal_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": BASE, "vision_config": {}}))
    assert read_model_shape(tmp_path / "config.json").num_kv_heads == 2


def test_mla_has_one_latent_head(tmp_path: Path) -> None:
    shape = shape_of(tmp_path, kv_lora_rank=512, qk_rope_head_dim=64, torch_dtype="bfloat16")
    assert (shape.is_mla, shape.num_kv_heads, shape.largest_dcp_world_size(8)) == (True, 1, 8)
    assert shape.attention_bytes_per_token(8, 4) == 8 * 576 * 2 / 4


def test_dcp_1_is_always_legal(tmp_path: Path) -> None:
    shape = shape_of(tmp_path)
    assert shape.illegal_because(2, 1) is None
    assert shape.illegal_because(8, 4) is None
    assert "largest legal size here is 4" in str(shape.illegal_because(8, 8))


def test_windows_are_refused_in_the_words_of_the_spec() -> None:
    assert layer_placement("full_attention") == "sharded"
    assert layer_placement("mamba2") == "replicated"
    assert layer_placement("sliding_attention").startswith(("refused: ", "replicated"))
    assert "KV cache spec" in layer_placement("something new")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"num_attention_heads": 8}'])
def test_files_that_say_too_little_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UnreadableModel):
        read_model_shape(tmp_path)
