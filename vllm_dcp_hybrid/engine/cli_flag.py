# SPDX-License-Identifier: Apache-2.0
"""``--enable-plugin NAME``: turns an installed plugin from an offer into a demand.

Stock vLLM has no such flag, so where the plugin is missing or left out of ``VLLM_PLUGINS`` the command line itself is
refused.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from vllm_dcp_hybrid import activation
from vllm_dcp_hybrid.errors import PluginNotApplied

PLUGIN_GROUP = "vllm.general_plugins"


def add_cli_args(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps ``EngineArgs.add_cli_args``: adds the flag after vLLM's own."""
    parser = wrapped(*args, **kwargs)
    group = parser.add_argument_group(title="vllm-dcp-hybrid", description="Plugins that must be in effect.")
    group.add_argument(
        "--enable-plugin",
        action="append",
        metavar="NAME",
        default=None,
        help="Stop before the weights load unless this installed plugin is in effect. May be given several times.",
    )
    return parser


def from_cli_args(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps ``EngineArgs.from_cli_args``: carries the demand in ``additional_config``, which every process sees."""
    engine_args = wrapped(*args, **kwargs)
    namespace = args[0] if args else kwargs["args"]
    for name in getattr(namespace, "enable_plugin", None) or ():
        if name == activation.PLUGIN_NAME:
            engine_args.additional_config = with_options(engine_args.additional_config, required=True)
        else:
            _check_other_plugin(name)
    return engine_args


def with_options(additional_config: Any, **options: Any) -> dict[str, Any]:
    """A copy of ``additional_config`` with this plugin's entry extended.

    Raises:
        PluginNotApplied: if it is an object that nothing can be added to.
    """
    if additional_config is not None and not isinstance(additional_config, dict):
        raise PluginNotApplied(
            name=activation.PLUGIN_NAME,
            reason="its switches travel in additional_config, which is no dictionary here",
            remedy="give additional_config as a dictionary",
        )
    base = dict(additional_config or {})
    entry = base.get(activation.CONFIG_KEY)
    base[activation.CONFIG_KEY] = {**(entry if isinstance(entry, dict) else {}), **options}
    return base


def _check_other_plugin(name: str) -> None:
    """Somebody else's plugin: that it is installed and not filtered out is all we can know."""
    import vllm.envs as envs

    installed = {entry.name for entry in entry_points(group=PLUGIN_GROUP)}
    if name not in installed:
        known = ", ".join(sorted(installed)) or "none"
        raise PluginNotApplied(name=name, reason=f"it is not installed (installed: {known})", remedy="install it")
    allowed = envs.VLLM_PLUGINS
    if allowed is not None and name not in allowed:
        raise PluginNotApplied(name=name, reason="VLLM_PLUGINS leaves it out", remedy=f"add {name} to VLLM_PLUGINS")
