# SPDX-License-Identifier: Apache-2.0
"""The two servers: their command lines, and what their logs say."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_dcp_hybrid import activation, placement
from vllm_dcp_hybrid.cli.session import CannotRun

# Pieces of a prompt that one step computes, where the user does not say.  Small enough for the log-probabilities of a
# whole piece over a large vocabulary, which vLLM's memory profile leaves out.
DEFAULT_CHUNK = 2048
DEFAULT_MAX_MODEL_LEN = 16384
_DEFAULT_BLOCK = 272

# What `verify` sets itself, and how to set it.
_OWN_OPTIONS = {
    "--tensor-parallel-size": "give -tp to verify",
    "-tp": "give -tp to verify",
    "--decode-context-parallel-size": "give -dcp to verify",
    "-dcp": "give -dcp to verify",
    "--cp-kv-cache-interleave-size": "give --interleave to verify",
    "--dcp-kv-cache-interleave-size": "give --interleave to verify",
    "--dcp-comm-backend": "give --comm-backend to verify",
    "--enable-prefix-caching": "it is on unless verify is given --no-prefix-caching",
    "--no-enable-prefix-caching": "give --no-prefix-caching to verify",
    "--enable-plugin": "verify demands the plugin where it acts",
    "--model": "give the model to verify",
    "--served-model-name": "verify names it",
    "--host": "verify uses 127.0.0.1",
    "--port": "verify finds free ones",
    "--api-key": "verify asks without one",
}

_SHARDED_GROUP = re.compile(r"attention sharded: block \d+, effective (\d+)")
_ATTENTION_BLOCK = re.compile(r"Setting attention block size to (\d+) tokens")
_METRIC_BLOCK = re.compile(r'vllm:cache_config_info{[^}]*\bblock_size="(\d+)"')
_DTYPE = re.compile(r"\bdtype=torch\.(\w+)")
_OURS = re.compile(r"vllm-dcp-hybrid \S+ on vLLM \S+ [^\n]*, engine core: DCP size ")
_UPSTREAMS = re.compile(r"engine core: (upstream's own hybrid DCP of vLLM \S+) is (NOT )?in use[^\n;]*; ([^\n]*)")


@dataclass(frozen=True)
class ServeOptions:
    """What both servers have in common, and what only the one with DCP is given.

    Attributes:
        tp_size: of both; an engine that measures rounding has another.
        dcp_size, interleave, comm_backend: of the one with DCP.
        prefix_caching: of the one with DCP; the other never has it.
        extra: more options of `vllm serve`, of both.
    """

    tp_size: int
    dcp_size: int
    interleave: int = 1
    comm_backend: str = "ag_rs"
    prefix_caching: bool = True
    extra: tuple[str, ...] = ()

    def value_of(self, option: str) -> str | None:
        """The last value that `extra` gives to an option with one value."""
        found = None
        for place, text in enumerate(self.extra):
            name, has_value, value = text.partition("=")
            if _normal(name) == option:
                found = value if has_value else next(iter(self.extra[place + 1 : place + 2]), None)
        return found

    def number_of(self, option: str, default: int) -> int:
        """The value of an option that takes a number of tokens.

        Raises:
            CannotRun: it is none.
        """
        value = self.value_of(option)
        if value is None:
            return default
        if not value.isdigit() or int(value) < 1:
            raise CannotRun(f"{option} {value} is not a number of tokens: verify must know it, write it in digits.")
        return int(value)

    def check(self) -> None:
        """Raises CannotRun where `extra` sets what `verify` sets itself, or is not made of options."""
        if self.extra and not self.extra[0].startswith("-"):
            raise CannotRun(
                f"{self.extra[0]!r} is no option of `vllm serve`: write `verify MODEL -tp T -dcp N -- --option value`."
            )
        for text in self.extra:
            remedy = _OWN_OPTIONS.get(_normal(text.partition("=")[0]))
            if remedy:
                raise CannotRun(f"{text.partition('=')[0]} is not for the options after --: {remedy}.")

    def arguments(self, tp_size: int, dcp_size: int, *, max_model_len: int, chunk: int, has_plugin: bool) -> list[str]:
        """The flags that follow the model on a server's command line."""
        flags = ["-tp", str(tp_size)]
        if dcp_size > 1:
            flags += ["-dcp", str(dcp_size)]
            flags += ["--enable-plugin", activation.PLUGIN_NAME] if has_plugin else []
            flags += ["--cp-kv-cache-interleave-size", str(self.interleave)] if self.interleave != 1 else []
            flags += ["--dcp-comm-backend", self.comm_backend] if self.comm_backend != "ag_rs" else []
        # The reference is the plainest engine: stock 0.20 - 0.24 cannot cache prefixes of hybrids on CPUs.
        is_cached = dcp_size > 1 and self.prefix_caching
        flags.append("--enable-prefix-caching" if is_cached else "--no-enable-prefix-caching")
        flags += ["--max-model-len", str(max_model_len)] if self.value_of("--max-model-len") is None else []
        flags += ["--max-num-batched-tokens", str(chunk)] if self.value_of("--max-num-batched-tokens") is None else []
        return [*flags, *self.extra]


def effective_block_in(log: str, metrics: str, dcp_world_size: int) -> int:
    """Tokens of the sequence under one block id of the attention layers, as an engine with DCP tells it."""
    told = _SHARDED_GROUP.search(log)
    if told:
        return int(told[1])
    match = _ATTENTION_BLOCK.search(log) or _METRIC_BLOCK.search(metrics)
    block = int(match[1]) if match else _DEFAULT_BLOCK
    # The second block of the first rank begins after one block of each rank.
    return placement.global_pos(block, 0, dcp_world_size, block)


def dtype_in(log: str, default: str) -> str:
    """What an engine computes in, as its log says: stock rounds float32 weights to bfloat16 unless told otherwise."""
    match = _DTYPE.search(log)
    return match[1] if match else default


def whose_dcp(log: str) -> str:
    """Whose DCP an engine used, as a noun phrase."""
    if _OURS.search(log):
        return "this plugin's DCP"
    match = _UPSTREAMS.search(log)
    if match is None:
        return "stock vLLM's own DCP, with the plugin dormant"
    name, is_modified, additions = match.groups()
    return f"{name}{', modified' if is_modified else ''} ({additions.strip()})"


def _normal(option: str) -> str:
    """vLLM takes `--max_model_len` for `--max-model-len`."""
    return option.replace("_", "-")


def shown(command: Sequence[str]) -> list[str]:
    """A command line without the path of the interpreter."""
    return ["python", *command[1:]]
