"""The proxy's own errors, as OpenAI error objects of type ``compaction_proxy_error``.

::

    ProxyError                  500
    ├── ClientError             the request's fault
    │   ├── BadRequest          400
    │   ├── Unauthorized        401
    │   ├── Forbidden           403
    │   ├── NotFound            404
    │   ├── Expired             410
    │   ├── BodyTooLarge        413
    │   └── LoopDetected        508
    └── UpstreamError           the provider's fault
        ├── UpstreamUnreachable 502
        └── UpstreamTimeout     504
"""

from __future__ import annotations

import json
from typing import ClassVar


class ProxyError(Exception):
    """Knows the HTTP status it becomes. The message is shown to clients: no key and no message text in it."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def to_response_bytes(self) -> bytes:
        error = {"message": self.message, "type": "compaction_proxy_error", "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()


class ClientError(ProxyError):
    pass


class BadRequest(ClientError):
    status = 400
    code = "bad_request"


class Unauthorized(ClientError):
    status = 401
    code = "invalid_api_key"


class Forbidden(ClientError):
    status = 403
    code = "forbidden"


class NotFound(ClientError):
    status = 404
    code = "not_found"


class Expired(ClientError):
    status = 410
    code = "expired"


class BodyTooLarge(ClientError):
    status = 413
    code = "body_too_large"


class LoopDetected(ClientError):
    status = 508
    code = "loop_detected"


class UpstreamError(ProxyError):
    pass


class UpstreamUnreachable(UpstreamError):
    status = 502
    code = "upstream_unreachable"


class UpstreamTimeout(UpstreamError):
    status = 504
    code = "upstream_timeout"
