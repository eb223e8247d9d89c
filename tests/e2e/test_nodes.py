# SPDX-License-Identifier: Apache-2.0
"""vLLM's own launch over several nodes: TP 2, DCP 2 across two process trees on this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from engines import LENGTHS, Engine, Engines, difference, tokens, without_dcp
from test_parity import FLOAT32_NOISE
from test_switches import serve

from vllm_dcp_hybrid import tiny_models
from vllm_dcp_hybrid.cli.client import metric_total
from vllm_dcp_hybrid.cli.server import HOST, Server, ServerFailed, free_port

pytestmark = pytest.mark.e2e

ENGINE = Engine("lfm2", tp=2, dcp=2, dtype="float32", prefix_caching=True)
IMPATIENT = ("--worker-cls", "impatient.ImpatientWorker")
READY_LIMIT_S = 240


class Node(Server):
    """One of two nodes, with one rank.

    Args:
        number: 0 for the one that serves.
        model: a checkpoint.
        master_port: where the ranks find each other.
        directory: for its log.
        flags: more arguments of `vllm serve`.
        environment: what differs from this process's.
    """

    def __init__(
        self,
        number: int,
        model: Path,
        master_port: int,
        directory: Path,
        *,
        flags: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        command = [
            *serve(ENGINE, model, "--max-num-seqs", "8", "--enable-prefix-caching", "--dtype", "float32"),
            *("--nnodes", "2", "--node-rank", str(number), "--master-addr", HOST, "--master-port", str(master_port)),
            *(("--headless",) if number else ()),
            *flags,
        ]
        environment = {
            **os.environ,
            **tiny_models.cpu_environment(1),
            "VLLM_CPU_OMP_THREADS_BIND": str(number),
            "VLLM_HOST_IP": HOST,
            "TORCHDYNAMO_DISABLE": "1",
            "PYTHONPATH": str(Path(__file__).parent),
            **(environment or {}),
        }
        super().__init__(command, port=free_port(), log=directory / f"node{number}.log", environment=environment)

    @property
    def text(self) -> str:
        """Its log so far."""
        return self.log.read_text(errors="replace")


def test_two_nodes_answer_over_http_as_one_does_without_dcp(engines: Engines, tmp_path: Path) -> None:
    model, master_port = engines.model(ENGINE), free_port()
    with Node(1, model, master_port, tmp_path), Node(0, model, master_port, tmp_path) as head:
        head.wait_until_ready(READY_LIMIT_S, lambda seconds, line: None)
        prompts = [tokens(length) for length in LENGTHS]
        scored = ask(head, model, prompts, echo=True)
        # vLLM scores no prompt from its prefix cache: these start from what the first have left there.
        warm = ask(head, model, prompts, echo=False)
        assert metric_total(head.client.metrics(), "vllm:prefix_cache_hits") > 0
    expected = engines.run(without_dcp(ENGINE)).scored
    gap, warm_gap = difference(scored, expected), difference(warm, [{**it, "prompt_logprobs": []} for it in expected])
    print(f"\nTwo nodes: {gap}; warm: {warm_gap}")
    assert max(gap.largest, warm_gap.largest) < FLOAT32_NOISE
    assert re.search(r"fingerprint \w+\): the same on all 2 ranks of 2 nodes", head.text)


def test_case_30_a_node_without_the_plugin_ends_the_other_before_its_weights_load(
    engines: Engines, tmp_path: Path
) -> None:
    """CASES 30: half of the ranks with the plugin is a half-applied state too."""
    model, master_port = engines.model(ENGINE), free_port()
    stock = {"VLLM_PLUGINS": ""}
    with (
        Node(1, model, master_port, tmp_path, environment=stock),
        Node(0, model, master_port, tmp_path, flags=IMPATIENT) as head,
        pytest.raises(ServerFailed, match=r"rank 1 \(node 1\) said nothing within 8 s"),
    ):
        head.wait_until_ready(READY_LIMIT_S, lambda seconds, line: None)
    assert "Starting to load model" not in head.text


def ask(node: Node, model: Path, prompts: list[list[int]], *, echo: bool) -> list[dict[str, Any]]:
    """Generations, and scored prompts with `echo`, as the driver of other engines writes them."""
    body = {"model": str(model), "prompt": prompts, "temperature": 0, "ignore_eos": True, "max_tokens": 8}
    body |= {"echo": echo, "logprobs": 1, "return_tokens_as_token_ids": True}
    answers = []
    for prompt, choice in zip(prompts, node.client.post("/v1/completions", body, timeout=300)["choices"], strict=True):
        values, words = choice["logprobs"]["token_logprobs"], choice["logprobs"]["tokens"]
        start = len(prompt) if echo else 0
        answers.append(
            {
                "prompt_logprobs": values[1:start],
                "tokens": [int(word.removeprefix("token_id:")) for word in words[start:]],
                "logprobs": values[start:],
            }
        )
    return answers
