# SPDX-License-Identifier: Apache-2.0
"""Random weights that make a fault visible: every part of the context moves the logits, and none blows up.

Every linear layer keeps the scale of its input, so the gains below are all that sets how much each part says:
attention is sharp enough not to average a long context away, and recurrent states forget over 8 - 512 tokens.
"""

import math

import torch

from vllm_dcp_hybrid.tiny_models.architectures import (
    ATTENTION_INTERVAL,
    CONV_KERNEL_SIZE,
    EXPERT_SIZE,
    GATED_DELTA_NET_KINDS,
    INTERMEDIATE_SIZE,
    NUM_EXPERTS,
    NUM_GDN_KEY_HEADS,
    NUM_GDN_VALUE_HEADS,
    VISION_SIZE,
    TinyModel,
)
from vllm_dcp_hybrid.tiny_models.tokenizer import NUM_SPECIAL_TOKENS, VOCAB_SIZE

ATTENTION_SHARPNESS = 2.0
"""Standard deviation of q.k / sqrt(head size): how far attention is from an even average."""
ATTENTION_GAIN = 4.0
RECURRENT_GAIN = 0.5
MLP_GAIN = 0.5
LOGIT_SCALE = 3.0
"""Standard deviation of the logits."""
SPECIAL_TOKEN_SCALE = 0.25
"""How much smaller the output rows of special tokens are: greedy text shall not end early."""
SHORTEST_MEMORY, LONGEST_MEMORY = 8, 512
"""Tokens after which the state of the first and of the last GDN head has fallen to about 1 / e."""

State = dict[str, torch.Tensor]


class _WeightFactory:
    """Draws the tensors of one model in a fixed order from one seeded generator."""

    def __init__(self, model: TinyModel) -> None:
        self.model = model
        self.generator = torch.Generator().manual_seed(model.seed)
        # Qwen3-Next and its heirs store a norm's weight minus one.
        self.norm_offset = 1.0 if model.kind in GATED_DELTA_NET_KINDS else 0.0
        # Llama attends in every layer: in all as much as a hybrid in one of four, or it repeats itself.
        self.attention_gain = ATTENTION_GAIN / (ATTENTION_INTERVAL if model.kind == "llama" else 1)
        # LFM2's embeddings are also its output matrix, hence small: what layers add must be in proportion.
        self.embedding_scale = LOGIT_SCALE / math.sqrt(model.hidden_size) if model.kind == "lfm2" else 1.0

    def normal(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator) * scale

    def linear(self, num_outputs: int, num_inputs: int, gain: float = 1.0) -> torch.Tensor:
        return self.normal(num_outputs, num_inputs, scale=gain / math.sqrt(num_inputs))

    def branch_output(self, num_inputs: int, gain: float) -> torch.Tensor:
        """The projection that ends an attention, recurrent or MLP branch, into the residual stream."""
        return self.linear(self.model.hidden_size, num_inputs, gain * self.embedding_scale)

    def norm(self, size: int, gain: float = 1.0) -> torch.Tensor:
        return gain * (1 + self.normal(size, scale=0.1)) - self.norm_offset

    def final_norm(self, size: int) -> torch.Tensor:
        # Random signs: where input and output embeddings are tied, a token would otherwise predict itself.
        signs = torch.randint(0, 2, (size,), generator=self.generator) * 2.0 - 1.0
        return signs - self.norm_offset

    def key_value(self) -> torch.Tensor:
        """A projection to all KV heads, `[num_key_value_heads * head_size, hidden_size]`."""
        model = self.model
        weight = self.linear(model.num_key_value_heads * model.head_size, model.hidden_size)
        if not model.skew_kv_heads:
            return weight
        factors = torch.logspace(-2, 1, model.num_key_value_heads, base=2)
        return weight * factors.repeat_interleave(model.head_size).unsqueeze(1)

    def attention(
        self,
        prefix: str,
        output_name: str,
        norm_names: tuple[str, str] | None = None,
        is_gated: bool = False,
    ) -> State:
        model = self.model
        query_size = model.num_attention_heads * model.head_size
        query_gain = 1.0 if norm_names else ATTENTION_SHARPNESS
        state = {
            f"{prefix}q_proj.weight": self.linear((1 + is_gated) * query_size, model.hidden_size, query_gain),
            f"{prefix}k_proj.weight": self.key_value(),
            f"{prefix}v_proj.weight": self.key_value(),
            f"{prefix}{output_name}.weight": self.branch_output(query_size, self.attention_gain),
        }
        if norm_names:
            state[f"{prefix}{norm_names[0]}.weight"] = self.norm(model.head_size, ATTENTION_SHARPNESS)
            state[f"{prefix}{norm_names[1]}.weight"] = self.norm(model.head_size)
        return state

    def mlp(self, prefix: str, names: tuple[str, str, str], size: int = INTERMEDIATE_SIZE) -> State:
        gate, up, down = (f"{prefix}{name}.weight" for name in names)
        hidden_size = self.model.hidden_size
        return {
            gate: self.linear(size, hidden_size),
            up: self.linear(size, hidden_size),
            down: self.branch_output(size, MLP_GAIN),
        }

    def experts(self, prefix: str) -> State:
        names = ("gate_proj", "up_proj", "down_proj")
        state = {
            f"{prefix}gate.weight": self.linear(NUM_EXPERTS, self.model.hidden_size),
            f"{prefix}shared_expert_gate.weight": self.linear(1, self.model.hidden_size),
            **self.mlp(f"{prefix}shared_expert.", names, EXPERT_SIZE),
        }
        for expert in range(NUM_EXPERTS):
            state |= self.mlp(f"{prefix}experts.{expert}.", names, EXPERT_SIZE)
        return state

    def gated_delta_net(self, prefix: str) -> State:
        hidden_size = self.model.hidden_size
        key_size = NUM_GDN_KEY_HEADS * self.model.gdn_head_size
        value_size = NUM_GDN_VALUE_HEADS * self.model.gdn_head_size
        kernel_size = CONV_KERNEL_SIZE[self.model.kind]
        # One step keeps exp(-exp(A_log) * softplus(a + dt_bias)), and softplus(0) = log 2.
        memory = torch.logspace(math.log10(SHORTEST_MEMORY), math.log10(LONGEST_MEMORY), NUM_GDN_VALUE_HEADS)
        state = {
            f"{prefix}A_log": -torch.log(memory * math.log(2)),
            f"{prefix}dt_bias": torch.zeros(NUM_GDN_VALUE_HEADS),
            f"{prefix}conv1d.weight": self.normal(2 * key_size + value_size, 1, kernel_size),
            f"{prefix}norm.weight": 1 + self.normal(self.model.gdn_head_size, scale=0.1),
            f"{prefix}out_proj.weight": self.branch_output(value_size, RECURRENT_GAIN),
        }
        if self.model.kind == "qwen3-next":
            state[f"{prefix}in_proj_qkvz.weight"] = self.linear(2 * (key_size + value_size), hidden_size)
            state[f"{prefix}in_proj_ba.weight"] = self.linear(2 * NUM_GDN_VALUE_HEADS, hidden_size)
        else:
            state[f"{prefix}in_proj_qkv.weight"] = self.linear(2 * key_size + value_size, hidden_size)
            state[f"{prefix}in_proj_z.weight"] = self.linear(value_size, hidden_size)
            state[f"{prefix}in_proj_b.weight"] = self.linear(NUM_GDN_VALUE_HEADS, hidden_size)
            state[f"{prefix}in_proj_a.weight"] = self.linear(NUM_GDN_VALUE_HEADS, hidden_size)
        return state

    def short_conv(self, prefix: str) -> State:
        size, kernel_size = self.model.hidden_size, CONV_KERNEL_SIZE["lfm2"]
        return {
            f"{prefix}in_proj.weight": self.linear(3 * size, size),
            f"{prefix}conv.weight": self.normal(size, 1, kernel_size, scale=1 / math.sqrt(kernel_size)),
            f"{prefix}out_proj.weight": self.branch_output(size, RECURRENT_GAIN),
        }

    def vision(self, prefix: str) -> State:
        size, merged_size = VISION_SIZE, 4 * VISION_SIZE
        linears = {
            "blocks.0.attn.qkv": (3 * size, size),
            "blocks.0.attn.proj": (size, size),
            "blocks.0.mlp.linear_fc1": (size, size),
            "blocks.0.mlp.linear_fc2": (size, size),
            "merger.linear_fc1": (merged_size, merged_size),
            "merger.linear_fc2": (self.model.hidden_size, merged_size),
        }
        state = {
            f"{prefix}patch_embed.proj.weight": self.normal(size, 3, 2, 16, 16, scale=0.02),
            f"{prefix}patch_embed.proj.bias": torch.zeros(size),
            f"{prefix}pos_embed.weight": self.normal(16, size),
        }
        for name, shape in linears.items():
            state[f"{prefix}{name}.weight"] = self.linear(*shape)
            state[f"{prefix}{name}.bias"] = torch.zeros(shape[0])
        for name in ("blocks.0.norm1", "blocks.0.norm2", "merger.norm"):
            state[f"{prefix}{name}.weight"] = torch.ones(size)
            state[f"{prefix}{name}.bias"] = torch.zeros(size)
        return state

    def output_matrix(self) -> torch.Tensor:
        weight = self.linear(VOCAB_SIZE, self.model.hidden_size, LOGIT_SCALE)
        weight[:NUM_SPECIAL_TOKENS] *= SPECIAL_TOKEN_SCALE
        return weight

    def lfm2(self) -> State:
        hidden_size = self.model.hidden_size
        state = {
            # Also the output matrix. The first norm undoes its small scale.
            "model.embed_tokens.weight": self.output_matrix(),
            "model.embedding_norm.weight": self.final_norm(hidden_size),
        }
        for layer, layer_type in enumerate(self.model.layer_types):
            prefix = f"model.layers.{layer}."
            state[f"{prefix}operator_norm.weight"] = self.norm(hidden_size)
            state[f"{prefix}ffn_norm.weight"] = self.norm(hidden_size)
            state |= self.mlp(f"{prefix}feed_forward.", ("w1", "w3", "w2"))
            if layer_type == "conv":
                state |= self.short_conv(f"{prefix}conv.")
            else:
                state |= self.attention(f"{prefix}self_attn.", "out_proj", ("q_layernorm", "k_layernorm"))
        return state

    def decoder(self, root: str) -> State:
        """Llama and the Qwen kinds, which name their parts alike."""
        model = self.model
        is_gated = model.kind in GATED_DELTA_NET_KINDS
        norm_names = ("q_norm", "k_norm") if is_gated else None
        state = {
            f"{root}embed_tokens.weight": self.normal(VOCAB_SIZE, model.hidden_size),
            f"{root}norm.weight": self.final_norm(model.hidden_size),
            "lm_head.weight": self.output_matrix(),
        }
        for layer, layer_type in enumerate(model.layer_types):
            prefix = f"{root}layers.{layer}."
            state[f"{prefix}input_layernorm.weight"] = self.norm(model.hidden_size)
            state[f"{prefix}post_attention_layernorm.weight"] = self.norm(model.hidden_size)
            if layer_type == "full_attention":
                state |= self.attention(f"{prefix}self_attn.", "o_proj", norm_names, is_gated)
            else:
                state |= self.gated_delta_net(f"{prefix}linear_attn.")
            if model.kind == "qwen3-next" and layer == model.moe_layer:
                state |= self.experts(f"{prefix}mlp.")
            else:
                state |= self.mlp(f"{prefix}mlp.", ("gate_proj", "up_proj", "down_proj"))
        return state


def make_state_dict(model: TinyModel) -> State:
    """All tensors of a checkpoint, under the names that the model's Hugging Face class saves.

    Args:
        model: what to build; equal arguments give equal tensors.

    Returns:
        name -> tensor of `model.dtype` on the CPU.
    """
    factory = _WeightFactory(model)
    if model.kind == "lfm2":
        state = factory.lfm2()
    elif model.kind == "qwen3.5":
        state = factory.decoder("model.language_model.") | factory.vision("model.visual.")
    else:
        state = factory.decoder("model.")
    dtype = getattr(torch, model.dtype)
    return {name: tensor.to(dtype).contiguous() for name, tensor in state.items()}
