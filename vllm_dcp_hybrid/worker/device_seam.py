# SPDX-License-Identifier: Apache-2.0
"""The moment after a worker's ``init_device``: groups and the distributed store exist, the model does not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def after_init_device(worker: Any, then: Callable[[], object]) -> None:
    """Give a worker that is being made its own ``init_device``, which calls `then` last."""
    init_device = worker.init_device

    @functools.wraps(init_device)
    def init_device_and_more(*args: Any, **kwargs: Any) -> Any:
        result = init_device(*args, **kwargs)
        then()
        return result

    worker.init_device = init_device_and_more
