# SPDX-License-Identifier: Apache-2.0
"""Decode Context Parallelism for hybrid models on stock vLLM, as a plugin.

Installed beside vLLM it is found through the entry point ``vllm.general_plugins: dcp_hybrid`` and does nothing until
an engine has a DCP size above 1 and a hybrid model.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

__all__ = ["__version__", "register", "require_plugin"]


def register() -> None:
    """The entry point: applies the patches for the installed vLLM release, or says once why it does not.

    Safe to call in every process and any number of times; imports neither torch.cuda nor model code.
    """
    from vllm_dcp_hybrid import plugin

    plugin.apply_patches()


def require_plugin(additional_config: dict[str, Any] | None = None) -> dict[str, Any]:
    """``--enable-plugin dcp_hybrid`` for the Python API.

    Usage::

        LLM(model, tensor_parallel_size=2, decode_context_parallel_size=2,
            additional_config=vllm_dcp_hybrid.require_plugin())

    Args:
        additional_config: entries of your own to keep.

    Returns:
        A value for vLLM's ``additional_config``.

    Raises:
        PluginNotApplied: if ``VLLM_PLUGINS``, the kill switch or the installed vLLM keep the plugin from working.
    """
    from vllm.plugins import load_general_plugins

    from vllm_dcp_hybrid.engine import cli_flag, config

    # vLLM loads plugins when it builds its engine arguments, which is after this call; loading twice changes nothing.
    load_general_plugins()
    config.check_in_effect()
    return cli_flag.with_options(additional_config, required=True)
