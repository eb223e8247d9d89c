# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints: what they promise to the tests that run engines on them."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_dcp_hybrid.tiny_models import (
    NUM_SPECIAL_TOKENS,
    TINY_MODELS,
    VOCAB_SIZE,
    TinyModel,
    cpu_environment,
    engine_arguments,
    make_tiny_model,
    serve_arguments,
)

KINDS = sorted(TINY_MODELS)
HYBRID_KINDS = [kind for kind in KINDS if kind != "llama"]


def text_config(model: TinyModel) -> dict[str, Any]:
    config: dict[str, Any] = model.config()
    return config.get("text_config", config)


class TestArguments:
    def test_an_unknown_kind_is_refused_and_the_known_ones_are_named(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"'mamba'.*qwen3-next.*lfm2"):
            make_tiny_model("mamba", tmp_path / "model")

    @pytest.mark.parametrize("num_key_value_heads", [0, 3, 16])
    def test_query_heads_that_cannot_share_the_kv_heads_are_refused(self, num_key_value_heads: int) -> None:
        with pytest.raises(ValueError, match="KV heads"):
            TinyModel("llama", num_attention_heads=8, num_key_value_heads=num_key_value_heads)

    @pytest.mark.parametrize("head_size", [0, 16, 48])
    def test_a_head_size_that_is_no_multiple_of_32_is_refused(self, head_size: int) -> None:
        with pytest.raises(ValueError, match="multiple of 32"):
            TinyModel("llama", head_size=head_size)

    def test_too_few_layers_for_a_full_attention_layer_are_refused(self) -> None:
        with pytest.raises(ValueError, match="3 layers hold no full attention"):
            TinyModel("lfm2", num_layers=3)

    def test_a_directory_with_other_content_is_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.txt").write_text("years of work")
        with pytest.raises(FileExistsError, match="not a tiny model"):
            make_tiny_model("llama", tmp_path)
        assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]


class TestConfig:
    @pytest.mark.parametrize("kind", HYBRID_KINDS)
    def test_every_4th_layer_of_a_hybrid_is_full_attention(self, kind: str) -> None:
        layer_types = text_config(TinyModel(kind, num_layers=10))["layer_types"]
        is_attention = [layer_type == "full_attention" for layer_type in layer_types]
        assert is_attention == [False, False, False, True] * 2 + [False, False]

    @pytest.mark.parametrize("kind", KINDS)
    def test_head_counts_reach_the_config(self, kind: str) -> None:
        config = text_config(TinyModel(kind, num_attention_heads=4, num_key_value_heads=1))
        assert (config["num_attention_heads"], config["num_key_value_heads"]) == (4, 1)

    def test_qwen3_next_has_exactly_one_moe_layer(self) -> None:
        config = TinyModel("qwen3-next").config()
        assert len(set(range(8)) - set(config["mlp_only_layers"])) == 1  # type: ignore[call-overload]

    @pytest.mark.parametrize("head_size", [32, 64, 128])
    def test_mrope_sections_add_up_to_the_rotated_pairs(self, head_size: int) -> None:
        rope = text_config(TinyModel("qwen3.5", head_size=head_size))["rope_parameters"]
        assert 2 * sum(rope["mrope_section"]) == head_size * rope["partial_rotary_factor"]


class TestEngineSettings:
    @pytest.mark.parametrize("kind", KINDS)
    def test_flags_say_what_the_keyword_arguments_say(self, kind: str) -> None:
        flags = serve_arguments(kind)
        for name, value in engine_arguments(kind).items():
            position = flags.index("--" + name.replace("_", "-"))
            assert value is True or flags[position + 1] == value

    @pytest.mark.parametrize(
        ("tensor_parallel_size", "binding"),
        [(1, "4,5,6,7"), (2, "4,5|6,7"), (4, "4|5|6|7"), (8, "4|5|6|7|4|5|6|7")],
    )
    def test_ranks_share_the_cores_out_and_repeat_them_where_there_are_too_few(
        self, monkeypatch: pytest.MonkeyPatch, tensor_parallel_size: int, binding: str
    ) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {7, 6, 5, 4})
        assert cpu_environment(tensor_parallel_size)["VLLM_CPU_OMP_THREADS_BIND"] == binding


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    directory = tmp_path_factory.mktemp("tiny_models")
    return lambda kind: make_tiny_model(kind, directory / kind)


@pytest.mark.contract
class TestFiles:
    @pytest.mark.parametrize("kind", KINDS)
    def test_a_checkpoint_is_below_30_megabytes(self, checkpoint: Callable[[str], Path], kind: str) -> None:
        assert sum(file.stat().st_size for file in checkpoint(kind).iterdir()) < 30e6

    def test_equal_arguments_reuse_the_files(self, tmp_path: Path) -> None:
        path = make_tiny_model("lfm2", tmp_path / "model")
        before = (path / "model.safetensors").stat()
        make_tiny_model("lfm2", path)
        after = (path / "model.safetensors").stat()
        assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)

    def test_other_arguments_replace_the_files(self, tmp_path: Path) -> None:
        path = make_tiny_model("lfm2", tmp_path / "model")
        make_tiny_model("llama", path, num_layers=4)
        assert json.loads((path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]

    def test_nothing_is_left_beside_the_checkpoint(self, tmp_path: Path) -> None:
        make_tiny_model("lfm2", tmp_path / "model")
        assert [path.name for path in tmp_path.iterdir()] == ["model"]

    def test_weights_depend_on_the_seed_alone(self, tmp_path: Path) -> None:
        seeds = {"first": 1, "again": 1, "other": 2}
        weights = {
            name: (make_tiny_model("lfm2", tmp_path / name, seed=seed) / "model.safetensors").read_bytes()
            for name, seed in seeds.items()
        }
        assert weights["first"] == weights["again"] != weights["other"]

    @pytest.mark.parametrize("kind", KINDS)
    def test_skewed_kv_heads_differ_eightfold_in_scale(self, tmp_path: Path, kind: str) -> None:
        from safetensors.torch import load_file

        state = load_file(make_tiny_model(kind, tmp_path / "model", skew_kv_heads=True) / "model.safetensors")
        weight = next(tensor for name, tensor in state.items() if name.endswith("self_attn.v_proj.weight"))
        first, second = weight.float().chunk(2)
        assert second.std() / first.std() == pytest.approx(8, rel=0.1)


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Callable[[str], Path]) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint("lfm2"))


@pytest.mark.contract
class TestTokenizer:
    @pytest.mark.parametrize("text", ["the cat sat", "1024  tokens\n", "Grüße, 世界 🙂"])
    def test_any_text_survives_the_round_trip(self, tokenizer: Any, text: str) -> None:
        assert tokenizer.decode(tokenizer.encode(text)) == text

    def test_every_id_has_a_token(self, tokenizer: Any) -> None:
        assert len(tokenizer) == VOCAB_SIZE
        assert None not in tokenizer.convert_ids_to_tokens(range(VOCAB_SIZE))

    def test_plain_text_holds_no_special_token(self, tokenizer: Any) -> None:
        assert min(tokenizer.encode("any text, even bytes \x00\x7f")) >= NUM_SPECIAL_TOKENS

    def test_a_chat_ends_where_the_answer_begins(self, tokenizer: Any) -> None:
        messages = [{"role": "user", "content": "hello"}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
        assert tokenizer.eos_token == "<|im_end|>"


PROMPT_LENGTH = 600


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Any:
    import torch
    import transformers

    name = "AutoModelForImageTextToText" if request.param == "qwen3.5" else "AutoModelForCausalLM"
    model, report = getattr(transformers, name).from_pretrained(
        checkpoint(request.param), dtype=torch.float32, attn_implementation="sdpa", output_loading_info=True
    )
    assert not any(report.values()), f"tensors do not match the class of transformers: {report}"
    return model


@pytest.fixture(scope="module")
def tokens() -> Any:
    import torch

    generator = torch.Generator().manual_seed(1)
    return torch.randint(NUM_SPECIAL_TOKENS, VOCAB_SIZE, (1, PROMPT_LENGTH), generator=generator)


def log_probs(model: Any, tokens: Any) -> Any:
    """`[length, vocabulary]`."""
    import torch

    with torch.no_grad():
        return model(input_ids=tokens).logits[0].log_softmax(-1)


@pytest.fixture(scope="module")
def expected(model: Any, tokens: Any) -> Any:
    return log_probs(model, tokens)


@pytest.mark.contract
class TestPredictions:
    """What transformers computes in float32."""

    def test_they_are_finite(self, expected: Any) -> None:
        assert expected.isfinite().all()

    def test_they_are_peaked_and_rarely_tied(self, expected: Any) -> None:
        best = expected.topk(2).values
        assert best[:, 0].exp().mean() > 0.1
        assert (best[:, 0] - best[:, 1] < 0.02).float().mean() < 0.05

    def test_an_early_token_moves_the_last_position(self, model: Any, tokens: Any, expected: Any) -> None:
        other = tokens.clone()
        other[0, 3] = NUM_SPECIAL_TOKENS + (other[0, 3] + 100) % (VOCAB_SIZE - NUM_SPECIAL_TOKENS)
        assert (log_probs(model, other) - expected)[-1].abs().max() > 0.1

    def test_losing_every_second_block_of_keys_moves_them_far_beyond_noise(
        self, monkeypatch: pytest.MonkeyPatch, model: Any, tokens: Any, expected: Any
    ) -> None:
        import torch

        attend = torch.nn.functional.scaled_dot_product_attention
        position = torch.arange(PROMPT_LENGTH)
        is_own_or_kept = (position[:, None] - position < 16) | (position // 16 % 2 == 0)
        mask = (position[:, None] >= position) & is_own_or_kept

        def attend_to_half(query: Any, key: Any, value: Any, attn_mask: Any = None, **options: Any) -> Any:
            options.pop("is_causal", None)
            return attend(query, key, value, attn_mask=mask, **options)

        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend_to_half)
        # Rounding to bfloat16 moves them by 0.03 - 0.06 on average.
        assert (log_probs(model, tokens) - expected)[-300:].abs().mean() > 0.4
