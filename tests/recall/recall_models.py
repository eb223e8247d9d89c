# SPDX-License-Identifier: Apache-2.0
"""The recall models: classes of transformers with the shapes of this package's tiny models, but smaller."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import task
import torch
from task_files import write_recall_json, write_tokenizer
from transformers import AutoModelForCausalLM, Lfm2Config, Qwen3NextConfig
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from vllm_dcp_hybrid.tiny_models.architectures import TinyModel

chunk_gated_delta_rule = qwen3_next.torch_chunk_gated_delta_rule


def chunk_gated_delta_rule_in_float32(query: torch.Tensor, *args: Any, **options: Any) -> Any:
    """Transformers' rule with float32 products, and longer chunks where they save many small steps of its loop."""
    with torch.autocast("cuda", enabled=False):
        return chunk_gated_delta_rule(query, *args, chunk_size=64 if query.shape[1] <= 512 else 128, **options)


KINDS = ("lfm2", "qwen3-next")
HIDDEN_SIZE = 128
INTERMEDIATE_SIZE = 256
EXPERT_SIZE = 64
INITIAL_STD = 0.06
INITIAL_CONV_STD = 0.5

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 1}
"""One KV head: at TP 2 and 4 every rank would hold a copy, so DCP 2 and 4 are legal."""


def config(kind: str) -> dict[str, Any]:
    """The content of ``config.json``."""
    head_size = HIDDEN_SIZE // HEADS["num_attention_heads"] if kind == "lfm2" else 64
    tiny = TinyModel(kind, num_layers=4, head_size=head_size, gdn_head_size=64, max_position_embeddings=8192, **HEADS)
    content = {
        **tiny.config(),
        "vocab_size": task.VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": INTERMEDIATE_SIZE,
        "pad_token_id": task.PAD,
        "bos_token_id": None,
        "eos_token_id": task.END,
        "tie_word_embeddings": kind == "lfm2",
    }
    if kind == "lfm2":
        content["block_ff_dim"] = INTERMEDIATE_SIZE
    else:
        content |= {
            "moe_intermediate_size": EXPERT_SIZE,
            "shared_expert_intermediate_size": EXPERT_SIZE,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
        }
    return content


def build(kind: str, seed: int) -> torch.nn.Module:
    """A fresh model in float32."""
    content = {name: value for name, value in config(kind).items() if name not in ("dtype", "architectures")}
    of_kind = {"lfm2": Lfm2Config, "qwen3-next": Qwen3NextConfig}[kind]
    qwen3_next.torch_chunk_gated_delta_rule = chunk_gated_delta_rule_in_float32
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        of_kind(**content, initializer_range=INITIAL_STD, use_cache=False),
        attn_implementation="sdpa",
        experts_implementation="eager",
    )
    for module in model.modules():
        if isinstance(module, torch.nn.Conv1d):
            torch.nn.init.normal_(module.weight, std=INITIAL_CONV_STD)
    return model.float()


def save(model: torch.nn.Module, kind: str, path: Path) -> None:
    """Write a bfloat16 checkpoint that stock vLLM loads."""
    state = {name: tensor.detach().bfloat16() for name, tensor in model.state_dict().items()}
    if kind == "lfm2":
        del state["lm_head.weight"]  # the embedding's
    model.save_pretrained(path, state_dict=state)
    (path / "config.json").write_text(json.dumps({**config(kind), "dtype": "bfloat16"}, indent=2) + "\n")
    (path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": task.END, "pad_token_id": task.PAD}, indent=2) + "\n"
    )
    write_tokenizer(path)
    write_recall_json(path)
