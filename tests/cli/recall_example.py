# SPDX-License-Identifier: Apache-2.0
"""What a recall model says of its task."""

from __future__ import annotations

RECALL = {
    "format": 1,
    "task": "key-value recall",
    "max_length": 2048,
    "words": [8, 256],
    "key_length": 2,
    "value_length": 3,
    "fact": [2, "key", 3, "value"],
    "question": [4, "key", 5],
    "answer": ["value", 1],
}
