"""weightsync's errors as HTTP, in one table: code -> status and what to do about it.

The code is the key because errors arrive both as exceptions and, from the push process, as JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from server.errors import HttpError
from weightsync.error_codes import CODES
from weightsync.errors import WeightSyncError

_CODES = {
    400: "record_refused checkpoint_error bad_split bucket_error signing_key_error",
    404: "unknown_model unknown_version version_gone",
    409: "conflict slot_busy unknown_base stale_publisher draft_closed swap_aborted staging_cancelled "
         "fingerprint_mismatch not_enough_instances bucket_taken version_needed version_lost",
    422: "manifest_error missing_tensor unexpected_tensor shape_mismatch dtype_mismatch digest_mismatch "
         "unsupported_dtype quantization_error not_finite checksum_mismatch parts_mismatch config_mismatch "
         "part_not_served delta_error bad_part bucket_damaged version_refused",
    500: "record_error layout_pool_error unsupported_vllm tether_failed adapter_refused remote_error "
         "publish_error bad_bitmap chunk_mismatch share_lost no_holder host_name tls_unavailable "
         "engine_call_failed engine_died staging_failed unsupported_model",
    503: "store_unavailable store_refused store_lost store_closed ray_unavailable lease_lost watch_compacted "
         "draft_lost transport_unavailable peer_unreachable transfer_failed copy_unavailable peer_refused "
         "bucket_unavailable persist_error ledger_unavailable",
    504: "swap_timeout transfer_timed_out",
    507: "arena_unavailable arena_full persist_full",
}  # fmt: skip
STATUS = {code: status for status, codes in _CODES.items() for code in codes.split()}
# Attributes of the errors that a program may want to read, beside the message that says what to do.
DETAILS = ("tensor", "expected", "got", "version", "reason", "file", "needed", "have", "free")


def to_http(error: WeightSyncError) -> HttpError:
    """The answer to `error`."""
    return from_fields({"code": error.code, "message": str(error), **{k: getattr(error, k, None) for k in DETAILS}})


def from_fields(fields: Mapping[str, Any]) -> HttpError:
    """The answer to an error in its JSON form: `code`, `message` and any of DETAILS."""
    code = str(fields.get("code", "weightsync_error"))
    status = STATUS.get(code, 500)
    details = {name: fields[name] for name in DETAILS if fields.get(name) is not None}
    message = str(fields.get("message", "The checkpoint engine failed without saying why; see the gateway's log."))
    return HttpError(status, message, code=code, details=details)


def table() -> str:
    """docs/errors.md has it."""
    rows = (f"| `{code}` | {STATUS[code]} | {' | '.join(CODES[code])} |" for code in sorted(STATUS))
    return "\n".join(("| `code` | status | meaning | what to do |", "|---|---|---|---|", *rows))
