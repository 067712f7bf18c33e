"""Plain HTTP for `verify` and `doctor`: one request at a time, each with a deadline, never through a proxy.

A failure on the way is a `TransportError`. A response with an error status is a response. Blocking.
"""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from kvtally.errors import TransportError

MOST_BYTES = 64 << 20
MOST_LINE = 1 << 20
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Response(NamedTuple):
    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes


class Server:
    """A server's base address, and the API key to send."""

    def __init__(self, url: str, *, key: str = "", timeout_s: float) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        self._timeout_s = timeout_s

    def stream(self, path: str, body: Mapping[str, object]) -> tuple[Response, float]:
        """POST of a body; the whole answer, and after how many seconds its first event came."""
        started_s = time.monotonic()
        first_s = 0.0
        content = bytearray()
        try:
            request = urllib.request.Request(self.url + path, msgspec.json.encode(body), self._headers)
            with _opener.open(request, timeout=self._timeout_s) as response:
                while (line := response.readline(MOST_LINE)) and len(content) <= MOST_BYTES:
                    content += line
                    waited_s = time.monotonic() - started_s
                    if not first_s and line.strip():
                        first_s = waited_s
                    if waited_s > self._timeout_s:
                        raise TimeoutError(f"it was not over after {self._timeout_s:g} s")
                headers = {name.lower(): value for name, value in response.headers.items()}
                return Response(response.status, headers, bytes(content)), first_s
        except urllib.error.HTTPError as error:
            with error:
                return _response(error.code, error), time.monotonic() - started_s
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise self._unanswered(path, error) from error

    def call(self, path: str, body: Mapping[str, object] | None = None) -> Response:
        """GET, or POST if there is a body. Raises TransportError if no complete response arrives."""
        content = msgspec.json.encode(body) if body is not None else None
        try:
            request = urllib.request.Request(self.url + path, content, self._headers)
            with _opener.open(request, timeout=self._timeout_s) as response:
                return _response(response.status, response)
        except urllib.error.HTTPError as error:
            with error:
                return _response(error.code, error)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise self._unanswered(path, error) from error

    def _unanswered(self, path: str, error: Exception) -> TransportError:
        what = error.reason if isinstance(error, urllib.error.URLError) else error
        return TransportError(
            f"{self.url}{path} did not answer: {what or type(error).__name__}",
            remedy="Check the address, http://HOST:PORT, and that it can be reached from here.",
        )


def _response(status: int, response: http.client.HTTPResponse | urllib.error.HTTPError) -> Response:
    body = response.read(MOST_BYTES)
    return Response(status, {name.lower(): value for name, value in response.headers.items()}, body)
