# SPDX-License-Identifier: Apache-2.0
"""Attention under DCP: local partial results, their exchange and their combination."""
