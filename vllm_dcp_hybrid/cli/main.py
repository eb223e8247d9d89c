# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-dcp-hybrid`: arguments only; each command's work is in a module of its own, imported when it runs."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Optional

import typer

from vllm_dcp_hybrid import __version__
from vllm_dcp_hybrid.tiny_models.architectures import ATTENTION_INTERVAL, TINY_MODELS

app = typer.Typer(
    name="vllm-dcp-hybrid",
    help="Decode Context Parallelism for hybrid models on stock vLLM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
