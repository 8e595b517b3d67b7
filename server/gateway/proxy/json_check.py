"""Is a body one JSON object? Without building it: a body of empty lists would cost seconds of the loop and 20 times its
size in memory, and a long prompt 20 times the time, if it were turned into Python objects only to be thrown away."""

from __future__ import annotations

import msgspec

from server.errors import BadRequest


class _Object(msgspec.Struct):
    """Any object: its fields are skipped, but checked. `hotswap` is for admission.py."""

    hotswap: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_decoder = msgspec.json.Decoder(_Object)


def check_object(body: bytes) -> bool:
    """Whether `body` has a field `hotswap`. Raises BadRequest if it is not a JSON object in UTF-8."""
    try:
        found = _decoder.decode(body)
        if not body.isascii():
            body.decode()
        return found.hotswap is not msgspec.UNSET
    except msgspec.ValidationError as exc:
        raise BadRequest("The body must be a JSON object.", code="invalid_json") from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise BadRequest(f"The body is not valid JSON: {exc}.", code="invalid_json") from exc
    except RecursionError as exc:
        raise BadRequest("The body is nested too deeply.", code="invalid_json") from exc
