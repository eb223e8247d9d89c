# SPDX-License-Identifier: Apache-2.0
"""Small hybrid checkpoints with random weights, made on the spot: for tests, `verify` and `demo`."""

import hashlib
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

from vllm_dcp_hybrid.tiny_models.architectures import GATED_DELTA_NET_KINDS, TINY_MODELS, TinyModel
from vllm_dcp_hybrid.tiny_models.tokenizer import (
    BOS_TOKEN_ID,
    EOS_TOKEN_ID,
    NUM_SPECIAL_TOKENS,
    PAD_TOKEN_ID,
    VOCAB_SIZE,
    write_tokenizer,
)

__all__ = [
    "NUM_SPECIAL_TOKENS",
    "TINY_MODELS",
    "VOCAB_SIZE",
    "TinyModel",
    "cpu_environment",
    "engine_arguments",
    "make_tiny_model",
    "serve_arguments",
]

MARKER = "tiny_model.json"
"""Written last: a directory that holds it is complete, and ours to replace."""


def make_tiny_model(
    kind: str,
    path: Path,
    *,
    seed: int = 0,
    num_layers: int = 8,
    num_attention_heads: int = 8,
    num_key_value_heads: int = 2,
    head_size: int | None = None,
    gdn_head_size: int = 32,
    max_position_embeddings: int = 8192,
    dtype: str = "bfloat16",
    skew_kv_heads: bool = False,
) -> Path:
    """Make a checkpoint that `vllm serve` loads, or reuse the one that equal arguments made there before.

    Args:
        kind: a key of `TINY_MODELS`.
        path: the directory to create.
        seed: equal arguments and seeds give equal files.
        num_layers: 4 or more; every 4th layer is full attention.
        num_attention_heads: query heads.
        num_key_value_heads: KV heads; DCP N needs TP > KV heads and N <= TP // KV heads.
        head_size: 32 for LFM2, whose hidden size is `num_attention_heads * head_size`, else 64.
        max_position_embeddings: longest sequence, tokens.
        gdn_head_size: of gated delta nets. vLLM's kernel for CPUs with AVX512-BF16 takes 64 and 128 only, from 0.29 on.
        dtype: of the weights; gated delta nets run in bfloat16 only on a CPU.
        skew_kv_heads: give the KV heads very different scales, so that a head mix-up cannot hide.

    Returns:
        `path`.

    Raises:
        ValueError: for an unknown kind or impossible head counts.
        FileExistsError: if `path` holds something that this function did not make.
    """
    model = TinyModel(
        kind=kind,
        seed=seed,
        num_layers=num_layers,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_key_value_heads,
        head_size=head_size or (32 if kind == "lfm2" else 64),
        gdn_head_size=gdn_head_size,
        max_position_embeddings=max_position_embeddings,
        dtype=dtype,
        skew_kv_heads=skew_kv_heads,
    )
    marker = json.dumps({**asdict(model), "source": _source_digest()}, indent=2) + "\n"
    if (path / MARKER).is_file():
        if (path / MARKER).read_text() == marker:
            return path
        shutil.rmtree(path)
    elif path.exists() and any(path.iterdir()):
        raise FileExistsError(f"{path} holds files that are not a tiny model: choose another directory")

    # Built beside its place and moved there whole, so that nobody loads half a checkpoint.
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    unfinished.mkdir(parents=True, exist_ok=True)
    _write_checkpoint(model, unfinished)
    (unfinished / MARKER).write_text(marker)
    try:
        unfinished.replace(path)
    except OSError:
        # Another process has just moved its own there.
        if not (path / MARKER).is_file() or (path / MARKER).read_text() != marker:
            raise
        shutil.rmtree(unfinished)
    return path


def engine_arguments(kind: str) -> dict[str, object]:
    """Keyword arguments of `vllm.LLM` that a CPU run of this kind needs."""
    arguments: dict[str, object] = {"dtype": "bfloat16"}
    if kind in GATED_DELTA_NET_KINDS:
        arguments["mamba_ssm_cache_dtype"] = "float32"
    if kind == "qwen3.5":
        arguments["language_model_only"] = True
    return arguments


def serve_arguments(kind: str) -> list[str]:
    """The same as flags of `vllm serve`."""
    flags: list[str] = []
    for name, value in engine_arguments(kind).items():
        flag = f"--{name.replace('_', '-')}"
        flags += [flag] if value is True else [flag, str(value)]
    return flags


def cpu_environment(tensor_parallel_size: int, num_cores: int | None = None) -> dict[str, str]:
    """Environment variables of a CPU run of vLLM on a machine with one NUMA node: set before it starts.

    Torch's compiler is switched off: even with `enforce_eager` it takes half of the start, for a tiny model.

    Args:
        tensor_parallel_size: one share of the cores for each rank; ranks share cores where there are too few.
        num_cores: the cores to share out, all that this process may use if None.
    """
    cores = sorted(os.sched_getaffinity(0))[:num_cores]
    num_each = max(1, len(cores) // tensor_parallel_size)
    shares = [
        [str(cores[(rank * num_each + i) % len(cores)]) for i in range(num_each)]
        for rank in range(tensor_parallel_size)
    ]
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # Automatic binding wants a NUMA node for each rank.
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(",".join(share) for share in shares),
        "TORCHDYNAMO_DISABLE": "1",
    }


def _source_digest() -> str:
    """Changes whenever the code of this package does, so that no stale checkpoint is reused."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


def _write_checkpoint(model: TinyModel, path: Path) -> None:
    # Torch takes seconds to import, and TINY_MODELS needs none of it.
    from safetensors.torch import save_file

    from vllm_dcp_hybrid.tiny_models.weights import make_state_dict

    def write_json(name: str, content: dict[str, object]) -> None:
        (path / name).write_text(json.dumps(content, indent=2) + "\n")

    write_json("config.json", model.config())
    write_json(
        "generation_config.json",
        {"bos_token_id": BOS_TOKEN_ID, "eos_token_id": EOS_TOKEN_ID, "pad_token_id": PAD_TOKEN_ID},
    )
    if model.kind == "qwen3.5":
        image_size = {"shortest_edge": 32 * 32, "longest_edge": 64 * 64}
        patches = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2, "size": image_size}
        for name, key, processor in (
            ("preprocessor_config.json", "image_processor_type", "Qwen2VLImageProcessorFast"),
            ("video_preprocessor_config.json", "video_processor_type", "Qwen3VLVideoProcessor"),
        ):
            write_json(name, {key: processor, **patches})
    write_tokenizer(path, model_max_length=model.max_position_embeddings)
    save_file(make_state_dict(model), path / "model.safetensors", metadata={"format": "pt"})
