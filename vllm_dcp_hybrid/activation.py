# SPDX-License-Identifier: Apache-2.0
"""When the plugin does anything at all: read from ``vllm_config``, the one thing that every process has.

The kill switch and the demand are read once, where the config is built, and travel in ``additional_config`` under
:data:`CONFIG_KEY`.  Environment variables are not consulted anywhere else, since a worker may lack them.
"""

from __future__ import annotations

import math
import os
from typing import Any

from vllm_dcp_hybrid.errors import BadSwitch

PLUGIN_NAME = "dcp_hybrid"
CONFIG_KEY = "dcp_hybrid"
KILL_SWITCH = "DCP_HYBRID"
CHECK_RANKS = "DCP_HYBRID_CHECK_RANKS"


def switched_off_by_environment() -> bool:
    """Whether the user's environment says that the plugin should do nothing (``DCP_HYBRID=0``)."""
    return os.environ.get(KILL_SWITCH, "1").strip().lower() in {"0", "false", "off", "no"}


def rank_check_limit_by_environment() -> float:
    """Seconds of the rank check that the user's environment asks for; 0 where it is off.

    Raises:
        BadSwitch: a value that is neither a word for on or off nor a number of seconds.
    """
    text = os.environ.get(CHECK_RANKS, "").strip().lower()
    known = {"": 0.0, "0": 0.0, "false": 0.0, "off": 0.0, "no": 0.0, **dict.fromkeys(("1", "true", "on", "yes"), 30.0)}
    if text in known:
        return known[text]
    try:
        limit_s = float(text)
    except ValueError:
        limit_s = -1.0
    if not 0 < limit_s < math.inf:
        raise BadSwitch(name=CHECK_RANKS, value=text, legal="1, 0 or a number of seconds")
    return limit_s


def rank_check_limit_s(vllm_config: Any) -> float:
    """Seconds of the rank check as they were when this config was built; 0 where it is off."""
    return float(plugin_options(vllm_config).get("check_ranks_s", 0))


def plugin_options(vllm_config: Any) -> dict[str, Any]:
    """This plugin's entry of ``additional_config``; empty where there is none."""
    options = vllm_config.additional_config
    entry = options.get(CONFIG_KEY, {}) if isinstance(options, dict) else {}
    return entry if isinstance(entry, dict) else {}


def is_switched_off(vllm_config: Any) -> bool:
    """Whether the kill switch was set when this config was built."""
    return plugin_options(vllm_config).get("enabled") is False


def dcp_world_size(vllm_config: Any) -> int:
    """The DCP size of this engine; sizes below 1 count as 1."""
    return max(1, int(vllm_config.parallel_config.decode_context_parallel_size))


def interleave_size(vllm_config: Any) -> int:
    """Consecutive tokens that one rank keeps, whichever of vLLM's two flags gave it.

    Source: ``VllmConfig.validate_block_size`` (0.25.1), where the older ``dcp_kv_cache_interleave_size`` wins.
    """
    parallel_config = vllm_config.parallel_config
    older = int(getattr(parallel_config, "dcp_kv_cache_interleave_size", 1))
    return older if older > 1 else int(parallel_config.cp_kv_cache_interleave_size)


def is_on_cpu(vllm_config: Any) -> bool:
    """Whether the engine runs on CPUs, where stock has no DCP in any release."""
    return str(vllm_config.device_config.device_type) == "cpu"


def is_active(vllm_config: Any) -> bool:
    """Whether anything may differ from stock vLLM: DCP is on, and nobody switched us off.

    On CPUs that is all; elsewhere a model without recurrent layers is stock's business.
    """
    if dcp_world_size(vllm_config) == 1 or is_switched_off(vllm_config):
        return False
    model_config = vllm_config.model_config
    if model_config is None:
        return False
    return bool(model_config.is_hybrid) or is_on_cpu(vllm_config)


def uses_cpu_engine(vllm_config: Any) -> bool:
    """Whether this plugin's own attention engine for CPUs is to serve."""
    return is_active(vllm_config) and is_on_cpu(vllm_config)
