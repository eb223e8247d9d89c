# SPDX-License-Identifier: Apache-2.0
"""The servers of the benchmarks: one model, TP 2, and what distinguishes one from another."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from vllm_dcp_hybrid.cli.server import Server, ServerFailed, free_port
from vllm_dcp_hybrid.cli.session import signals_as_interrupts

CAPTURE_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)


@dataclass(frozen=True)
class Kind:
    """A server by vLLM release and DCP options; `is_plugin`: the interpreter with vLLM 0.25.1 and this package."""

    is_plugin: bool
    dcp: int
    comm: str = "ag_rs"
    interleave: int = 1
    prefix_caching: bool = False

    def flags(self) -> list[str]:
        """The DCP part of the command."""
        flags = ["--enable-prefix-caching"] if self.prefix_caching else []
        if self.dcp > 1:
            flags += ["-dcp", str(self.dcp), "--dcp-comm-backend", self.comm]
            flags += ["--cp-kv-cache-interleave-size", str(self.interleave)]
        if self.is_plugin:
            flags += ["--enable-plugin", "dcp_hybrid"]
        return flags


KINDS = {
    "plugin-dcp2": Kind(is_plugin=True, dcp=2),
    "plugin-dcp1": Kind(is_plugin=True, dcp=1),
    "stock-dcp2": Kind(is_plugin=False, dcp=2),
    "plugin-dcp2-a2a": Kind(is_plugin=True, dcp=2, comm="a2a"),
    "stock-dcp2-a2a": Kind(is_plugin=False, dcp=2, comm="a2a"),
}


def command_of(kind: Kind, pythons: Mapping[bool, str], model: Path, flags: Sequence[str]) -> list[str]:
    """`vllm serve` of this kind, graphs and compilation on; `pythons` by whether they have the plugin."""
    sizes = ",".join(map(str, CAPTURE_SIZES))
    return [
        *(pythons[kind.is_plugin], "-m", "vllm.entrypoints.cli.main", "serve", str(model)),
        *("--served-model-name", "model", "--load-format", "dummy", "--dtype", "bfloat16", "-tp", "2"),
        *("--max-num-seqs", str(CAPTURE_SIZES[-1]), "--compilation-config", f'{{"cudagraph_capture_sizes":[{sizes}]}}'),
        *kind.flags(),
        *flags,
    ]


@contextlib.contextmanager
def running(
    kinds: Mapping[str, Kind],
    pythons: Mapping[bool, str],
    model: Path,
    flags: Sequence[str],
    logs: Path,
    limit_seconds: float = 400,
) -> Iterator[dict[str, Server]]:
    """The servers that became ready, all at once, started side by side; what kept others from it is printed."""
    # NVLink multicast stays off: it can disturb other users of a shared host.
    environment = {"NCCL_NVLS_ENABLE": "0", **os.environ}
    with signals_as_interrupts(), contextlib.ExitStack() as stack:
        servers = {}
        for name, kind in kinds.items():
            command = command_of(kind, pythons, model, flags)
            server = Server(command, port=free_port(), log=logs / f"{name}.log", environment=environment)
            servers[name] = stack.enter_context(server)

        def is_ready(name: str) -> bool:
            try:
                seconds = servers[name].wait_until_ready(limit_seconds, lambda *_: None)
            except ServerFailed as error:
                print(f"{name}: {error}", flush=True)
                return False
            print(f"{name} ready after {seconds:.0f} s", flush=True)
            return True

        with ThreadPoolExecutor(len(servers)) as pool:
            answers = list(pool.map(is_ready, servers))
        yield {name: server for (name, server), ready in zip(servers.items(), answers, strict=True) if ready}


@contextlib.contextmanager
def alone(servers: Mapping[str, Server], name: str) -> Iterator[None]:
    """Only this server runs: what others do while idle costs CPU time that it may need."""
    others = [server for other, server in servers.items() if other != name]
    for server in others:
        server.pause()
    try:
        yield
    finally:
        for server in others:
            server.resume()


def kv_tokens(log: Path) -> int:
    """What the server's log says that its KV cache holds, tokens."""
    found = re.search(r"GPU KV cache size: ([\d,]+) tokens", log.read_text(errors="replace"))
    return int(found[1].replace(",", "")) if found else 0
