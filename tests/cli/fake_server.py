# SPDX-License-Identifier: Apache-2.0
"""An OpenAI-compatible server without a model, run as a subprocess by the tests.

Behaviour is chosen by flags that the tests put into the command; all others, vLLM's own, are ignored.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
parser.add_argument("-dcp", type=int, default=1)
parser.add_argument("--fail", help="end at once with this line in the log")
parser.add_argument("--never-ready", action="store_true")
parser.add_argument("--stubborn", action="store_true", help="ignore SIGTERM, as does a child")
parser.add_argument("--shift", type=float, default=0.0, help="what DCP adds to every log-probability")
parser.add_argument("--refuse", action="store_true", help="answer completions with status 500")
parser.add_argument("--map", help="a file to keep mapped")
options, _ = parser.parse_known_args()

print("INFO 11-29 15:18:01 [fake.py:1] starting up", flush=True)
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

SHIFT = options.shift if options.dcp > 1 else 0.0
num_requests = 0


def choice(index: int, prompt: list[int], body: dict[str, Any]) -> dict[str, Any]:
    count = body["max_tokens"]
    tops = [{f"token_id:{100 + place}": -0.5 + SHIFT, "token_id:7": -2.0} for place in range(count)]
    scored = [None, *({str(token): {"logprob": -3.0 + SHIFT}} for token in prompt[1:])]
    return {
        "index": index,
        "text": "",
        "token_ids": [100 + place for place in range(count)],
        "logprobs": {"top_logprobs": tops},
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
        if options.refuse:
            self.answer(500, b"no thank you")
        elif body.get("stream"):
            events = [json.dumps({"choices": [{"text": text}]}) for text in ("he", "llo\n", "")]
            self.answer(200, "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]).encode())
        else:
            choices = [choice(index, prompt, body) for index, prompt in enumerate(body["prompt"])]
            self.answer(200, json.dumps({"choices": choices}).encode())


ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()
