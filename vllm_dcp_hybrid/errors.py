# SPDX-License-Identifier: Apache-2.0
"""Refusals: one class each, whose sentence says what, why and what to do.

All but the last are raised before the weights load.  (Stock's own checks of the interleave and of ``align`` mode come
later, when the block size is known.)
"""

from __future__ import annotations

from typing import Any


class DCPHybridError(RuntimeError):
    """Base of everything that this package refuses.  The subclass holds the message template."""

    template = "{reason}"

    def __init__(self, **facts: Any) -> None:
        self.facts = facts
        super().__init__(self.template.format(**facts))

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors cross process boundaries (worker to engine core); keyword arguments need help to be unpickled.
        return _rebuild, (type(self), self.facts)


def _rebuild(cls: type[DCPHybridError], facts: dict[str, Any]) -> DCPHybridError:
    return cls(**facts)


class IllegalWorldSize(DCPHybridError):
    """The DCP size does not suit the tensor-parallel size and the head counts."""

    template = (
        "Decode Context Parallelism of size {dcp} is not possible for this model at tensor parallel size {tp}: {why}. "
        "{remedy}."
    )


class UnplacedSpec(DCPHybridError):
    """A KV cache spec that no rule and no plugin places."""

    template = (
        "Layer {layer} has a KV cache of type {spec}, and nothing says where its tokens live under Decode Context "
        "Parallelism; install a plugin that answers the hook `dcp_placement` for it (see docs/placement.md) or run "
        "with -dcp 1."
    )


class UnsupportedSpec(DCPHybridError):
    """A kind of KV cache that is known but not supported under DCP yet."""

    template = (
        "Layer {layer} uses {kind}, which this version of vllm-dcp-hybrid does not support under Decode Context "
        "Parallelism because {why}; run this model with -dcp 1."
    )


class UnsupportedAttention(DCPHybridError):
    """A feature of an attention layer that would be computed wrongly over local positions."""

    template = (
        "Layer {layer} uses {feature}, which would be wrong under Decode Context Parallelism because {why}; run this "
        "model with -dcp 1."
    )


class BackendWithoutLSE(DCPHybridError):
    """An attention backend that does not return the softmax LSE."""

    template = (
        "Layer {layer} runs on the attention backend {backend}, which does not return the softmax LSE that Decode "
        "Context Parallelism combines the ranks' results with; choose one that does, for example "
        "--attention-backend {alternative}, or run with -dcp 1."
    )


class UnsupportedFeature(DCPHybridError):
    """A configuration that this package does not support together with the DCP that it adds."""

    template = "{feature} is not supported together with Decode Context Parallelism {where} because {why}; {remedy}."


class SharedMemoryTooSmall(DCPHybridError):
    """A container's /dev/shm that CPU ranks cannot exchange their data through."""

    template = (
        "/dev/shm has {free_mib} MiB free and {num_ranks} CPU ranks need {needed_mib} MiB to exchange data, so a rank "
        "would be killed in mid-run; give the container more, for example `docker run --shm-size=1g`."
    )


class PluginNotApplied(DCPHybridError):
    """``--enable-plugin dcp_hybrid`` was given, and the plugin cannot do its work."""

    template = (
        "The plugin {name} is demanded (--enable-plugin or require_plugin), but it is not in effect: {reason}. "
        "Drop the demand to run stock vLLM, or {remedy}."
    )


class BadSwitch(DCPHybridError):
    """An environment variable of this package with a value that means nothing."""

    template = "{name}={value} means nothing; set it to {legal}, or unset it."


class PeersDiffer(DCPHybridError):
    """Two ranks of one engine do not run the same software, or were not given the same flags."""

    template = (
        "The ranks of this engine do not run the same: {difference}; install the same vLLM and vllm-dcp-hybrid on "
        "every node, and start each with the same flags and environment."
    )


class PeerSilent(DCPHybridError):
    """A rank of this engine on which the plugin does not act."""

    template = (
        "The plugin is in effect here, but {who} {when} while the ranks compared what they run: there vllm-dcp-hybrid "
        "is missing, left out of VLLM_PLUGINS or switched off (DCP_HYBRID=0), or other flags or an error keep it from "
        "acting; give every node the same vllm-dcp-hybrid, flags and environment."
    )


class RanksDisagree(DCPHybridError):
    """Two ranks took different ways through a step: the rank check's finding, while the engine runs."""

    template = "vllm-dcp-hybrid rank check: {difference}"
