# SPDX-License-Identifier: Apache-2.0
"""The scheduler side: block sizes, coordinator, prefill chunks, and what is refused before the weights load."""
