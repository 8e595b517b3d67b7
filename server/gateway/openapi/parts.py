"""The parts that routes of a document share: errors, headers, keys. Values are OpenAPI 3.1 objects."""

from __future__ import annotations

from typing import Any

import msgspec

from server.answers.feedback import FeedbackRequest
from server.gateway.terms import MAX_FINISH_S, MAX_WAIT_S
from server.key_limits import MAX_PRIORITY, MIN_PRIORITY, RATE_HEADERS

Json = dict[str, Any]

VERSION: Json = {"type": "integer", "minimum": 1, "maximum": 2**63 - 1}
WISHES: dict[str, tuple[Json, str]] = {
    "policy": (
        {"type": "string", "enum": ["keep", "recompute", "finish", "abort"]},
        "What a change of the weights in the middle of the answer does to it.",
    ),
    "finish_s": (
        {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_FINISH_S},
        "Seconds a swap waits for this request; with policy finish, or a version.",
    ),
    "version": (VERSION, "Only this version of the weights may answer; not with policy keep or recompute."),
    "min_version": (VERSION, "Only this version or a later one may answer."),
    "wait_s": (
        {"type": "number", "minimum": 0, "maximum": MAX_WAIT_S},
        "Seconds to wait for such a version; with version or min_version.",
    ),
    "priority": (
        {"type": "integer", "minimum": MIN_PRIORITY, "maximum": MAX_PRIORITY},
        "Class in the queue; the lowest goes first, and the key says what is the lowest allowed.",
    ),
    "deadline_s": (
        {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_WAIT_S},
        "Seconds in which the request must get to an instance.",
    ),
    "failover": (
        {"type": "string", "enum": ["same", "any", "off"]},
        "Which instance may resume this stream if its own dies: one of the same version, any, or none.",
    ),
}

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
    wish = {name: {"anyOf": [schema, {"type": "null"}], "description": text} for name, (schema, text) in WISHES.items()}
    _, feedback = msgspec.json.schema_components([FeedbackRequest], ref_template="#/components/schemas/{name}")
    return {
        "schemas": {
            **feedback,
            "Error": ERROR,
            "Wish": {
                "type": "object",
                "description": "What a request asks of swaps and the queue; taken out before vLLM sees the body.",
                "properties": wish,
                "additionalProperties": False,
            },
        },
        "responses": {f"Error{status}": _error(status, text) for status, text in STATUSES.items()},
        "headers": HEADERS,
        "parameters": parameters(),
        "securitySchemes": security,
    }


def parameters() -> dict[str, Json]:
    """Request headers of every forwarded POST route, by name."""
    found = {}
    for field, (schema, text) in WISHES.items():
        name = "x-hotswap-" + field.replace("_", "-")
        found[name] = {"name": name, "in": "header", "description": text, "schema": schema}
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
