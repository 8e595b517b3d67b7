"""weightsync's errors as HTTP, in one table: code -> status and what to do about it.

The code is the key because errors arrive both as exceptions and, from the push process, as JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from server.errors import (
    BadRequest,
    Conflict,
    HttpError,
    InsufficientStorage,
    NotFound,
    Unavailable,
    Unprocessable,
    UpstreamTimeout,
)
from weightsync.errors import CODES, WeightSyncError

STATUS: dict[str, type[HttpError]] = {
    "store_unavailable": Unavailable,
    "store_refused": Unavailable,
    "store_lost": Unavailable,
    "store_closed": Unavailable,
    "ray_unavailable": Unavailable,
    "conflict": Conflict,
    "lease_lost": Unavailable,
    "watch_compacted": Unavailable,
    "record_error": HttpError,
    "record_refused": BadRequest,
    "arena_unavailable": InsufficientStorage,
    "arena_full": InsufficientStorage,
    "slot_busy": Conflict,
    "layout_pool_error": HttpError,
    "manifest_error": Unprocessable,
    "missing_tensor": Unprocessable,
    "unexpected_tensor": Unprocessable,
    "shape_mismatch": Unprocessable,
    "dtype_mismatch": Unprocessable,
    "digest_mismatch": Unprocessable,
    "unsupported_dtype": Unprocessable,
    "quantization_error": Unprocessable,
    "unsupported_vllm": HttpError,
    "tether_failed": HttpError,
    "not_finite": Unprocessable,
    "checksum_mismatch": Unprocessable,
    "parts_mismatch": Unprocessable,
    "config_mismatch": Unprocessable,
    "part_not_served": Unprocessable,
    "adapter_refused": HttpError,
    "checkpoint_error": BadRequest,
    "delta_error": Unprocessable,
    "unknown_base": Conflict,
    "remote_error": HttpError,
    "publish_error": HttpError,
    "bad_part": Unprocessable,
    "unknown_model": NotFound,
    "stale_publisher": Conflict,
    "draft_lost": Unavailable,
    "draft_closed": Conflict,
    "swap_aborted": Conflict,
    "swap_timeout": UpstreamTimeout,
    "staging_cancelled": Conflict,
    "fingerprint_mismatch": Conflict,
    "bad_split": BadRequest,
    "not_enough_instances": Conflict,
    "unknown_version": NotFound,
    "transport_unavailable": Unavailable,
    "peer_unreachable": Unavailable,
    "transfer_failed": Unavailable,
    "transfer_timed_out": UpstreamTimeout,
    "bad_bitmap": HttpError,
    "chunk_mismatch": HttpError,
    "copy_unavailable": Unavailable,
    "share_lost": HttpError,
    "no_holder": HttpError,
    "peer_refused": Unavailable,
    "host_name": HttpError,
    "tls_unavailable": HttpError,
    "bucket_error": BadRequest,
    "bucket_unavailable": Unavailable,
    "bucket_taken": Conflict,
    "version_needed": Conflict,
    "bucket_damaged": Unprocessable,
    "version_gone": NotFound,
    "persist_error": Unavailable,
    "signing_key_error": BadRequest,
    "version_refused": Unprocessable,
    "ledger_unavailable": Unavailable,
    "persist_full": InsufficientStorage,
    "version_lost": Conflict,
}
# Attributes of the errors that a program may want to read, beside the message that says what to do.
DETAILS = ("tensor", "expected", "got", "version", "reason", "file", "needed", "have", "free")


def to_http(error: WeightSyncError) -> HttpError:
    """The answer to `error`."""
    return from_fields({"code": error.code, "message": str(error), **{k: getattr(error, k, None) for k in DETAILS}})


def from_fields(fields: Mapping[str, Any]) -> HttpError:
    """The answer to an error in its JSON form: `code`, `message` and any of DETAILS."""
    code = str(fields.get("code", "weightsync_error"))
    kind = STATUS.get(code, HttpError)
    details = {name: fields[name] for name in DETAILS if fields.get(name) is not None}
    message = str(fields.get("message", "The checkpoint engine failed without saying why; see the gateway's log."))
    if kind is Unavailable:
        return Unavailable(message, code=code, retry_after_s=1, **details)
    return kind(message, code=code, details=details)


def table() -> str:
    """docs/errors.md has it."""
    rows = (f"| `{code}` | {STATUS[code].status} | {' | '.join(CODES[code])} |" for code in sorted(STATUS))
    return "\n".join(("| `code` | status | meaning | what to do |", "|---|---|---|---|", *rows))
