"""Requests to an engine over HTTP, with JSON in both directions."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from flextrain import ConfigError

from .manifest import PublishError


class Server:
    """An engine's server.

    Args:
        url: such as ``http://localhost:8000``.
        timeout_s: seconds that one answer may take.
        headers: sent with every request, such as an Authorization.

    Raises:
        ConfigError: the URL is none of http or https.
    """

    def __init__(self, url: str, timeout_s: float = 600.0, headers: dict[str, str] | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f'url: "{url}" is not allowed, give one such as http://localhost:8000')
        self.url, self.timeout_s, self._headers = url.rstrip("/"), timeout_s, dict(headers or {})

    def post(self, path: str, body: Any = None) -> Any:
        """Send a value; return the answer, None if it is empty.

        Raises:
            PublishError: the server cannot be reached, or refuses.
        """
        return self._request(path, json.dumps({} if body is None else body).encode())

    def get(self, path: str) -> Any:
        """Like ``post``, of a question."""
        return self._request(path, None)

    def _request(self, path: str, data: bytes | None) -> Any:
        headers = {"Content-Type": "application/json", **self._headers}
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as answer:
                text = answer.read()
            return json.loads(text) if text.strip() else None
        except urllib.error.HTTPError as error:
            said = " ".join(error.read().decode(errors="replace").split())[:300]
            raise PublishError(f"{self.url}{path}: answers {error.code}, {said or error.reason}") from None
        except (OSError, ValueError) as error:
            raise PublishError(f"{self.url}{path}: {getattr(error, 'reason', None) or error}") from None
