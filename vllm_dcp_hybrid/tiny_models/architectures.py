# SPDX-License-Identifier: Apache-2.0
"""The shape of each kind of tiny model, and the `config.json` that says so."""

from dataclasses import dataclass

from vllm_dcp_hybrid.tiny_models.tokenizer import (
    BOS_TOKEN_ID,
    EOS_TOKEN_ID,
    PAD_TOKEN_ID,
    SPECIAL_TOKENS,
    VOCAB_SIZE,
)

TINY_MODELS = {
    "qwen3-next": "Qwen3-Next: gated delta net, full attention in every 4th layer, one MoE layer",
    "qwen3.5": "Qwen3.5 dense: gated delta net, full attention in every 4th layer, a vestigial vision tower",
    "lfm2": "LFM2: short convolution, full attention in every 4th layer",
    "llama": "Llama: full attention only, not a hybrid",
}
"""Kind -> one line for a human."""

GATED_DELTA_NET_KINDS = ("qwen3-next", "qwen3.5")
ATTENTION_INTERVAL = 4
ROPE_THETA = 10000.0

INTERMEDIATE_SIZE = 512
NUM_EXPERTS = 4
EXPERT_SIZE = 128
NUM_GDN_KEY_HEADS = 4
NUM_GDN_VALUE_HEADS = 8
CONV_KERNEL_SIZE = {"qwen3-next": 4, "qwen3.5": 4, "lfm2": 3}
ROTARY_FACTOR = {"qwen3-next": 0.25, "qwen3.5": 0.25, "lfm2": 1.0, "llama": 1.0}
VISION_SIZE = 128
NUM_VISION_HEADS = 8


@dataclass(frozen=True)
class TinyModel:
    """What tells one tiny checkpoint from another.

    Raises:
        ValueError: for an unknown kind, or for head counts or sizes that no model could have.
    """

    kind: str
    seed: int = 0
    num_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_size: int = 64
    gdn_head_size: int = 32
    max_position_embeddings: int = 8192
    dtype: str = "bfloat16"
    skew_kv_heads: bool = False

    def __post_init__(self) -> None:
        if self.kind not in TINY_MODELS:
            raise ValueError(f"no tiny model of kind {self.kind!r}: choose one of {', '.join(TINY_MODELS)}")
        if self.num_layers < ATTENTION_INTERVAL:
            raise ValueError(f"{self.num_layers} layers hold no full attention: {ATTENTION_INTERVAL} do")
        if self.num_key_value_heads < 1 or self.num_attention_heads % self.num_key_value_heads:
            heads = f"{self.num_attention_heads} query heads cannot share {self.num_key_value_heads} KV heads"
            raise ValueError(f"{heads}: give a multiple")
        if self.head_size < 32 or self.head_size % 32:
            raise ValueError(f"head size {self.head_size} is not a positive multiple of 32")

    @property
    def hidden_size(self) -> int:
        # LFM2 has no head size of its own: it is hidden_size / num_attention_heads.
        return self.num_attention_heads * self.head_size if self.kind == "lfm2" else 256

    @property
    def layer_types(self) -> list[str]:
        """One word per layer, as the model's own config spells it."""
        recurrent = {"lfm2": "conv", "llama": "full_attention"}.get(self.kind, "linear_attention")
        is_attention = [(layer + 1) % ATTENTION_INTERVAL == 0 for layer in range(self.num_layers)]
        return ["full_attention" if attention else recurrent for attention in is_attention]

    @property
    def moe_layer(self) -> int:
        """The one layer of Qwen3-Next with experts (vLLM's class asks for at least one)."""
        return self.num_layers // 2

    def config(self) -> dict[str, object]:
        """The content of `config.json`."""
        return {
            "qwen3-next": self._qwen3_next_config,
            "qwen3.5": self._qwen3_5_config,
            "lfm2": self._lfm2_config,
            "llama": self._llama_config,
        }[self.kind]()

    def _common_config(self) -> dict[str, object]:
        rotary = {"rope_theta": ROPE_THETA, "partial_rotary_factor": ROTARY_FACTOR[self.kind]}
        return {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": self.hidden_size,
            "intermediate_size": INTERMEDIATE_SIZE,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": self.kind == "lfm2",
            "pad_token_id": PAD_TOKEN_ID,
            "bos_token_id": BOS_TOKEN_ID,
            "eos_token_id": EOS_TOKEN_ID,
            "dtype": self.dtype,
            # Transformers 4 reads the flat keys, transformers 5 the nested ones.
            **rotary,
            "rope_parameters": {"rope_type": "default", **rotary},
        }

    def _gated_delta_net_config(self) -> dict[str, object]:
        return {
            **self._common_config(),
            "head_dim": self.head_size,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "layer_types": self.layer_types,
            "full_attention_interval": ATTENTION_INTERVAL,
            "linear_conv_kernel_dim": CONV_KERNEL_SIZE[self.kind],
            "linear_key_head_dim": self.gdn_head_size,
            "linear_value_head_dim": self.gdn_head_size,
            "linear_num_key_heads": NUM_GDN_KEY_HEADS,
            "linear_num_value_heads": NUM_GDN_VALUE_HEADS,
        }

    def _qwen3_next_config(self) -> dict[str, object]:
        return {
            **self._gated_delta_net_config(),
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "num_experts": NUM_EXPERTS,
            # Every expert takes part: a choice among them would turn rounding noise into jumps of the logits.
            "num_experts_per_tok": NUM_EXPERTS,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "moe_intermediate_size": EXPERT_SIZE,
            "shared_expert_intermediate_size": EXPERT_SIZE,
            "mlp_only_layers": [layer for layer in range(self.num_layers) if layer != self.moe_layer],
        }

    def _qwen3_5_config(self) -> dict[str, object]:
        text = {**self._gated_delta_net_config(), "model_type": "qwen3_5_text"}
        num_rotated_pairs = int(self.head_size * ROTARY_FACTOR[self.kind]) // 2
        quarter = num_rotated_pairs // 4
        text["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": ROPE_THETA,
            "partial_rotary_factor": ROTARY_FACTOR[self.kind],
            "mrope_section": [num_rotated_pairs - 2 * quarter, quarter, quarter],
            "mrope_interleaved": True,
        }
        return {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "text_config": text,
            "vision_config": {
                "model_type": "qwen3_5",
                "depth": 1,
                "hidden_size": VISION_SIZE,
                "intermediate_size": VISION_SIZE,
                "num_heads": NUM_VISION_HEADS,
                "out_hidden_size": self.hidden_size,
                "num_position_embeddings": 16,
                "patch_size": 16,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
                "in_channels": 3,
                "hidden_act": "gelu_pytorch_tanh",
            },
            "image_token_id": SPECIAL_TOKENS.index("<|image_pad|>"),
            "video_token_id": SPECIAL_TOKENS.index("<|video_pad|>"),
            "vision_start_token_id": SPECIAL_TOKENS.index("<|vision_start|>"),
            "vision_end_token_id": SPECIAL_TOKENS.index("<|vision_end|>"),
            "tie_word_embeddings": False,
            "dtype": self.dtype,
        }

    def _lfm2_config(self) -> dict[str, object]:
        # Rotations of nearly zero: vLLM's LFM2 hands [tokens, heads, head size] to the CPU's rotary kernel,
        # which takes it for [tokens, size] and turns other rows than meant, depending on TP and on the batch
        # (0.25.1 with enforce_eager; nothing else here runs into it).
        no_rotation = {
            "rope_type": "llama3",
            "rope_theta": ROPE_THETA,
            "factor": 1e9,
            "low_freq_factor": 1.0,
            "high_freq_factor": 2.0,
            "original_max_position_embeddings": 1,
        }
        return {
            **self._common_config(),
            "rope_parameters": no_rotation,
            "architectures": ["Lfm2ForCausalLM"],
            "model_type": "lfm2",
            "norm_eps": 1e-5,
            "layer_types": self.layer_types,
            "conv_L_cache": CONV_KERNEL_SIZE[self.kind],
            "conv_bias": False,
            # vLLM's own names for what transformers derives from hidden_size and intermediate_size.
            "conv_dim": self.hidden_size,
            "conv_dim_out": self.hidden_size,
            "block_dim": self.hidden_size,
            "block_ff_dim": INTERMEDIATE_SIZE,
            "block_auto_adjust_ff_dim": False,
            "block_multiple_of": 32,
            "block_ffn_dim_multiplier": 1.0,
        }

    def _llama_config(self) -> dict[str, object]:
        return {
            **self._common_config(),
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "head_dim": self.head_size,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "mlp_bias": False,
        }
