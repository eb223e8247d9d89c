# SPDX-License-Identifier: Apache-2.0
"""`--enable-plugin` through vLLM's own parser, and `require_plugin` for the Python API."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import vllm_dcp_hybrid
from vllm_dcp_hybrid import plugin
from vllm_dcp_hybrid.engine import cli_flag
from vllm_dcp_hybrid.errors import PluginNotApplied

pytestmark = pytest.mark.contract


class FakeEntryPoint:
    def __init__(self, name: str) -> None:
        self.name = name


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two plugins are installed: this one and `other`."""
    names = [FakeEntryPoint("dcp_hybrid"), FakeEntryPoint("other")]
    monkeypatch.setattr(cli_flag, "entry_points", lambda group: names if group == "vllm.general_plugins" else [])


def parse(vllm_engine: Any, *arguments: str) -> Any:
    namespace = vllm_engine.parser().parse_args(["--model", "m", *arguments])
    return vllm_engine.AsyncEngineArgs.from_cli_args(namespace)


def test_the_flag_is_in_vllms_help(vllm_engine: Any) -> None:
    groups = {group.title: group for group in vllm_engine.parser()._action_groups}
    (action,) = groups["vllm-dcp-hybrid"]._group_actions
    assert action.option_strings == ["--enable-plugin"]


def test_the_demand_travels_in_additional_config(vllm_engine: Any) -> None:
    engine_args = parse(vllm_engine, "--enable-plugin", "dcp_hybrid")
    assert engine_args.additional_config == {"dcp_hybrid": {"required": True}}
    assert type(engine_args) is vllm_engine.AsyncEngineArgs


def test_the_users_own_entries_are_kept(vllm_engine: Any) -> None:
    text = '{"mine": 1, "dcp_hybrid": {"x": 2}}'
    engine_args = parse(vllm_engine, "--enable-plugin", "dcp_hybrid", "--additional-config", text)
    assert engine_args.additional_config == {"mine": 1, "dcp_hybrid": {"x": 2, "required": True}}


def test_without_the_flag_nothing_travels(vllm_engine: Any) -> None:
    stock = vllm_engine.AsyncEngineArgs(model="m").additional_config
    assert parse(vllm_engine).additional_config == stock == {}


def test_options_are_added_to_a_copy() -> None:
    mine: dict[str, Any] = {"dcp_hybrid": {"x": 2}}
    assert cli_flag.with_options(mine, required=True) == {"dcp_hybrid": {"x": 2, "required": True}}
    assert mine == {"dcp_hybrid": {"x": 2}}
    assert cli_flag.with_options(None, enabled=False) == {"dcp_hybrid": {"enabled": False}}


@pytest.mark.usefixtures("installed")
class TestOtherPlugins:
    def test_an_installed_one_is_enough(self, vllm_engine: Any) -> None:
        assert parse(vllm_engine, "--enable-plugin", "other").additional_config == {}

    def test_several_may_be_demanded(self, vllm_engine: Any) -> None:
        engine_args = parse(vllm_engine, "--enable-plugin", "other", "--enable-plugin", "dcp_hybrid")
        assert engine_args.additional_config == {"dcp_hybrid": {"required": True}}

    def test_an_unknown_one_is_refused_and_the_known_ones_are_named(self, vllm_engine: Any) -> None:
        with pytest.raises(
            PluginNotApplied, match=r"plugin typo is demanded.*not installed \(installed: dcp_hybrid, other"
        ):
            parse(vllm_engine, "--enable-plugin", "typo")

    def test_one_that_vllm_plugins_leaves_out_is_refused(
        self, vllm_engine: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("VLLM_PLUGINS", "dcp_hybrid")
        with pytest.raises(PluginNotApplied, match=r"VLLM_PLUGINS leaves it out.*add other to VLLM_PLUGINS"):
            parse(vllm_engine, "--enable-plugin", "other")


def test_require_plugin_is_the_same_demand(vllm_engine: Any) -> None:
    assert vllm_dcp_hybrid.require_plugin() == {"dcp_hybrid": {"required": True}}
    assert vllm_dcp_hybrid.require_plugin({"mine": 1}) == {"mine": 1, "dcp_hybrid": {"required": True}}


def test_case_30_require_plugin_stops_where_the_kill_switch_is_set(
    vllm_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CASES 30."""
    monkeypatch.setenv("DCP_HYBRID", "0")
    with pytest.raises(PluginNotApplied, match=r"DCP_HYBRID=0 is set in the environment.*unset DCP_HYBRID"):
        vllm_dcp_hybrid.require_plugin()


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (plugin.PluginStatus("0.99.0", None, None, "0.99.0 has no release file"), "0.99.0 has no release file"),
        (plugin.PluginStatus(), "vLLM did not load it"),
    ],
)
def test_case_30_require_plugin_stops_where_nothing_is_applied_and_says_why(
    vllm_engine: Any, monkeypatch: pytest.MonkeyPatch, status: plugin.PluginStatus, reason: str
) -> None:
    """CASES 30."""
    monkeypatch.setattr(plugin, "_status", status)
    with pytest.raises(PluginNotApplied, match=f"{reason}.*vllm-dcp-hybrid doctor"):
        vllm_dcp_hybrid.require_plugin()


def test_case_30_left_out_by_vllm_plugins_the_command_line_itself_is_refused() -> None:
    """CASES 30: stock vLLM has no such flag; in a process of its own, for plugins are loaded once."""
    script = (
        "import os; os.environ['VLLM_PLUGINS'] = 'something_else'\n"
        "from vllm.engine.arg_utils import AsyncEngineArgs\n"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
        "from vllm_dcp_hybrid import plugin, require_plugin\n"
        "parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())\n"
        "assert not plugin.status().vllm_version\n"
        "try:\n"
        "    require_plugin()\n"
        "except Exception as error:\n"
        "    print('REFUSED', error)\n"
        "parser.parse_args(['--model', 'm', '--enable-plugin', 'dcp_hybrid'])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2, done.stderr[-3000:]
    assert "unrecognized arguments: --enable-plugin dcp_hybrid" in done.stderr
    assert (
        "REFUSED The plugin dcp_hybrid is demanded (--enable-plugin or require_plugin), but it is not in effect"
        in done.stdout
    )
