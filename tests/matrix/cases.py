# SPDX-License-Identifier: Apache-2.0
"""What is asked of a release's engines: which model, with which DCP engine, how close the answers must be.

Each case compares TP 2, DCP 2 with TP 2, DCP 1 of the same release.  A case says for which releases it is: where the
CPU build can run the model, and the plugin serves it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engines import Engine, tokens

from vllm_dcp_hybrid.patching import is_among
from vllm_dcp_hybrid.tiny_models import cpu_environment

BLOCK = 272
# Of issue "Releases": a repeat hits no less than our own split gives, and no less than stock gives there.
REPEATED = (1377, 1649, 3000, 5000)
LENGTHS = (1, 2, 3, 17, 255, 257, 700, 1403)
MAX_MODEL_LEN = 8192


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        name: of the case, as on the command line and in results.
        title: for tables.
        releases: PEP 440 specifier.
        engine: the one with DCP; the oracle follows from it.
        mean: largest allowed mean difference in log-probability.
        largest: largest allowed difference of one token.
        hit_units: per releases, whole blocks of one rank between two places where a prefix hit can end; 0 where a
            release's own scheduler does not find every hit, without DCP neither.
        blocks: per releases, the block size to ask for; vLLM's own choice where there is none.
        stock_nan: releases that without DCP may answer a request with NaN; such requests are not compared.
    """

    name: str
    title: str
    releases: str
    engine: Engine
    mean: float
    largest: float
    hit_units: tuple[tuple[str, int], ...]
    blocks: tuple[tuple[str, int], ...] = ()
    stock_nan: str = "<0"

    def engine_of(self, release: str) -> Engine:
        """The engine with DCP, with this release's block size."""
        block = next((block for releases, block in self.blocks if is_among(release, releases)), None)
        return replace(self.engine, block_size=block)


_CACHED = Engine("lfm2", tp=2, dcp=2, prefix_caching=True, extra=(("max_model_len", MAX_MODEL_LEN),))
# float32 engines agree to rounding.  For bfloat16, what TP 1 and TP 2 of stock 0.25.1 differ by (largest: twice that).
_FLOAT32 = {"mean": 2e-4, "largest": 2e-3}
_BFLOAT16 = {"mean": 0.045, "largest": 0.5}

# With DCP 2: blocks of the scheduler, until stock's partial hits.
_HYBRID = (("<0.29", 2), (">=0.29", 1))
# Stock 0.32.0 at DCP 1 with asynchronous scheduling: 0 / 1,536 / 0 / 4,992, the same as with DCP 2.
_GDN = (("<0.29", 2), (">=0.29", 0))
_ONE_GROUP = ((">=0", 2),)

CASES: tuple[Case, ...] = (
    Case(
        "lfm2",
        "short convolution + attention, float32",
        ">=0.20.2",
        replace(_CACHED, dtype="float32", interleave=16, comm="a2a"),
        **_FLOAT32,
        hit_units=_HYBRID,
        # Attention on CPUs takes multiples of 32 only from 0.29 on.
        blocks=(("<0.29", BLOCK), (">=0.29", 288)),
    ),
    Case(
        "qwen3-next",
        "GDN + attention, bfloat16",
        ">=0.21",
        replace(_CACHED, kind="qwen3-next", gdn_head_size=64),
        **_BFLOAT16,
        hit_units=_GDN,
        # CPU attention multiplies weights of 0 with what a block's previous owner left there.
        stock_nan="<0.25",
    ),
    Case(
        "llama",
        "attention alone, float32",
        ">=0.20.2",
        replace(_CACHED, kind="llama", dtype="float32"),
        **_FLOAT32,
        hit_units=_ONE_GROUP,
    ),
)

REFUSAL = "refusal"
ENGINE_CHECKS = (REFUSAL, *(case.name for case in CASES))
# The words of stock releases, in the order in which a start meets them.
STOCK_REFUSALS = (
    "DCP not support hybrid attn now.",
    "Hybrid KV cache groups with multiple block sizes do not support context parallelism",
    "requires attention implementations to return the softmax LSE during decode",
)


# Stock 0.20 stops at any hybrid on CPUs, before it comes to DCP.
_REFUSED = (("<0.21", "llama"), (">=0.21", "lfm2"))


def refused_case(release: str) -> Case:
    """The case whose engine stock refuses for its DCP size."""
    return case_named(next(name for releases, name in _REFUSED if is_among(release, releases)))


def cases_for(release: str) -> list[Case]:
    """The comparisons for one release."""
    return [case for case in CASES if is_among(release, case.releases)]


def case_named(name: str) -> Case:
    """A case by its name."""
    return next(case for case in CASES if case.name == name)


def required_hits(case: Case, release: str, block_size: int, lengths: Sequence[int] = REPEATED) -> list[int]:
    """Prompt tokens that a repeat must find in the cache; the last one is always computed again.

    Args:
        block_size: of one rank's attention in the engine that ran: releases round it up differently.
    """
    unit = block_size * next(blocks for releases, blocks in case.hit_units if is_among(release, releases))
    return [(length - 1) // unit * unit if unit else 0 for length in lengths]


def without_plugin(engine: Engine) -> Engine:
    """The same engine with the plugin filtered out: stock then needs to be told about cores."""
    cores = cpu_environment(engine.tp)["VLLM_CPU_OMP_THREADS_BIND"]
    return replace(engine, environment=(("VLLM_PLUGINS", ""), ("VLLM_CPU_OMP_THREADS_BIND", cores)))


def work() -> list[dict]:
    """Scored prompts, long generations, and prompts that are repeated."""
    repeats = {"prompts": [tokens(length, seed=2) for length in REPEATED], "max_tokens": 8}
    return [
        {"prompts": [tokens(length) for length in LENGTHS], "max_tokens": 8, "score_prompt": True},
        {"prompts": [tokens(length, seed=1) for length in (3, 90, 300, 1100)], "max_tokens": 64},
        repeats,
        repeats,
    ]
