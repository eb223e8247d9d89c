# SPDX-License-Identifier: Apache-2.0
"""`verify`: refusals, verdicts, reports, engines that fail; at the end the real one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recall_example import RECALL as LONGER_RECALL

from vllm_dcp_hybrid import tiny_models
from vllm_dcp_hybrid.cli import diagnosis
from vllm_dcp_hybrid.cli.installed import InstalledVLLM
from vllm_dcp_hybrid.cli.machine import MIB, Machine
from vllm_dcp_hybrid.cli.session import CannotRun
from vllm_dcp_hybrid.cli.verify.engine import ServeOptions, effective_block_in, whose_dcp
from vllm_dcp_hybrid.tiny_models.architectures import TinyModel

FAKE_SERVER = str(Path(__file__).with_name("fake_server.py"))
RECALL_MODEL = Path(__file__).parents[1] / "assets" / "recall-lfm2"
ROOMY = Machine(num_cores=2, num_numa_nodes=1, shm_total=64 * MIB, shm_free=64 * MIB, gpus=())
SIZES = ("-tp", "2", "-dcp", "2")
RECALL = {**LONGER_RECALL, "max_length": 1024}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    config = TinyModel(kind="lfm2", num_key_value_heads=1, dtype="float32").config()
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def verify(
    run: Callable, recorded_vllm: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """Runs `verify` of `model` with servers that need none; `server` steers those, its report is in `.report`."""

    def invoke(*arguments: str, server: tuple[str, ...] = (), machine: Machine = ROOMY) -> Any:
        monkeypatch.setattr(InstalledVLLM, "serve_command", lambda self, name: [sys.executable, FAKE_SERVER, *server])
        monkeypatch.setattr(diagnosis, "this_machine", lambda: machine)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        report = tmp_path / "report.json"
        outcome = run(
            "verify", str(model), *(SIZES if "-tp" not in arguments else ()), "--json", str(report), *arguments
        )
        outcome.report = json.loads(report.read_text()) if report.is_file() else None
        return outcome

    return invoke


def processes_of(log: Path) -> list[str]:
    """Command lines of the servers whose logs lie here."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if str(log) in os.readlink(directory / "fd" / "1"):
                found.append((directory / "cmdline").read_text())
        except OSError:
            continue
    return found


def test_agreement_is_status_0_with_a_table_a_sentence_and_a_report(verify: Callable, tmp_path: Path) -> None:
    outcome = verify()
    assert outcome.status == 0, outcome.raw
    assert "RIGHT: DCP 2 of" in outcome.text
    assert "this plugin's DCP" in outcome.text
    assert "decoded, warm" in outcome.text
    assert not list(tmp_path.glob("vllm-dcp-hybrid-verify-*"))
    report = outcome.report
    assert (report["format"], report["verdict"], report["exit_status"]) == (1, "right", 0)
    assert report["sentence"].startswith("RIGHT: ")
    assert (report["tp_size"], report["dcp_size"], report["effective_block"]) == (2, 2, 256)
    assert {row["phase"] for row in report["rows"]} == {"scored", "decoded", "decoded, warm", "tail, warm"}
    assert all(row["is_within"] and row["has_reference"] for row in report["rows"])
    assert report["rows"][0]["num_compared"] == 1
    assert report["bounds"] == {"mean": 0.0005, "largest": 0.005}
    assert report["sensitivity"] > 0.1
    assert report["prefix_hits"] > 0
    assert [engine["name"] for engine in report["engines"]] == ["the engine with DCP 2", "the engine without DCP"]


def test_a_planted_difference_is_status_1_and_named(verify: Callable) -> None:
    outcome = verify(server=("--shift", "0.5"))
    assert outcome.status == 1
    assert "WRONG: DCP 2 of" in outcome.text
    assert "Run it again with --keep DIR" in outcome.text
    assert outcome.report["verdict"] == "wrong"
    assert not any(row["is_within"] for row in outcome.report["rows"])


def test_a_difference_in_long_prompts_only_is_wrong(verify: Callable) -> None:
    outcome = verify(server=("--shift", "0.5", "--shift-from", "700"))
    assert outcome.status == 1
    outside = {(row["phase"], row["num_prompt_tokens"]) for row in outcome.report["rows"] if not row["is_within"]}
    assert outside
    assert all(length > 700 - 64 for _, length in outside)


def test_differences_within_the_oracles_own_noise_are_right(verify: Callable) -> None:
    assert verify(server=("--shift", "0.015", "--noise", "0.02")).status == 0


def test_in_doubt_another_tensor_parallel_size_says_what_rounding_does(verify: Callable) -> None:
    outcome = verify(server=("--shift", "0.02", "--tp1-shift", "0.02"))
    assert outcome.status == 0, outcome.raw
    assert outcome.report["bounds"] == pytest.approx({"mean": 0.04, "largest": 0.06})
    assert [engine["name"] for engine in outcome.report["engines"]][2:] == ["the engine without DCP at TP 1"]
    assert " -tp 1 " in outcome.report["engines"][2]["command"]


def test_what_another_tensor_parallel_size_does_not_explain_is_wrong(verify: Callable) -> None:
    outcome = verify(server=("--shift", "0.02"))
    assert outcome.status == 1
    assert len(outcome.report["engines"]) == 3


def test_gross_differences_and_those_without_a_third_engine_are_wrong_at_once(verify: Callable) -> None:
    for arguments, shift in (((), "0.5"), (("--noise-tp", "0"), "0.02")):
        outcome = verify(*arguments, server=("--shift", shift))
        assert outcome.status == 1
        assert len(outcome.report["engines"]) == 2


def test_a_third_engine_that_cannot_run_is_said_and_changes_nothing(verify: Callable) -> None:
    outcome = verify(server=("--shift", "0.02", "--tp1-fails"))
    assert outcome.status == 1
    assert "TP 1 could not be asked what rounding does: the engine without DCP at TP 1" in outcome.text


@pytest.mark.parametrize("how", ["null", "refused"])
def test_a_number_that_is_none_is_wrong(verify: Callable, how: str) -> None:
    outcome = verify(server=("--nan", how))
    assert outcome.status == 1
    assert "are not numbers" in outcome.text
    bad = [row for row in outcome.report["rows"] if not row["is_within"]]
    assert bad
    assert all(row["largest"] is None and row["num_prompt_tokens"] >= 500 for row in bad)


def test_an_oracle_without_numbers_is_status_3(verify: Callable) -> None:
    outcome = verify(server=("--oracle-nan",))
    assert outcome.status == 3
    assert "UNCLEAR" in outcome.text
    assert outcome.report["verdict"] == "unclear"


def test_a_model_that_does_not_read_its_context_is_status_3(verify: Callable) -> None:
    outcome = verify(server=("--flat",))
    assert outcome.status == 3
    assert "a rank's lost tokens move the mean by 0.0000 only" in outcome.text


def test_without_prefix_caching_nothing_is_asked_twice(verify: Callable) -> None:
    outcome = verify("--no-prefix-caching")
    assert outcome.status == 0
    assert "answers from the cache were not tested" in outcome.text
    assert not any("warm" in row["phase"] for row in outcome.report["rows"])
    assert "--no-enable-prefix-caching" in outcome.report["engines"][0]["command"]


def test_both_engines_get_the_options_after_the_dashes(verify: Callable) -> None:
    outcome = verify("--", "--max-model-len", "2048", "--enforce-eager")
    assert outcome.status == 0
    with_dcp, without = (engine["command"] for engine in outcome.report["engines"])
    for command in (with_dcp, without):
        assert command.count("--max-model-len") == 1
        assert "--max-model-len 2048 --enforce-eager" in command
    assert "-dcp 2 --enable-plugin dcp_hybrid" in with_dcp
    assert " --enable-prefix-caching" in with_dcp
    assert "--no-enable-prefix-caching" in without
    assert "-dcp" not in without.replace("vllm-dcp", "")


def test_both_engines_run_together_if_asked(verify: Callable) -> None:
    outcome = verify("--at-once")
    assert outcome.status == 0
    assert outcome.raw.index("dcp_hybrid") > outcome.raw.index("$ python")


def test_recall_models_are_asked_for_facts(verify: Callable, model: Path) -> None:
    (model / "recall.json").write_text(json.dumps(RECALL))
    outcome = verify()
    assert outcome.status == 0, outcome.raw
    assert "Facts recalled: 48 of 48 with DCP, 48 without." in outcome.text
    assert outcome.report["recall"] == {"num_asked": 48, "num_with_dcp": 48, "num_without": 48, "num_lost": 0}


def test_a_fact_that_only_the_oracle_finds_is_wrong(verify: Callable, model: Path) -> None:
    (model / "recall.json").write_text(json.dumps(RECALL))
    outcome = verify(server=("--forgets",))
    assert outcome.status == 1
    assert "missed 48 of 48 facts" in outcome.text


def test_an_engine_that_does_not_start_is_status_2_with_its_cause_and_log(verify: Callable, tmp_path: Path) -> None:
    outcome = verify(server=("--fail", "vllm_dcp_hybrid.errors.UnplacedSpec: not like this"))
    assert outcome.status == 2
    assert "Cause: vllm_dcp_hybrid.errors.UnplacedSpec: not like this" in outcome.text
    assert outcome.report["verdict"] is None
    assert "not like this" in outcome.report["sentence"]
    assert len(list(tmp_path.glob("vllm-dcp-hybrid-verify-*/tp2-dcp2.log"))) == 1


def test_an_engine_that_dies_is_status_2_with_the_end_of_its_log(verify: Callable) -> None:
    outcome = verify(server=("--end-after", "1"))
    assert outcome.status == 2
    assert "the engine with DCP 2 did not answer" in outcome.text
    assert "RuntimeError: a rank is gone" in outcome.text


@pytest.mark.parametrize("how", [("--hang-after", "1"), ("--never-ready", "--stubborn")], ids=["asked", "starting"])
def test_an_engine_that_hangs_is_status_2_within_the_limit_and_gone(
    verify: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: tuple[str, ...]
) -> None:
    monkeypatch.setattr("vllm_dcp_hybrid.cli.server._SECONDS_TO_STOP", 1.0)
    begin = time.monotonic()
    outcome = verify("--limit", "5", server=how)
    assert outcome.status == 2
    assert time.monotonic() - begin < 30
    assert "the engine with DCP 2" in outcome.text
    assert "KV cache size: 1,234 tokens" in outcome.text
    assert not processes_of(tmp_path)


def test_no_vllm_is_status_2(run: Callable, no_vllm: None, model: Path) -> None:
    outcome = run("verify", str(model))
    assert outcome.status == 2
    assert "no vLLM is installed" in outcome.text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["-tp", "2", "-dcp", "1"], "nothing to verify"),
        (["-tp", "4", "-dcp", "3"], "size 3 is not possible"),
        (["-tp", "3", "-dcp", "3"], "does not divide the 8 query heads"),
        (["--noise-tp", "2"], "is the size of both engines"),
        (["--", "--port", "1"], "verify finds free ones"),
        (["--", "--tensor_parallel_size=4"], "give -tp to verify"),
        (["--", "--max-model-len", "32k"], "write it in digits"),
        (["--max-model-len"], "No such option"),
        (["stray"], "is no option of `vllm serve`"),
        (["--json", "/nowhere/report.json"], "there is no directory /nowhere"),
    ],
)
def test_bad_input_is_status_2_before_anything_starts(
    verify: Callable, tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    outcome = verify(*arguments)
    assert outcome.status == 2
    assert sentence in outcome.text
    assert "$ python" not in outcome.raw


def test_an_unknown_model_is_status_2(run: Callable, recorded_vllm: Path, tmp_path: Path) -> None:
    outcome = run("verify", str(tmp_path / "nothing"), *SIZES)
    assert outcome.status == 2
    assert "neither a directory with a config.json nor a model in the Hugging Face cache" in outcome.text


def test_little_shared_memory_is_status_2(verify: Callable) -> None:
    outcome = verify(machine=replace(ROOMY, shm_free=8 * MIB))
    assert outcome.status == 2
    assert "/dev/shm has 8 MiB free" in outcome.text


def test_a_plugin_that_would_not_be_in_effect_is_status_2_where_stock_refuses(
    verify: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DCP_HYBRID", "0")
    outcome = verify()
    assert outcome.status == 2
    assert "stock vLLM refuses this" in outcome.text


def test_where_upstream_has_its_own_path_a_plugin_without_effect_is_no_obstacle(
    verify: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_dcp_hybrid.cli.installed.metadata.version", lambda name: "9.9.9")
    monkeypatch.setenv("DCP_HYBRID", "0")
    outcome = verify(machine=replace(ROOMY, gpus=("GPU 0", "GPU 1")))
    assert outcome.status == 0, outcome.raw
    assert "The plugin is not in effect here" in outcome.text
    assert "--enable-plugin" not in outcome.report["engines"][0]["command"]


def test_two_engines_at_once_need_twice_the_gpus(verify: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_dcp_hybrid.cli.installed.metadata.version", lambda name: "9.9.9")
    outcome = verify("--at-once", machine=replace(ROOMY, gpus=("GPU 0", "GPU 1")))
    assert outcome.status == 2
    assert "two engines at once need 4 GPUs, of which 2 are visible" in outcome.text


UPSTREAMS = (
    "INFO [x.py:1] vllm-dcp-hybrid 0.1.0 on vLLM 0.26.0 (9 patches), engine core: upstream's own hybrid DCP of vLLM "
    "0.26.0 is {}in use (block sizes, HybridKVCacheCoordinator); this plugin adds: chunk ends\n"
)


@pytest.mark.parametrize(
    ("log", "whose"),
    [
        ("vllm-dcp-hybrid 0.1 on vLLM 0.25.1 (20 patches), engine core: DCP size 2, interleave 1", "this plugin's DCP"),
        (UPSTREAMS.format(""), "upstream's own hybrid DCP of vLLM 0.26.0 (this plugin adds: chunk ends)"),
        (UPSTREAMS.format("NOT "), "upstream's own hybrid DCP of vLLM 0.26.0, modified (this plugin adds: chunk ends)"),
        ("nothing of ours", "stock vLLM's own DCP, with the plugin dormant"),
    ],
)
def test_the_log_says_whose_dcp_it_is(log: str, whose: str) -> None:
    assert whose_dcp(log) == whose


def test_the_effective_block_is_read_from_the_log_and_else_from_the_metrics() -> None:
    metric = 'vllm:cache_config_info{block_size="16",cache_dtype="auto"} 1.0\n'
    assert effective_block_in("attention sharded: block 128, effective 512, 2 layers", metric, 4) == 512
    assert effective_block_in("Setting attention block size to 528 tokens to ensure", metric, 4) == 2112
    assert effective_block_in("", metric, 2) == 32
    assert effective_block_in("", "", 2) == 544


def test_the_last_value_of_an_option_counts() -> None:
    serve = ServeOptions(2, 2, extra=("--max_model_len=10", "--dtype", "half", "--max-model-len", "20"))
    assert serve.value_of("--max-model-len") == "20"
    assert serve.value_of("--dtype") == "half"
    assert serve.value_of("--other") is None
    with pytest.raises(CannotRun):
        ServeOptions(2, 2, extra=("--max-model-len", "-1")).number_of("--max-model-len", 5)


@pytest.mark.e2e
@pytest.mark.timeout(400)
def test_dcp_of_a_real_model_is_right_and_it_recalls_as_much(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "vllm_dcp_hybrid.cli.main", "verify", str(RECALL_MODEL), *SIZES]
    command += ["--limit", "180", "--json", str(report), "--", "--enforce-eager", "--dtype", "float32"]
    command += ["--max-model-len", "2048", "--max-num-batched-tokens", "512"]
    environment = {**os.environ, **tiny_models.cpu_environment(2)}
    del environment["VLLM_CPU_OMP_THREADS_BIND"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert found["dtype"] == "float32"
    assert found["whose"] == "this plugin's DCP"
    assert found["effective_block"] == 256
    assert found["prefix_hits"] > 0
    assert max(row["largest"] for row in found["rows"]) < 0.002
    assert found["recall"]["num_with_dcp"] == found["recall"]["num_without"] >= 47
