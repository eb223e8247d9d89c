# SPDX-License-Identifier: Apache-2.0
"""A client of one local OpenAI-compatible server, on the standard library: a proxy in the environment is not asked."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

_HEALTH_SECONDS = 2.0


class RequestFailed(RuntimeError):
    """The server refused a request, or did not answer in time."""


class Client:
    """Requests to ``http://host:port``.

    Args:
        timeout: longest silence of the server, seconds.
    """

    def __init__(self, host: str, port: int, timeout: float = 120.0) -> None:
        self._host, self._port, self._timeout = host, port, timeout

    def is_healthy(self) -> bool:
        """Whether the server answers ``/health``."""
        try:
            with self._open("GET", "/health", timeout=_HEALTH_SECONDS) as response:
                return response.status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False

    def post(self, path: str, body: Mapping[str, Any], timeout: float | None = None) -> dict[str, Any]:
        """The JSON answer to a JSON request, after `timeout` seconds of silence at most; the client's own if None.

        Raises:
            RequestFailed: no answer, or not status 200.
        """
        with self._checked("POST", path, body, timeout) as response:
            answer: dict[str, Any] = json.loads(response.read())
        return answer

    def stream_text(self, body: Mapping[str, Any]) -> Iterator[str]:
        """The pieces of text of one completion, as server-sent events bring them.

        Raises:
            RequestFailed: no answer, or not status 200.
        """
        with self._checked("POST", "/v1/completions", {**body, "stream": True}) as response:
            for line in response:
                data = line.decode().strip().removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                if data:
                    for choice in json.loads(data).get("choices", ()):
                        yield str(choice["text"])

    def metrics(self) -> str:
        """The text of ``/metrics``.

        Raises:
            RequestFailed: no answer, or not status 200.
        """
        with self._checked("GET", "/metrics", None) as response:
            return response.read().decode()

    @contextlib.contextmanager
    def _checked(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout: float | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        try:
            with self._open(method, path, body, timeout=timeout or self._timeout) as response:
                if response.status != http.client.OK:
                    answer = response.read(2000).decode(errors="replace")
                    raise RequestFailed(f"{path}: status {response.status}: {answer}")
                yield response
        except (OSError, http.client.HTTPException) as error:
            raise RequestFailed(f"{path}: {type(error).__name__}: {error}") from error

    @contextlib.contextmanager
    def _open(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout: float
    ) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout)
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, {"Content-Type": "application/json"} if content else {})
            with connection.getresponse() as response:
                yield response
        finally:
            connection.close()


def metric_total(metrics: str, name: str) -> float:
    """The sum of a metric over its label sets; 0 where it is missing."""
    pattern = re.compile(rf"^{re.escape(name)}(?:_total)?(?:{{.*}})? (\S+)$", re.MULTILINE)
    return sum(float(value) for value in pattern.findall(metrics))
