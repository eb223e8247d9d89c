# SPDX-License-Identifier: Apache-2.0
"""Wraps the construction of the configuration: reads the switches once, and refuses what is not supported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_dcp_hybrid import activation, plugin
from vllm_dcp_hybrid.engine import checks
from vllm_dcp_hybrid.engine.cli_flag import with_options
from vllm_dcp_hybrid.errors import PluginNotApplied


def create_model_config(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Wraps ``EngineArgs.create_model_config``: the first moment at which both the model and the sizes are known."""
    from vllm.platforms import current_platform

    model_config = wrapped(*args, **kwargs)
    if model_config.is_hybrid or current_platform.is_cpu():
        check_sizes(instance, model_config)
    return model_config


def check_sizes(engine_args: Any, model_config: Any) -> None:
    """Refuse an illegal DCP size, where there is DCP and the plugin may act.

    Raises:
        IllegalWorldSize.
    """
    if engine_args.decode_context_parallel_size > 1 and _may_act(engine_args):
        checks.check_world_size(
            model_config,
            tp_size=engine_args.tensor_parallel_size,
            dcp_size=engine_args.decode_context_parallel_size,
        )


def create_engine_config(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Wraps ``EngineArgs.create_engine_config``: the finished ``VllmConfig``, in the process that builds it."""
    vllm_config = wrapped(*args, **kwargs)
    if is_to_act(vllm_config):
        checks.check_config(vllm_config)
        announce(vllm_config)
    return vllm_config


def is_to_act(vllm_config: Any) -> bool:
    """Whether the plugin acts on this configuration; reads the switches and writes them down.

    Where its patches could not be applied it does not act: stock's own refusal protects the user.

    Raises:
        PluginNotApplied: if it is demanded and not in effect.
        BadSwitch: if a switch has a value that means nothing.
    """
    if activation.plugin_options(vllm_config).get("required"):
        check_in_effect()
    if not activation.is_active(vllm_config):
        return False
    if activation.switched_off_by_environment():
        vllm_config.additional_config = with_options(vllm_config.additional_config, enabled=False)
        return False
    limit_s = activation.rank_check_limit_by_environment()
    if limit_s:
        vllm_config.additional_config = with_options(vllm_config.additional_config, check_ranks_s=limit_s)
    return plugin.status().is_applied


def announce(vllm_config: Any) -> None:
    """Settle the interleave for all processes, and say that the plugin acts.

    The older of vLLM's two flags is honoured by stock in the engine core only; workers read the newer one.
    """
    vllm_config.parallel_config.cp_kv_cache_interleave_size = activation.interleave_size(vllm_config)
    from vllm_dcp_hybrid.core import report

    report.log_activation("API server", vllm_config)


def check_in_effect() -> None:
    """Raise unless the plugin's patches are applied in this process and nobody switched it off.

    Raises:
        PluginNotApplied: naming the reason.
    """
    if activation.switched_off_by_environment():
        raise PluginNotApplied(
            name=activation.PLUGIN_NAME,
            reason=f"{activation.KILL_SWITCH}=0 is set in the environment",
            remedy=f"unset {activation.KILL_SWITCH}",
        )
    status = plugin.status()
    if not status.is_applied:
        raise PluginNotApplied(
            name=activation.PLUGIN_NAME,
            reason=status.refusal or "vLLM did not load it: VLLM_PLUGINS leaves it out, or it is not installed here",
            remedy="run `vllm-dcp-hybrid doctor` to see what is missing",
        )


def _may_act(engine_args: Any) -> bool:
    is_off = activation.switched_off_by_environment() or activation.is_switched_off(engine_args)
    return plugin.status().is_applied and not is_off
