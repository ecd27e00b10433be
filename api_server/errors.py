"""What a client is told when something is wrong: one exception type per thing that is treated differently.

All become OpenAI's error shape, `{"error": {"message", "type", "param", "code"}}`, on every path.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from starlette.responses import Response

RETRY_AFTER_S = 1


class ApiError(Exception):
    """An answer other than success. `message` is a sentence for the client and holds nothing internal."""

    status = 500
    kind = "server_error"
    code: str | None = None
    retry = False

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.code
        self.details = details or {}

    def body(self) -> bytes:
        """The error as JSON, for a response or for a stream that has begun."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code, **self.details}
        return orjson.dumps({"error": error})

    def response(self) -> Response:
        headers = {"retry-after": str(RETRY_AFTER_S)} if self.retry else None
        return Response(self.body(), self.status, headers, "application/json")


class BadRequestError(ApiError):
    """The client must change the request. `param` names the field."""

    status = 400
    kind = "invalid_request_error"


class HttpError(ApiError):
    """What routing itself finds: unknown path, wrong method."""

    kind = "invalid_request_error"

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers
        if status >= 500:
            self.kind = "server_error"

    def response(self) -> Response:
        return Response(self.body(), self.status, self.headers, "application/json")


class BodyTooLargeError(ApiError):
    status = 413
    kind = "invalid_request_error"
    code = "body_too_large"


class ModelNotFoundError(ApiError):
    status = 404
    kind = "invalid_request_error"
    code = "model_not_found"

    def __init__(self, name: str, served: tuple[str, ...]) -> None:
        super().__init__(f"The model {name!r} does not exist here; this server has {', '.join(served)}.", param="model")


class InternalError(ApiError):
    """Our own fault; the log has the rest."""

    code = "internal_error"

    def __init__(self, message: str = "The server failed to answer this request; its log says why.") -> None:
        super().__init__(message)


class UnavailableError(ApiError):
    """Nothing is wrong with the request; the same one may succeed later or elsewhere."""

    status = 503
    retry = True
    code = "unavailable"


class OverloadedError(UnavailableError):
    """The queue is full."""

    code = "overloaded"


class DrainingError(UnavailableError):
    code = "draining"

    def __init__(self) -> None:
        super().__init__("This server is shutting down.")


class NotReadyError(UnavailableError):
    """The model is being loaded, or no engine answers. `details` hold `phase` and `progress`."""

    code = "not_ready"
