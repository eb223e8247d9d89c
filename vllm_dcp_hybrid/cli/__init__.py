# SPDX-License-Identifier: Apache-2.0
"""The command line: `vllm-dcp-hybrid`.  No module here imports torch or vLLM."""
