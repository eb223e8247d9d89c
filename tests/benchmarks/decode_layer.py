# SPDX-License-Identifier: Apache-2.0
"""One attention layer's decode step at TP 2 DCP 2, with real collectives over two GPUs: the plugin against upstream.

    python decode_layer.py --plugin PYTHON --stock PYTHON --out results.json

PYTHON is an interpreter with vLLM 0.25.1 and this package, and one with stock 0.26.0. Both sides stay up, hold the
same tokens under the same page tables, and are asked in turn (A B A B ...) on the same two GPUs. Timed: `forward` of
the attention layer (query gather, attention, exchange), 8 layers with a cache of their own each per run; not the KV
write, not the metadata.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from models import make_model
from sides import Side, SideFailed

RANK_SCRIPT = Path(__file__).with_name("decode_layer_rank.py")


def list_cases(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Every point asked for, short contexts first."""
    points = itertools.product(arguments.context, arguments.batch, arguments.comm, arguments.mode)
    return [
        {"batch": batch, "context": context, "comm": comm, "is_graph": mode == "graph", "seed": number}
        for number, (context, batch, comm, mode) in enumerate(points)
    ]


def measure(sides: dict[str, Side], case: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """All rounds of one case on all sides, in turn."""
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for round_number in range(arguments.rounds):
        for name, side in sides.items():
            is_first = round_number == 0 and case["context"] == min(arguments.context)
            with_kernels = arguments.kernels and is_first and not case["is_graph"]
            request = {"case": case, "repeats": arguments.repeats, "with_kernels": with_kernels}
            answers[name].append(side.ask(request))
    return {"case": case, "sides": {name: summarise(of_side) for name, of_side in answers.items()}}


def summarise(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Median over the rounds' medians, and their spread."""
    medians = [answer["median_us"] for answer in answers]
    return {
        "median_us": round(statistics.median(medians), 2),
        "rounds_us": [round(value, 2) for value in medians],
        "min_us": round(min(answer["min_us"] for answer in answers), 2),
        "has_nan": any(answer["has_nan"] for answer in answers),
        "sample": answers[0]["sample"],
        "kernels": answers[0].get("kernels"),
    }


def compare(result: dict[str, Any]) -> None:
    """Add ratios of the first side to the second, round by round, and how far their outputs are apart."""
    one, two = result["sides"].values()
    ratios = sorted(a / b for a, b in zip(one["rounds_us"], two["rounds_us"], strict=True))
    result["ratio"] = round(one["median_us"] / two["median_us"], 4)
    result["ratio_spread"] = [round(ratios[0], 4), round(ratios[-1], 4)]
    samples = zip(one.pop("sample"), two.pop("sample"), strict=True)
    result["largest_difference"] = max(abs(a - b) for a, b in samples)


def line_of(result: dict[str, Any]) -> str:
    """The result in one line."""
    case = result["case"]
    times = "  ".join(f"{name} {side['median_us']:8.1f} us" for name, side in result["sides"].items())
    how = "graph" if case["is_graph"] else "eager"
    spread = "-".join(f"{value:.2f}" for value in result["ratio_spread"])
    return (
        f"{case['batch']:3} x {case['context']:6} {case['comm']:5} {how}  {times}  ratio {result['ratio']:.3f} "
        f"({spread})  differ by {result['largest_difference']:.4f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plugin", required=True, help="interpreter with vLLM 0.25.1 and this package")
    parser.add_argument("--stock", required=True, help="interpreter with vLLM 0.26.0")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--context", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--comm", nargs="+", default=["ag_rs", "a2a"])
    parser.add_argument("--mode", nargs="+", choices=["graph", "eager"], default=["graph", "eager"])
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=272)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--kernels", action="store_true", help="list each layer's kernels too")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no further case begins")
    arguments = parser.parse_args()
    begin = time.monotonic()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        model = make_model(Path(directory) / "model", num_layers=4, head_size=arguments.head_size)
        sizes = [
            *("--model", str(model), "--block-size", str(arguments.block_size)),
            *("--max-context", str(max(arguments.context)), "--max-batch", str(max(arguments.batch))),
        ]

        def start() -> dict[str, Side]:
            where = arguments.out.parent
            started = {
                "plugin": Side("plugin", arguments.plugin, RANK_SCRIPT, [*sizes, "--plugin"], where),
                "stock": Side("stock", arguments.stock, RANK_SCRIPT, sizes, where),
            }
            for side in started.values():
                side.wait_until_ready()
            return started

        sides = start()
        report: dict[str, Any] = {"command": sys.argv, "sides": {name: side.about for name, side in sides.items()}}
        report["results"], report["failures"] = [], []
        for case in list_cases(arguments):
            if time.monotonic() - begin > arguments.limit:
                report["failures"].append({"case": case, "error": "not run: out of time"})
                continue
            try:
                result = measure(sides, case, arguments)
            except SideFailed as error:
                print(case, error, flush=True)
                report["failures"].append({"case": case, "error": str(error)})
                for side in sides.values():
                    side.stop()
                sides = start()
                continue
            compare(result)
            print(line_of(result), flush=True)
            report["results"].append(result)
            arguments.out.write_text(json.dumps(report, indent=1) + "\n")
        for side in sides.values():
            side.stop()


if __name__ == "__main__":
    main()
