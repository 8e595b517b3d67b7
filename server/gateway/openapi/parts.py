"""The parts that routes of a document share: errors, headers, keys. Values are OpenAPI 3.1 objects."""

from __future__ import annotations

from typing import Any

import msgspec

from server.answers.feedback import FeedbackRequest
from server.gateway.terms import Wish
from server.key_limits import RATE_HEADERS

Json = dict[str, Any]

ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string", "description": "What is wrong, and what to do about it."},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "The field or header to blame."},
                "code": {
                    "type": ["string", "integer", "null"],
                    "description": "A word where the gateway answers, the status where vLLM does.",
                },
            },
        }
    },
}
STATUSES = {
    "400": "The request is not what HTTP or the route allows.",
    "401": "No key, or one that is not known, has expired or was revoked.",
    "403": "A good key that may not do this.",
    "404": "There is no such thing here: route, model, response, version, pause, instance or key.",
    "405": "The path is served with other methods; `Allow` names them.",
    "408": "The request did not arrive in time.",
    "409": "The state of the fleet does not allow it, or the weights changed under an answer that was not to see it.",
    "413": "The body is too large.",
    "422": "Well formed, but it cannot be done.",
    "429": "This key asks for more than it may.",
    "431": "The head is too large.",
    "500": "A fault of the server; it is in its log.",
    "501": "The served model, or this server, does not do this.",
    "502": "The instance answered nonsense, or died before its first byte.",
    "503": "No instance can take the request now.",
    "504": "Its turn, a version or an answer did not come in time.",
    "507": "No room for one more version.",
}
RETRY_AFTER = ("429", "503", "504")
EVERY = ("400", "404", "405", "408", "413", "431", "500", "503")
HEADERS: dict[str, Json] = {
    "x-request-id": {
        "required": True,
        "description": "The client's own if it is 1 to 128 characters of `A-Za-z0-9._-`, else a new one.",
        "schema": {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,128}$"},
    },
    "x-hotswap-weight-version": {
        "description": "The version of the weights when the answer began.",
        "schema": {"type": "integer", "minimum": 1},
    },
    "retry-after": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 0}},
    "www-authenticate": {"schema": {"type": "string"}},
    "allow": {"schema": {"type": "string"}},
    **{
        name: {
            "description": f"Of this key: {limit.help}.",
            "schema": {"type": "string" if name.startswith("x-ratelimit-reset-") else "integer"},
        }
        for name, limit in RATE_HEADERS.items()
    },
}


def header_refs(*names: str) -> Json:
    """References to some of HEADERS."""
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def error_responses(statuses: tuple[str, ...]) -> Json:
    """References to the answers with these statuses."""
    return {status: {"$ref": f"#/components/responses/Error{status}"} for status in sorted(statuses)}


def components() -> Json:
    """Everything the references here point at."""
    security = {
        "bearer": {"type": "http", "scheme": "bearer", "description": "`Authorization: Bearer KEY`"},
        "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "As Anthropic's clients do."},
    }
    _, bodies = msgspec.json.schema_components([FeedbackRequest, Wish], ref_template="#/components/schemas/{name}")
    return {
        "schemas": {**bodies, "Error": ERROR},
        "responses": {f"Error{status}": _error(status, text) for status, text in STATUSES.items()},
        "headers": HEADERS,
        "parameters": parameters(),
        "securitySchemes": security,
    }


def parameters() -> dict[str, Json]:
    """Request headers of every forwarded POST route, by name."""
    found = {}
    for field, told in msgspec.json.schema_components([Wish])[1]["Wish"]["properties"].items():
        name = "x-hotswap-" + field.replace("_", "-")
        found[name] = {"name": name, "in": "header", "description": told["description"], "schema": told["anyOf"][0]}
    session = "Requests with the same word go to the same instance while it has room."
    found["x-session-id"] = {"name": "x-session-id", "in": "header", "description": session}
    found["x-session-id"]["schema"] = {"type": "string"}
    return found


def _error(status: str, text: str) -> Json:
    names = ["x-request-id"]
    names += ["retry-after"] if status in RETRY_AFTER else []
    names += ["www-authenticate"] if status == "401" else []
    names += ["allow"] if status == "405" else []
    names += RATE_HEADERS if status == "429" else []
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {"description": text, "headers": header_refs(*names), "content": content}
