# SPDX-License-Identifier: Apache-2.0
"""Servers under load, side by side on the same two GPUs: the plugin at DCP 2 and 1, and stock 0.26.0 at DCP 2.

    PYTHON server.py --plugin PYTHON --stock PYTHON --out results.json

Run by an interpreter with vLLM 0.25.1 and this package (the load is `vllm bench serve`, random dataset); --stock is one
with 0.26.0. All servers stay up with a KV cache of the same bytes each, and are loaded in turn, round by round; those
whose turn it is not are stopped (SIGSTOP). But for the first, each workload asks for about three times the KV tokens
that DCP 1 has: DCP 1 runs out of them.

Servers send tokens in clumps (--stream-interval): where the CPU is slow, handling one event per token takes longer than
the GPUs take for the token, and every server ends up equally fast.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from models import make_model, num_parameters
from servers import KINDS, alone, kv_tokens, running

from vllm_dcp_hybrid.cli.server import Server

KEPT = (
    *("duration", "completed", "failed", "total_input_tokens", "total_output_tokens"),
    *("output_throughput", "total_token_throughput"),
    *("mean_tpot_ms", "median_tpot_ms", "p99_tpot_ms", "mean_ttft_ms", "median_ttft_ms"),
)


@dataclass(frozen=True)
class Workload:
    """`num_prompts` requests of random tokens, all sent at once."""

    context: int
    num_prompts: int
    output_len: int

    @property
    def name(self) -> str:
        return f"{self.context}x{self.num_prompts}"


def bench(workload: Workload, port: int, model: Path, seed: int) -> dict[str, Any]:
    """One run of `vllm bench serve`, in this process: starting it anew takes longer than most runs."""
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    arguments = parser.parse_args(
        [
            *("--backend", "openai", "--port", str(port), "--model", "model", "--tokenizer", str(model)),
            *("--dataset-name", "random", "--random-input-len", str(workload.context)),
            *("--random-output-len", str(workload.output_len), "--num-prompts", str(workload.num_prompts)),
            *("--ignore-eos", "--temperature", "0", "--seed", str(seed), "--disable-tqdm"),
            *("--ready-check-timeout-sec", "0"),
        ]
    )
    kept_requests()
    result = asyncio.run(serve.main_async(arguments))
    return {name: result[name] for name in KEPT}


@functools.cache
def kept_requests() -> None:
    """Let `vllm bench` draw a seed's requests once: every server gets the same, and drawing takes longer than a run."""
    from vllm.benchmarks import serve

    draw, drawn = serve.get_samples, {}

    def get_samples(arguments: argparse.Namespace, tokenizer: Any) -> list[Any]:
        key = (arguments.random_input_len, arguments.random_output_len, arguments.num_prompts, arguments.seed)
        if key not in drawn:
            drawn[key] = draw(arguments, tokenizer)
        return list(drawn[key])

    serve.get_samples = get_samples


def cpu_seconds(server: Server) -> dict[str, float]:
    """CPU time so far of each process of a server, seconds by the process's name and number in the listing."""
    listing = subprocess.run(
        ["ps", "-o", "cputimes=,args=", "-g", str(server.process_group)], capture_output=True, text=True, check=True
    )
    found: dict[str, float] = {}
    for line in listing.stdout.splitlines():
        seconds, name = line.split(maxsplit=1)
        name = name if name.startswith("VLLM") else "API server" if " serve " in name else "other"
        found[name] = found.get(name, 0.0) + float(seconds)
    return found


def measure(servers: Mapping[str, Server], name: str, workload: Workload, model: Path, seed: int) -> dict[str, Any]:
    """One run on one server, with the share of a core that each of its processes took."""
    server = servers[name]
    with alone(servers, name):
        before = cpu_seconds(server)
        result = bench(workload, int(server.command[-1]), model, seed)
        after = cpu_seconds(server)
    busy = {process: round((after[process] - before.get(process, 0.0)) / result["duration"], 2) for process in after}
    return {**result, "cores_busy": busy}


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the rounds, and the rounds of the two figures that count."""
    summary = {name: round(statistics.median(run[name] for run in runs), 3) for name in KEPT}
    summary["rounds_output_throughput"] = [round(run["output_throughput"], 2) for run in runs]
    summary["cores_busy"] = [run["cores_busy"] for run in runs]
    summary["rounds_median_tpot_ms"] = [round(run["median_tpot_ms"], 3) for run in runs]
    return summary


def ratios(of_servers: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Throughput and TPOT of the first server over those of each other one: median, smallest and largest round."""
    (_, first), *others = of_servers.items()
    found: dict[str, Any] = {}
    for name, other in others:
        found[name] = {}
        for figure in ("output_throughput", "median_tpot_ms"):
            rounds = zip(first[f"rounds_{figure}"], other[f"rounds_{figure}"], strict=True)
            each = sorted(a / b for a, b in rounds if b > 0)
            if not each:
                continue
            found[name][figure] = [round(value, 3) for value in (statistics.median(each), each[0], each[-1])]
    return found


def describe(workload: Workload, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """What the report says of a workload."""
    servers = {name: summarise(of_server) for name, of_server in runs.items()}
    return {"workload": asdict(workload), "servers": servers, "ratio_of_the_first_to": ratios(servers)}


def parse(text: str) -> Workload:
    """CONTEXT:PROMPTS:OUTPUT."""
    return Workload(*map(int, text.split(":")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plugin", required=True, help="interpreter with vLLM 0.25.1 and this package")
    parser.add_argument("--stock", required=True, help="interpreter with vLLM 0.26.0")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--servers", nargs="+", choices=KINDS, default=list(KINDS)[:3])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stream-interval", type=int, default=32, help="tokens per event of a response")
    parser.add_argument("--num-layers", type=int, default=32)
    parser.add_argument("--kv-mib", type=int, default=640, help="KV cache of each rank, MiB")
    parser.add_argument(
        "--workload",
        type=parse,
        action="append",
        metavar="CONTEXT:PROMPTS:OUTPUT",
        help="default: one that fits DCP 1, then five that do not",
    )
    parser.add_argument("--warm-up", type=parse, default=Workload(1024, 64, 128), metavar="CONTEXT:PROMPTS:OUTPUT")
    parser.add_argument("--extra", nargs=argparse.REMAINDER, default=[], help="more arguments of vllm serve")
    arguments = parser.parse_args()
    workloads = arguments.workload or [
        *(Workload(32768, 4, 192), Workload(4096, 120, 192), Workload(32768, 15, 192), Workload(131072, 4, 192)),
        *(Workload(4096, 120, 768), Workload(32768, 15, 768)),
    ]
    logs = arguments.out.parent
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        model = make_model(Path(directory) / "model", num_layers=arguments.num_layers)
        config = json.loads((model / "config.json").read_text())
        flags = [
            *("--max-model-len", "135000", "--kv-cache-memory-bytes", str(arguments.kv_mib << 20)),
            *("--gpu-memory-utilization", "0.15", "--no-enable-prefix-caching"),
            *("--stream-interval", str(arguments.stream_interval), *arguments.extra),
        ]
        kinds = {name: KINDS[name] for name in arguments.servers}
        report: dict[str, Any] = {"command": sys.argv, "model": config, "num_parameters": num_parameters(config)}
        pythons = {True: arguments.plugin, False: arguments.stock}
        with running(kinds, pythons, model, flags, logs) as servers:
            kinds = {name: kinds[name] for name in servers}
            report["kv_tokens"] = {name: kv_tokens(logs / f"{name}.log") for name in kinds}
            print("KV tokens", report["kv_tokens"], flush=True)
            for name in kinds:
                measure(servers, name, arguments.warm_up, model, seed=99)
            runs: dict[Workload, dict[str, list[dict[str, Any]]]] = {}
            for seed, workload in enumerate(workloads * arguments.rounds):
                of_workload = runs.setdefault(workload, {name: [] for name in kinds})
                for name in kinds:
                    of_workload[name].append(measure(servers, name, workload, model, seed))
                    print("RUN", workload.name, name, json.dumps(of_workload[name][-1]), flush=True)
                report["workloads"] = [describe(each, of_servers) for each, of_servers in runs.items()]
                arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
