# SPDX-License-Identifier: Apache-2.0
"""Runs one engine over a list of phases and writes what came out: ``python driver.py SPEC.json OUT.json``.

A process of its own per engine, since an engine leaves threads, shared memory and environment variables behind.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Start the engine of ``spec`` and run its phases.

    Args:
        spec: ``model`` (directory), ``environment``, ``engine`` (arguments of LLM), ``phases``: each a dict with
            ``prompts`` (lists of token ids), ``max_tokens``, ``score_prompt``, ``has_margins`` and ``reset_cache``.
    """
    os.environ.update(spec["environment"])
    # Worker classes of the tests, for processes that are forked from this one.
    sys.path.extend(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    from vllm import LLM, SamplingParams

    llm = LLM(spec["model"], **spec["engine"])
    phases = []
    for phase in spec["phases"]:
        if phase.get("reset_cache"):
            llm.reset_prefix_cache()
        sampling = SamplingParams(
            temperature=0,
            max_tokens=phase["max_tokens"],
            ignore_eos=True,
            logprobs=2 if phase.get("has_margins") else 1,
            prompt_logprobs=0 if phase.get("score_prompt") else None,
        )
        prompts = [{"prompt_token_ids": tokens} for tokens in phase["prompts"]]
        phases.append([describe(output) for output in llm.generate(prompts, sampling, use_tqdm=False)])
    return {"phases": phases}


def describe(output: Any) -> dict[str, Any]:
    """One request's result in plain numbers."""
    completion = output.outputs[0]
    scored = (output.prompt_logprobs or [])[1:]
    return {
        "prompt_logprobs": [
            entry[token].logprob for entry, token in zip(scored, output.prompt_token_ids[1:], strict=True)
        ]
        if scored
        else [],
        "tokens": list(completion.token_ids),
        "logprobs": [
            entry[token].logprob for entry, token in zip(completion.logprobs, completion.token_ids, strict=True)
        ],
        "margins": [margin(entry) for entry in completion.logprobs if len(entry) > 1],
        "num_cached_tokens": output.num_cached_tokens,
    }


def margin(entry: Any) -> float:
    """How much more probable the best token is than the second, nats."""
    best, second, *_ = sorted((candidate.logprob for candidate in entry.values()), reverse=True)
    return best - second


if __name__ == "__main__":
    spec_path, out_path = map(Path, sys.argv[1:3])
    out_path.write_text(json.dumps(run(json.loads(spec_path.read_text()))))
