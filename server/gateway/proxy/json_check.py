"""Is a body one JSON object? Without building it: a body of empty lists would cost seconds of the loop and 20 times its
size in memory, and a long prompt 20 times the time, if it were turned into Python objects only to be thrown away."""

from __future__ import annotations

import msgspec

from server.errors import BadRequest


class Fields(msgspec.Struct):
    """Any object: its fields are skipped, but checked. Those named are what the gateway looks at, as they were sent."""

    hotswap: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    max_tokens: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    max_completion_tokens: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    max_output_tokens: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    n: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    best_of: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET

    @property
    def has_wish(self) -> bool:
        """Whether the field `hotswap` was sent (terms.py)."""
        return self.hotswap is not msgspec.UNSET


NONE = Fields()  # of a request without a JSON body
_decoder = msgspec.json.Decoder(Fields)


def check_object(body: bytes) -> Fields:
    """What `body` has of them. Raises BadRequest if it is not a JSON object in UTF-8."""
    try:
        found = _decoder.decode(body)
        if not body.isascii():
            body.decode()
        return found
    except msgspec.ValidationError as exc:
        raise BadRequest("The body must be a JSON object.", code="invalid_json") from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise BadRequest(f"The body is not valid JSON: {exc}.", code="invalid_json") from exc
    except RecursionError as exc:
        raise BadRequest("The body is nested too deeply.", code="invalid_json") from exc
