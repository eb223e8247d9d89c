# SPDX-License-Identifier: Apache-2.0
"""Hooks for packages that bring their own kinds of KV cache: pluggy, project name ``vllm_dcp_hybrid``.

A package places its own spec class by registering a plugin under the entry point group ``vllm_dcp_hybrid``::

    [project.entry-points.vllm_dcp_hybrid]
    my_cache = "my_package.dcp"

    # my_package/dcp.py
    from vllm_dcp_hybrid.hooks import Placement, hookimpl

    @hookimpl
    def dcp_placement(spec):
        return Placement.REPLICATED if isinstance(spec, MySpec) else None
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import pluggy

from vllm_dcp_hybrid.placement import Placement

PROJECT = "vllm_dcp_hybrid"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

__all__ = ["Placement", "hookimpl", "plugin_manager"]


@hookspec(firstresult=True)
def dcp_placement(spec: Any) -> Placement | None:
    """Say where the tokens of ``spec`` (a vLLM ``KVCacheSpec``) live under DCP.

    The first answer that is not None wins; plugins are asked before the built-in rules.  A spec that nobody places is
    refused before the weights load.
    """


@cache
def plugin_manager() -> pluggy.PluginManager:
    """The plugin manager of this process, with the installed plugins loaded."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(sys.modules[__name__])
    manager.load_setuptools_entrypoints(PROJECT)
    return manager
