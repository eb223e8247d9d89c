# SPDX-License-Identifier: Apache-2.0
"""The hook by which other packages place their own kinds of KV cache: what pluggy gives, without vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pluggy
import pytest

from vllm_dcp_hybrid import hooks
from vllm_dcp_hybrid.hooks import Placement, hookimpl, plugin_manager


@pytest.fixture
def register() -> Iterator[Any]:
    registered: list[Any] = []

    def register(plugin: Any) -> None:
        plugin_manager().register(plugin)
        registered.append(plugin)

    yield register
    for plugin in registered:
        plugin_manager().unregister(plugin)


class Says:
    def __init__(self, answer: Placement | None) -> None:
        self.answer = answer
        self.asked: list[Any] = []

    @hookimpl
    def dcp_placement(self, spec: Any) -> Placement | None:
        self.asked.append(spec)
        return self.answer


def ask(spec: Any = "spec") -> Placement | None:
    answer: Placement | None = plugin_manager().hook.dcp_placement(spec=spec)
    return answer


def test_without_plugins_nobody_answers() -> None:
    assert ask() is None


def test_a_plugin_is_asked_with_the_spec_itself(register: Any) -> None:
    plugin, spec = Says(Placement.SHARDED), object()
    register(plugin)
    assert ask(spec) is Placement.SHARDED
    assert plugin.asked == [spec]


def test_the_first_answer_wins_and_the_last_registered_is_asked_first(register: Any) -> None:
    first, second = Says(Placement.SHARDED), Says(Placement.REPLICATED)
    register(first)
    register(second)
    assert ask() is Placement.REPLICATED
    assert first.asked == []


def test_a_plugin_that_does_not_know_the_spec_leaves_it_to_others(register: Any) -> None:
    register(Says(Placement.REPLICATED))
    register(Says(None))
    assert ask() is Placement.REPLICATED


def test_a_plugin_may_not_invent_arguments(register: Any) -> None:
    """Mistakes of plugin authors are errors when they register, not answers that never come."""

    class Wrong:
        @hookimpl
        def dcp_placement(self, spec: Any, rank: int) -> None:
            return None

    with pytest.raises(pluggy.PluginValidationError, match="rank"):
        plugin_manager().register(Wrong())
    for plugin in plugin_manager().get_plugins():
        if isinstance(plugin, Wrong):  # left behind by some versions of pluggy
            plugin_manager().unregister(plugin)


def test_all_in_one_process_ask_the_same_manager() -> None:
    assert plugin_manager() is plugin_manager()
    assert plugin_manager().project_name == hooks.PROJECT == "vllm_dcp_hybrid"


def test_installed_plugins_are_found_by_their_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []
    monkeypatch.setattr(pluggy.PluginManager, "load_setuptools_entrypoints", lambda self, group: loaded.append(group))
    plugin_manager.__wrapped__()
    assert loaded == ["vllm_dcp_hybrid"]


def test_what_plugin_authors_import_is_exported() -> None:
    assert set(hooks.__all__) == {"Placement", "hookimpl", "plugin_manager"}
    assert {placement.value for placement in Placement} == {"sharded", "replicated", "none"}
