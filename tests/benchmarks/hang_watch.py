# SPDX-License-Identifier: Apache-2.0
"""Requests of every awkward length against a DCP 2 server, with a watchdog: does any of them wait for ever?

    PYTHON hang_watch.py --plugin PYTHON --out results.json

Prompts of one token, of less than an interleave round, of a few thousand and of 100,000 tokens, arriving at random, a
tenth of them cancelled half-way. Every server event counts as progress; with none for --silence seconds while requests
are open, or a request that fails, the exit status is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
from models import make_model
from servers import KINDS, running

INTERLEAVE = 16
LONG = 100_000


@dataclass
class Outcome:
    """What became of the requests."""

    finished: int = 0
    cancelled: int = 0
    num_tokens: int = 0
    last_progress: float = 0.0
    longest_silence_s: float = 0.0

    def progress(self) -> None:
        """Something arrived."""
        self.longest_silence_s = max(self.longest_silence_s, time.monotonic() - self.last_progress)
        self.last_progress = time.monotonic()


def plan_requests(num_requests: int, num_long: int, seed: int) -> list[dict[str, Any]]:
    """Prompts as token ids, with arrival times and output lengths."""
    source = random.Random(seed)
    kinds = ["long"] * num_long + ["one", "short", "middle"] * num_requests
    requests = []
    for number, kind in enumerate(kinds[:num_requests]):
        length = {
            "one": 1,
            "short": source.randrange(2, INTERLEAVE),
            "middle": source.randrange(17, 4000),
            "long": LONG + source.randrange(-40, 40),
        }[kind]
        requests.append(
            {
                "prompt": [source.randrange(10, 500) for _ in range(length)],
                "max_tokens": source.choice([1, 2, 17, 64, 200]),
                "arrives_s": source.uniform(0, 30),
                "is_cancelled": number % 10 == 9,
            }
        )
    return requests


async def send(session: aiohttp.ClientSession, request: dict[str, Any], outcome: Outcome) -> None:
    """One streamed completion; every event is progress."""
    await asyncio.sleep(request["arrives_s"])
    body = {
        **{"model": "model", "prompt": request["prompt"], "max_tokens": request["max_tokens"]},
        **{"temperature": 0, "ignore_eos": True, "stream": True},
    }
    num_events = 0
    async with session.post("/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            num_events += 1
            outcome.progress()
            if request["is_cancelled"] and num_events > request["max_tokens"] // 2:
                outcome.cancelled += 1
                return
    outcome.finished += 1
    outcome.num_tokens += num_events


async def watch(port: int, requests: list[dict[str, Any]], outcome: Outcome, silence_s: float) -> None:
    """Send everything; raise TimeoutError where nothing arrives for `silence_s` seconds."""
    outcome.last_progress = time.monotonic()
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", timeout=timeout, connector=connector) as session:
        tasks = [asyncio.create_task(send(session, request, outcome)) for request in requests]
        while not all(task.done() for task in tasks):
            await asyncio.wait(tasks, timeout=1, return_when=asyncio.FIRST_EXCEPTION)
            if any(task.done() and task.exception() for task in tasks):
                break
            if time.monotonic() - outcome.last_progress > silence_s:
                raise TimeoutError(f"no event for {silence_s:.0f} s")
        for task in tasks:
            if task.done():
                task.result()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plugin", required=True, help="interpreter with vLLM 0.25.1 and this package")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--comm", default="ag_rs", choices=["ag_rs", "a2a"])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--long", type=int, default=16, help="how many of them have 100,000 tokens")
    parser.add_argument("--silence", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-layers", type=int, default=32)
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    kind = replace(KINDS["plugin-dcp2"], comm=arguments.comm, interleave=INTERLEAVE, prefix_caching=True)
    outcome, error = Outcome(), None
    with tempfile.TemporaryDirectory() as directory:
        model = make_model(Path(directory) / "model", num_layers=arguments.num_layers)
        flags = [
            "--max-model-len",
            "135000",
            "--kv-cache-memory-bytes",
            str(1 << 30),
            "--gpu-memory-utilization",
            "0.15",
        ]
        requests = plan_requests(arguments.requests, arguments.long, arguments.seed)
        with running({"hang-watch": kind}, {True: arguments.plugin}, model, flags, arguments.out.parent) as servers:
            if not servers:
                return 1
            begin = time.monotonic()
            port = int(servers["hang-watch"].command[-1])
            try:
                asyncio.run(watch(port, requests, outcome, arguments.silence))
            except (TimeoutError, aiohttp.ClientError) as caught:
                error = repr(caught)
            seconds = time.monotonic() - begin
    report = {"command": sys.argv, "seconds": round(seconds, 1), "error": error, **vars(outcome)}
    report["prompt_lengths"] = [len(request["prompt"]) for request in requests]
    arguments.out.write_text(json.dumps(report) + "\n")
    print({name: value for name, value in report.items() if name != "prompt_lengths"})
    return int(error is not None or outcome.finished + outcome.cancelled != len(requests))


if __name__ == "__main__":
    sys.exit(main())
