# SPDX-License-Identifier: Apache-2.0
"""A recurrent state of its own for a request whose first step has one token.

Stock's GDN metadata takes a row of one token for a decode row, also where it is a whole prompt: the kernel then reads
the state that the block's previous owner left behind.  The state is zeroed here before such a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from vllm_dcp_hybrid import activation


def update_states(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps ``GPUModelRunner._update_states``, after which the runner knows the step's requests and their blocks."""
    result = wrapped(*args, **kwargs)
    if activation.is_active(instance.vllm_config):
        scheduler_output = args[0] if args else kwargs["scheduler_output"]
        for request in _beginning_with_one_token(instance.requests, scheduler_output):
            _zero_states(instance, request.block_ids)
    return result


def _beginning_with_one_token(requests: dict[str, Any], scheduler_output: Any) -> Iterator[Any]:
    """New and resumed requests of which nothing is computed and one token is scheduled."""
    started = [request.req_id for request in scheduler_output.scheduled_new_reqs]
    started += scheduler_output.scheduled_cached_reqs.resumed_req_ids
    for req_id in started:
        if scheduler_output.num_scheduled_tokens[req_id] == 1 and requests[req_id].num_computed_tokens == 0:
            yield requests[req_id]


def _zero_states(runner: Any, block_ids: tuple[list[int], ...]) -> None:
    """Zero the first block of every recurrent group of one request.

    Args:
        block_ids: per KV cache group, the request's blocks.
    """
    from vllm.v1.kv_cache_interface import MambaSpec

    layers = runner.compilation_config.static_forward_context
    for group, ids in zip(runner.kv_cache_config.kv_cache_groups, block_ids, strict=False):
        if not isinstance(group.kv_cache_spec, MambaSpec) or not ids:
            continue
        for name in group.layer_names:
            for state in layers[name].kv_cache:  # one tensor per kind of state, [num_blocks, ...]
                state[ids[0]].zero_()
