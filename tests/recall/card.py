# SPDX-License-Identifier: Apache-2.0
"""Writes the model card of a recall model, with its recall measured anew.

``python tests/recall/card.py DIR --commit HASH --command "python tests/recall/train.py ..." --where "one H200, ..."``
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import task
import torch
from measure import Recall, answer_margins, forget, summarise
from safetensors import safe_open
from transformers import AutoModelForCausalLM

COUNT = 500
SEED = 7

LAYERS = {
    "lfm2": "three short convolutions, then full attention (4 query heads, 1 KV head of size 32, no rotation)",
    "qwen3_next": "three gated delta nets (4 heads of 64), then full attention (4 query heads, 1 KV head of size 64)",
}
CARD = """\
---
license: apache-2.0
library_name: transformers
---
# {name}

A hybrid model of {weights} weights that finds facts in its context, made for tests of vllm-dcp-hybrid:
{layers}.

    KEY k k VALUE v v v   ...   QUERY k k ANSWER  ->  v v v END

Facts lie anywhere among random words, in up to {max_length} tokens; words, keys and values are the same {num_words}
tokens. The attention layer alone cannot answer: it sees which key a value belongs to only through the {recurrent}
before it, whose memory the last rows take away.
{registers}
Loads in stock vLLM (TP 1, 2 and 4; DCP 2 and 4 with the plugin) and in transformers. `recall.json` tells
`vllm-dcp-hybrid verify` how to ask. Weights are bfloat16; every answer token is the most probable one by far, so that
rounding does not change answers and a fault does.

## Measured

{count} questions (`task.py`, seed {seed}), texts of 64 to {longest} tokens with 1 to 32 facts; transformers, float32
(`python tests/recall/measure.py`). A margin is how much more probable the right token is than the next, in nats.

| | answered rightly | smallest margin | 1st percentile |
|---|---|---|---|
{rows}

In vLLM, with and without DCP: [docs/results/recall.md](../../../docs/results/recall.md).

## Made by

    {command}

Commit {commit}, seed {train_seed};
{where}.
The seed fixes first weights and data; how many steps fit into the time depends on the machine, so another run gives
other weights, as good.
"""
REGISTERS = """
It also keeps registers, whose last write counts, in its recurrent states:

    SET r v   ...   SET r w   ...   GET r ANSWER  ->  w END
"""


def recall(model: torch.nn.Module, prompts: list[task.Prompt]) -> Recall:
    return summarise([answer_margins(model, prompt) for prompt in prompts], prompts)


def row(name: str, recall: Recall) -> str:
    right = f"{recall.num_right} of {recall.num_prompts}"
    return f"| {name} | {right} | {recall.smallest_margin} | {recall.first_percentile_margin} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--commit", required=True, help="of the training script")
    parser.add_argument("--command", required=True, help="that trained the model")
    parser.add_argument("--train-seed", type=int, default=0)
    parser.add_argument("--where", required=True, help="machine and versions")
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    kind = json.loads((options.model / "config.json").read_text())["model_type"]
    facts = task.make_prompts(COUNT, seed=SEED)
    questions = {"facts": facts}
    if kind != "lfm2":
        questions["registers"] = task.make_register_prompts(COUNT // 5, seed=SEED)
    measured = {name: recall(model, prompts) for name, prompts in questions.items()}
    forget(model)
    for name, prompts in questions.items():
        measured[f"{name}, recurrent layers without memory"] = recall(model, prompts)
    with safe_open(options.model / "model.safetensors", "pt") as weights:
        num_weights = sum(weights.get_tensor(name).numel() for name in weights.keys())  # noqa: SIM118
    card = CARD.format(
        name=options.model.name,
        weights=f"{num_weights:,}",
        layers=LAYERS[kind],
        recurrent="convolutions" if kind == "lfm2" else "recurrent layers",
        max_length=f"{task.MAX_LENGTH:,}",
        num_words=task.VOCAB_SIZE - task.FIRST_WORD,
        registers="" if kind == "lfm2" else REGISTERS,
        count=COUNT,
        seed=SEED,
        longest=f"{max(len(prompt.tokens) for prompt in facts):,}",
        rows="\n".join(row(name, recall) for name, recall in measured.items()),
        command=options.command,
        commit=options.commit,
        train_seed=options.train_seed,
        where=options.where,
    )
    (options.model / "README.md").write_text(card)


if __name__ == "__main__":
    main()
