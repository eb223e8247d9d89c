# SPDX-License-Identifier: Apache-2.0
"""What is asked of engines, and the verdict on their answers."""

from __future__ import annotations

from dataclasses import replace

import probe
import pytest
from cases import CASES, REPEATED, case_named, cases_for, required_hits, without_plugin, work
from engines import Run
from probe import judge
from releases import known_releases

LFM2 = CASES[0]
FINGERPRINT = (
    "plugin on vLLM 9 (20 patches, fingerprint 0a1b2c), engine core: DCP size 2, interleave 1; "
    "attention sharded: block 272, effective 544, 2 layers"
)


def answers(hits: list[int], shift: float = 0.0, warm_shift: float = 0.0, log: str = FINGERPRINT) -> Run:
    """What an engine says; every log-probability is off by `shift`, those of repeats by `warm_shift` more."""
    phases = []
    for number, phase in enumerate(work()):
        moved = shift + (warm_shift if number == 3 else 0.0)
        phases.append(
            [
                {
                    "prompt_logprobs": [],
                    "tokens": [7, 8],
                    "logprobs": [-1.0 + moved, -2.0 + moved],
                    "num_cached_tokens": hits[index] if number == 3 else 0,
                }
                for index, _ in enumerate(phase["prompts"])
            ]
        )
    return Run(phases, log)


HITS = required_hits(LFM2, "0.25.1", 272)
ORACLE = answers([0, 0, 0, 0], log="")


def test_hits_are_whole_scheduler_blocks_before_029_and_stocks_own_since() -> None:
    """The figures of TARGETS.md, section 5.4."""
    assert HITS == [1088, 1632, 2720, 4896]
    assert required_hits(LFM2, "0.28.0", 272) == HITS
    assert required_hits(LFM2, "0.29.0", 272) == [1360, 1632, 2992, 4896]


def test_a_prompt_of_a_whole_number_of_blocks_computes_its_last_token_again() -> None:
    assert required_hits(LFM2, "0.25.1", 272, [544, 545, 1632]) == [0, 544, 1088]


@pytest.mark.parametrize("version", known_releases())
def test_every_known_release_has_a_case_and_a_number_of_hits(version: str) -> None:
    assert cases_for(version)
    required = [required_hits(case, version, 272) for case in cases_for(version)]
    assert all(required[0])
    assert all(len(hits) == len(REPEATED) for hits in required)


def test_engines_that_agree_pass() -> None:
    found = judge(LFM2, "0.25.1", answers(HITS, 1e-5), ORACLE)
    assert found["verdict"] == probe.PASSED, found["detail"]
    assert found["numbers"]["largest"] == pytest.approx(1e-5)
    assert found["numbers"]["hits"] == HITS


@pytest.mark.parametrize(
    ("ours", "theirs", "sentence"),
    [
        (answers(HITS, 1e-3), ORACLE, "mean difference 0.001 above"),
        (answers(HITS, 0.5), ORACLE, "largest difference 0.5 above"),
        (answers(HITS, warm_shift=0.1), ORACLE, "warm answers differ"),
        (answers([1088, 1632, 0, 4896]), ORACLE, "prefix hits"),
        (answers(HITS, log=""), ORACLE, "fingerprints [], one expected"),
        (answers(HITS, log="fingerprint 0a1b2c)"), ORACLE, "did not say its block size"),
        (answers(HITS, log=FINGERPRINT.replace("block 272", "block 288")), ORACLE, "[1152, 1152, 2880, 4608] expected"),
        (answers(HITS, log=FINGERPRINT + FINGERPRINT.replace("0a1b2c", "ffffff")), ORACLE, "one expected"),
        (answers(HITS), answers(HITS), "the engine without DCP mentions the plugin"),
    ],
    ids=["mean", "largest", "warm", "hits", "silent", "no-block", "other-block", "two-fingerprints", "oracle"],
)
def test_each_fault_is_named(ours: Run, theirs: Run, sentence: str) -> None:
    found = judge(LFM2, "0.25.1", ours, theirs)
    assert found["verdict"] == probe.FAILED
    assert sentence in found["detail"]


def test_more_hits_than_required_are_welcome() -> None:
    assert judge(LFM2, "0.25.1", answers([hit + 272 for hit in HITS]), ORACLE)["verdict"] == probe.PASSED


NAN = replace(
    ORACLE,
    phases=[[{**ORACLE.phases[0][0], "logprobs": [float("nan")] * 2}, *ORACLE.phases[0][1:]], *ORACLE.phases[1:]],
)


def test_what_stock_answers_with_nan_is_left_out_where_stock_is_known_for_it() -> None:
    gdn = case_named("qwen3-next")
    found = judge(gdn, "0.24.0", answers(HITS), NAN)
    assert found["verdict"] == probe.PASSED, found["detail"]
    assert found["numbers"]["stock_nan"] == 1
    with pytest.raises(AssertionError, match="NaN"):
        judge(gdn, "0.25.1", answers(HITS), NAN)


def test_nan_at_dcp_2_is_a_fault() -> None:
    found = judge(case_named("qwen3-next"), "0.24.0", NAN, ORACLE)
    assert found["verdict"] == probe.FAILED
    assert "1 requests answered with NaN at DCP 2" in found["detail"]


class Attempted:
    """Engines of which the next attempt ends like this."""

    def __init__(self, code: int, log: str) -> None:
        self.result = (code, log, None)

    def attempt(self, engine: object, work: object) -> tuple[int, str, None]:
        return self.result


BEGINNING = "(Worker pid=7) ERROR 11-29 18:30:33 [core.py:1136]"
REFUSED = (
    f"{BEGINNING} AssertionError: requires attention implementations to return\n"
    f"{BEGINNING} the softmax LSE during decode"
)


@pytest.mark.parametrize(
    ("code", "log", "verdict"),
    [
        (1, REFUSED, probe.PASSED),
        (0, REFUSED, probe.FAILED),
        (124, REFUSED, probe.FAILED),
        (1, "ImportError", probe.FAILED),
        (1, REFUSED + FINGERPRINT, probe.FAILED),
    ],
    ids=["stock-refuses", "it-ran", "it-hung", "another-error", "the-plugin-was-there"],
)
def test_a_refusal_counts_in_stocks_own_words_alone(code: int, log: str, verdict: str) -> None:
    assert probe.refuse("0.25.1", Attempted(code, log))["verdict"] == verdict  # type: ignore[arg-type]


def test_a_failure_tells_the_exceptions_first() -> None:
    log = f"{BEGINNING} ValueError: no cores\n" * 2 + "x\n" * 2000
    assert probe.causes(log).startswith("ValueError: no cores\n...\nx")


def test_without_the_plugin_the_engine_is_the_same_otherwise() -> None:
    engine = without_plugin(LFM2.engine)
    assert dict(engine.environment).keys() == {"VLLM_PLUGINS", "VLLM_CPU_OMP_THREADS_BIND"}
    assert replace(engine, environment=()) == LFM2.engine


def test_a_release_is_asked_for_blocks_that_its_cpu_attention_takes() -> None:
    assert [case_named("lfm2").engine_of(release).block_size for release in ("0.28.0", "0.29.0")] == [272, 288]
    assert case_named("llama").engine_of("0.32.0").block_size is None
