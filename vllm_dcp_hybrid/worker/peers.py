# SPDX-License-Identifier: Apache-2.0
"""Whether all ranks of an engine run the same software with the same flags, asked before the model is built.

Each node of an engine has its own installation and its own command line.  Ranks tell each other through a key-value
store: never through a collective, in which a node without the plugin would take no part.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from vllm_dcp_hybrid.errors import PeersDiffer, PeerSilent

_FAREWELL_S = 5.0
"""How long a rank that is about to fail leaves the others to read what it said."""


@dataclass(frozen=True)
class Peer:
    """What one rank says of itself.

    Attributes:
        host: name of its machine.
        software: the plugin, vLLM, and the fingerprint of what is applied.
        settings: name and value of what every node must be given alike.
    """

    host: str
    software: str
    settings: Mapping[str, str]

    def to_json(self) -> str:
        """For the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Peer:
        """What another rank stored; a version of this package that says more, or less, is understood too."""
        entries = json.loads(text)
        return cls(str(entries.get("host", "?")), str(entries.get("software", "?")), dict(entries.get("settings", {})))


def first_difference(peers: Mapping[int, Peer], num_ranks_per_node: int) -> str | None:
    """Who runs what, of the first thing in which ranks differ; None where they agree."""
    software = {rank: peer.software for rank, peer in peers.items()}
    if len(set(software.values())) > 1:
        return _who_has(software, peers, num_ranks_per_node, "runs", "run")
    for name in sorted({name for peer in peers.values() for name in peer.settings}):
        values = {rank: peer.settings.get(name, "unknown") for rank, peer in peers.items()}
        if len(set(values.values())) > 1:
            return f"{name} differs: {_who_has(values, peers, num_ranks_per_node, 'has', 'have')}"
    return None


def _who_has(
    values: Mapping[int, str], peers: Mapping[int, Peer], num_ranks_per_node: int, singular: str, plural: str
) -> str:
    parts = []
    for value in dict.fromkeys(values[rank] for rank in sorted(values)):
        ranks = [rank for rank in sorted(values) if values[rank] == value]
        verb = singular if len(ranks) == 1 else plural
        parts.append(f"{describe_ranks(ranks, peers, num_ranks_per_node)} {verb} {value}")
    return ", and ".join(parts)


def describe_ranks(ranks: Collection[int], peers: Mapping[int, Peer], num_ranks_per_node: int) -> str:
    """Ranks with their places, for a sentence.

    Args:
        peers: those that have said their host.
        num_ranks_per_node: 0 where that is not known.

    >>> describe_ranks([0, 2, 3], {}, 2)
    'rank 0 (node 0), ranks 2, 3 (node 1)'
    """
    by_place: dict[str, list[str]] = {}
    for rank in sorted(ranks):
        node = [f"node {rank // num_ranks_per_node}"] if num_ranks_per_node else []
        host = [f"host {peers[rank].host}"] if rank in peers else []
        by_place.setdefault(", ".join(node + host), []).append(str(rank))
    return ", ".join(
        f"rank{'s' if len(some) > 1 else ''} {', '.join(some)}{f' ({place})' if place else ''}"
        for place, some in by_place.items()
    )


def meet(
    store: Any, rank: int, ranks: Sequence[int], own: Peer, *, limit_s: float, num_ranks_per_node: int = 0
) -> dict[int, Peer]:
    """Tell the other ranks what this one runs, and hear them.

    Args:
        store: a ``torch.distributed`` store that all ranks reach.
        rank: this rank.
        ranks: all, this one included.
        own: what it runs.
        limit_s: longest wait for the others, seconds.
        num_ranks_per_node: for messages; 0 where that is not known.

    Returns:
        What each rank runs.

    Raises:
        PeerSilent: a rank said nothing in time.
        PeersDiffer: two ranks do not run the same.
    """
    peers = {rank: own}
    try:
        store.set(_key(rank, "runs"), own.to_json())
        _listen(store, peers, [other for other in ranks if other != rank], limit_s)
    except dist.DistError as error:
        # The rank that holds the store has ended, and its own log says why.
        raise PeerSilent(who=describe_ranks([0], peers, num_ranks_per_node), when="has ended") from error
    silent = [other for other in ranks if other not in peers]
    difference = first_difference(peers, num_ranks_per_node)
    if difference is None and not silent:
        return peers
    _let_others_read(store, rank, [other for other in peers if other != rank])
    if difference is not None:
        raise PeersDiffer(difference=difference)
    raise PeerSilent(who=describe_ranks(silent, peers, num_ranks_per_node), when=f"said nothing within {limit_s:.0f} s")


def _listen(store: Any, peers: dict[int, Peer], others: Sequence[int], limit_s: float) -> None:
    """Add to `peers` what others say until all have spoken or the limit has passed."""
    deadline = time.monotonic() + limit_s
    pause_s = 0.001
    while True:
        for other in others:
            key = _key(other, "runs")
            if other not in peers and store.check([key]):
                peers[other] = Peer.from_json(store.get(key))
        if all(other in peers for other in others) or time.monotonic() >= deadline:
            return
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, 0.2)


def _let_others_read(store: Any, rank: int, others: Sequence[int]) -> None:
    """Wait until the others know too, since the store ends with the rank that holds it."""
    deadline = time.monotonic() + _FAREWELL_S
    keys = [_key(other, "knows") for other in others]
    try:
        store.set(_key(rank, "knows"), "1")
        while time.monotonic() < deadline and not store.check(keys):
            time.sleep(0.02)
    except dist.DistError:
        return  # it has ended: whoever held it had waited


def _key(rank: int, what: str) -> str:
    return f"dcp_hybrid_peers/{rank}/{what}"
