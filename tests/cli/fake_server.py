# SPDX-License-Identifier: Apache-2.0
"""An OpenAI-compatible server without a model, run as a subprocess by the tests.

Behaviour is chosen by flags that the tests put into the command; all others, vLLM's own, are ignored.
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
parser.add_argument("-dcp", type=int, default=1)
parser.add_argument("-tp", type=int, default=1)
parser.add_argument("--fail", help="end at once with this line in the log")
parser.add_argument("--never-ready", action="store_true")
parser.add_argument("--stubborn", action="store_true", help="ignore SIGTERM, as does a child")
parser.add_argument("--shift", type=float, default=0.0, help="what DCP adds to every log-probability")
parser.add_argument("--shift-from", type=int, default=0, help="the first position that DCP shifts")
parser.add_argument("--noise", type=float, default=0.0, help="what decoding adds to every log-probability")
parser.add_argument("--tp1-shift", type=float, default=0.0, help="what TP 1 adds to every log-probability")
parser.add_argument("--tp1-fails", action="store_true", help="TP 1 ends at once")
parser.add_argument("--flat", action="store_true", help="log-probabilities that do not depend on the context")
parser.add_argument("--nan", choices=("null", "refused"), help="what DCP makes of prompts of 500 tokens and more")
parser.add_argument("--oracle-nan", action="store_true", help="the same without DCP")
parser.add_argument("--forgets", action="store_true", help="DCP recalls nothing")
parser.add_argument("--end-after", type=int, help="requests that DCP answers before the server ends")
parser.add_argument("--hang-after", type=int, help="requests that DCP answers before it answers no more")
parser.add_argument("--refuse", action="store_true", help="answer completions with status 500")
parser.add_argument("--map", help="a file to keep mapped")
options, _ = parser.parse_known_args()

print("INFO 11-29 15:18:01 [fake.py:1] starting up", flush=True)
if options.tp1_fails and options.tp == 1:
    sys.exit(4)
if options.fail:
    print(f"(EngineCore pid=1) ERROR 11-29 15:18:01 [core.py:1] {options.fail}", flush=True)
    sys.exit(3)
if options.stubborn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"])
if options.map:
    descriptor = os.open(options.map, os.O_RDWR)
    mapping = mmap.mmap(descriptor, 4096)
print("INFO 11-29 15:18:01 [kv_cache_utils.py:1] GPU KV cache size: 1,234 tokens", flush=True)

IS_DCP = options.dcp > 1
if IS_DCP:
    print(
        "INFO 11-29 15:18:01 [report.py:1] vllm-dcp-hybrid 0.1.0 on vLLM 9.9.9 (1 patch, fingerprint 0), engine "
        "core: DCP size 2, interleave 1; attention sharded: block 128, effective 256, 2 layers",
        flush=True,
    )
num_requests = 0
NOT_A_NUMBER = float("nan")


def log_probabilities(tokens: list[int], prompt: list[int]) -> list[float]:
    """Of each token after all before it: any function of these."""
    context = tokens if options.flat else itertools.accumulate(tokens)
    values = [-0.5 - total * 37 % 101 / 50 for total in context]
    if len(prompt) >= 500 and (options.nan if IS_DCP else options.oracle_nan):
        return [NOT_A_NUMBER] * len(values)
    shift = options.shift if IS_DCP else options.tp1_shift if options.tp == 1 else 0.0
    return [value + shift * (place >= options.shift_from) for place, value in enumerate(values)]


def choice(index: int, prompt: list[int], body: dict[str, Any]) -> dict[str, Any]:
    generated = [100 + place for place in range(body["max_tokens"])]
    if prompt[-1] == 5 and not (IS_DCP and options.forgets):  # a recall model's question
        fact = next(place for place in range(len(prompt)) if prompt[place : place + 3] == [2, *prompt[-3:-1]])
        generated = [*prompt[fact + 4 : fact + 7], 1]
    values = log_probabilities([*prompt, *generated], prompt)
    scored = [None, *({str(prompt[place]): {"logprob": values[place]}} for place in range(1, len(prompt)))]
    decoded = [value + options.noise for value in values[len(prompt) :]]
    return {
        "index": index,
        "text": "",
        "token_ids": generated,
        "logprobs": {
            "top_logprobs": [
                {f"token_id:{token}": value, "token_id:7": value - 1.5}
                for token, value in zip(generated, decoded, strict=True)
            ]
        },
        "prompt_logprobs": scored if "prompt_logprobs" in body else None,
    }


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass

    def answer(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        if self.path == "/metrics":
            hits = 64.0 * num_requests
            self.answer(200, f'# HELP x\nvllm:prefix_cache_hits_total{{engine="0"}} {hits}\n'.encode())
        else:
            self.answer(503 if options.never_ready else 200, b"")

    def do_POST(self) -> None:
        global num_requests
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        num_requests += 1
        if IS_DCP and options.end_after is not None and num_requests > options.end_after:
            print("RuntimeError: a rank is gone", flush=True)
            os._exit(1)
        if IS_DCP and options.hang_after is not None and num_requests > options.hang_after:
            time.sleep(600)
        if options.refuse:
            self.answer(500, b"no thank you")
        elif body.get("stream"):
            events = [json.dumps({"choices": [{"text": text}]}) for text in ("he", "llo\n", "")]
            self.answer(200, "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]).encode())
        else:
            choices = [choice(index, prompt, body) for index, prompt in enumerate(body["prompt"])]
            content = json.dumps({"choices": choices})
            if "NaN" in content and options.nan == "refused":
                self.answer(400, b"Out of range float values are not JSON compliant: nan")
            else:
                self.answer(200, content.replace("NaN", "null").encode())


ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()
