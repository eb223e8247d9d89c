# SPDX-License-Identifier: Apache-2.0
"""Every recall model, all 500 prompts, DCP 2 and 4, interleave 1, 16 and B: ``python tests/recall/sweep.py OUT_DIR``.

Runs one engine after the other, and leaves out those whose answers are in OUT_DIR already; then prints a table.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.with_name("e2e")))

import task
from engines import Engine, Run
from recall_engines import INTERLEAVES, KINDS, RecallEngines, judge, recall_engine, recall_phases

PROMPTS = task.make_prompts(500, seed=7, num_questions=4)


def combinations(kinds: list[str]) -> dict[str, Engine]:
    """Name -> engine; each kind begins with its oracle."""
    engines: dict[str, Engine] = {}
    for kind in kinds:
        engines[f"{kind}-T1N1"] = recall_engine(kind, tp=1)
        for size in (2, 4):
            for interleave in INTERLEAVES:
                engines[f"{kind}-T{size}N{size}-I{interleave}"] = recall_engine(kind, size, size, interleave)
    return engines


def answers(name: str, engine: Engine, directory: Path) -> tuple[Run, float]:
    """The engine's answers, from OUT_DIR where they are there, and how long it took, seconds."""
    kept = directory / f"{name}.json"
    if not kept.is_file():
        begin = time.monotonic()
        run = RecallEngines(directory).run(engine, recall_phases(PROMPTS))
        kept.write_text(json.dumps({"phases": run.phases, "seconds": time.monotonic() - begin}))
    content = json.loads(kept.read_text())
    return Run(content["phases"], log=""), content["seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kind", action="append", choices=KINDS, help="of all kinds, this one only")
    parser.add_argument("--only", action="append", help="of all combinations, this one only, as the table names it")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    engines = combinations(options.kind or KINDS)
    verdicts = {}
    for name, engine in engines.items():
        if options.only and name not in options.only and "N1" not in name:
            continue
        run, seconds = answers(name, engine, options.out)
        oracle, _ = answers(f"{engine.kind}-T1N1", engines[f"{engine.kind}-T1N1"], options.out)
        verdicts[name] = {**asdict(judge(run, oracle, PROMPTS)), "seconds": round(seconds)}
        print(name, json.dumps(verdicts[name]), flush=True)
    (options.out / "verdicts.json").write_text(json.dumps(verdicts, indent=2) + "\n")


if __name__ == "__main__":
    main()
