# SPDX-License-Identifier: Apache-2.0
"""Runs one case with the vLLM of this interpreter: ``python probe.py CASE RELEASE OUT.json``.

Started by the matrix in the environment of a release; the answer is ``{"verdict", "numbers", "detail"}``.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "e2e"))

from cases import REFUSAL, STOCK_REFUSALS, Case, case_named, refused_case, required_hits, without_plugin, work
from engines import Engines, Run, answered, difference, has_nan, without_dcp

from vllm_dcp_hybrid.patching import is_among

PASSED, FAILED = "passed", "failed"
_LAST_CHARACTERS = 1500
# (EngineCore pid=12) ERROR 11-29 18:30:33 [core.py:1136]
_BEGINNING = re.compile(r"^(?:\([^)]*pid=\d+\) )?(?:[A-Z]+ \d\d-\d\d [\d:]+ \[[^\]]*\] ?)?")
# Of the engine core and of each worker; the core says nothing where all layers are attention.
_BLOCK = re.compile(r"attention sharded: block (\d+), ")
_EXCEPTION = re.compile(r"\b[A-Za-z]+(?:Error|Exception): ")


def compare(case: Case, release: str, engines: Engines) -> dict[str, Any]:
    """DCP against no DCP: answers, prefix hits, warm answers, and one fingerprint in every process."""
    ours = engines.run(case.engine_of(release), work())
    theirs = engines.run(without_dcp(case.engine, block_size=None), work())
    return judge(case, release, ours, theirs)


def judge(case: Case, release: str, ours: Run, theirs: Run) -> dict[str, Any]:
    """The verdict on two engines' answers."""
    compared = flat(ours), flat(theirs)
    if is_among(release, case.stock_nan):
        compared = answered(*compared)
    nan = sum(map(has_nan, flat(ours)))
    if nan:
        return outcome(f"{nan} requests answered with NaN at DCP 2", {"nan": nan})
    gap = difference(*compared)
    warm = difference(ours.phases[2], ours.phases[3])
    hits = [request["num_cached_tokens"] for request in ours.phases[3]]
    block = _BLOCK.search(ours.log)
    block_size = int(block[1]) if block else 0
    required = required_hits(case, release, block_size) if block else []
    fingerprints = sorted(set(re.findall(r"fingerprint (\w+)\)", ours.log)))
    wrong = [
        f"mean difference {gap.mean:.2g} above {case.mean:g}" if gap.mean > case.mean else "",
        f"largest difference {gap.largest:.2g} above {case.largest:g}" if gap.largest > case.largest else "",
        f"warm answers differ from cold ones by {warm.largest:.2g}" if warm.largest > case.largest else "",
        "the engine did not say its block size" if not block else "",
        f"prefix hits {hits}, at least {required} expected" if block and fewer(hits, required) else "",
        f"fingerprints {fingerprints}, one expected" if len(fingerprints) != 1 else "",
        "the engine without DCP mentions the plugin" if "fingerprint" in theirs.log else "",
    ]
    numbers = {
        "mean": gap.mean,
        "largest": gap.largest,
        "positions": gap.num_positions,
        "stock_nan": len(flat(ours)) - len(compared[0]),
        "warm_largest": warm.largest,
        "block_size": block_size,
        "hits": hits,
        "required_hits": required,
    }
    return outcome("; ".join(filter(None, wrong)), numbers)


def flat(run: Run) -> list[dict[str, Any]]:
    """All requests of a run."""
    return [request for phase in run.phases for request in phase]


def fewer(hits: list[int], required: list[int]) -> bool:
    return any(hit < least for hit, least in zip(hits, required, strict=True))


def refuse(release: str, engines: Engines) -> dict[str, Any]:
    """Without the plugin DCP 2 must end in stock's own words."""
    code, log, _ = engines.attempt(without_plugin(refused_case(release).engine_of(release)), work()[1:2])
    said = plain_text(log)
    words = [text for text in STOCK_REFUSALS if text in said]
    wrong = ""
    if code in (0, 124):
        wrong = f"the engine ended with {code}: it was not refused"
    elif not words:
        wrong = f"not in stock's words: {causes(log)}"
    elif "fingerprint" in log:
        wrong = "the plugin spoke although it was filtered out"
    return outcome(wrong, {"words": words[0] if words else ""})


def plain_text(log: str) -> str:
    """A log as one line, without the beginnings of its lines: messages run over several."""
    return " ".join(_BEGINNING.sub("", line).strip() for line in log.splitlines())


def causes(log: str) -> str:
    """The exceptions of a log, each once, and its end."""
    lines = dict.fromkeys(_BEGINNING.sub("", line).strip() for line in log.splitlines() if _EXCEPTION.search(line))
    return "\n".join([*lines, "...", log[-_LAST_CHARACTERS:]])


def outcome(wrong: str, numbers: dict[str, Any]) -> dict[str, Any]:
    return {"verdict": FAILED if wrong else PASSED, "numbers": numbers, "detail": wrong}


def main() -> None:
    name, release, out = sys.argv[1:]
    # A matrix that is interrupted ends its engines: through `finally`.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="vllm-dcp-hybrid-matrix-") as directory:
        engines = Engines(Path(directory))
        try:
            answer = refuse(release, engines) if name == REFUSAL else compare(case_named(name), release, engines)
        except AssertionError as error:
            logs = [log.read_text(errors="replace") for log in sorted(Path(directory).glob("*.log"))]
            answer = outcome(causes("\n".join([*logs, str(error)])), {})
        for log in Path(directory).glob("*.log"):
            shutil.copyfile(log, Path(out).with_name(f"{name}.{log.name}"))
    Path(out).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
