"""What gRPC and etcd report, as this project's errors. The one boundary: no gRPC error leaves the store.

What passes through unmapped is what has a meaning to the call that was made: NOT_FOUND (a lease has ended) and
OUT_OF_RANGE (a revision that is compacted, or not there yet).
"""

from __future__ import annotations

from typing import Any

from grpc import StatusCode

from weightsync.errors import StoreRefused, StoreUnavailable
from weightsync.store.etcd_url import EtcdUrl

MEANT_FOR_THE_CALLER = (StatusCode.NOT_FOUND, StatusCode.OUT_OF_RANGE)
STALE_TOKEN = ("invalid auth token", "revision of auth store is old")
TRY_ELSEWHERE = (StatusCode.UNAVAILABLE, StatusCode.DEADLINE_EXCEEDED, StatusCode.INTERNAL, StatusCode.UNKNOWN)
# gRPC says so when no connection could be made: the request has not been sent, and may go to another member.
NOT_SENT = "failed to connect to all addresses"

# Parts of what they say, and what to do. After these, trying again helps only once somebody has changed something.
REFUSALS = {
    "invalid user ID or password": "Check user= in the URL and the password in its file",
    "authentication is not enabled": "Leave user= out of the URL, or turn authentication on in etcd",
    "user name is empty": "This etcd wants a user: add ?user=NAME&password_file=/path to the URL",
    "permission denied": "Grant the role of this user read and write on the prefix {namespace!r}",
    "Hostname Verification Check failed": "Reach etcd under a name that is in its certificate",
    "WRONG_VERSION_NUMBER": "It does not speak TLS: leave ca= out of the URL",
    "handshake failed": "Pass as ca= the authority that signed etcd's certificate",
    "security handshaker": "Check that the files of ca=, cert= and key= are PEM and belong together",
    "TSI_DATA_CORRUPTED": "It does not accept this client: name a certificate that it trusts, &cert=/path&key=/path",
    "too many operations in txn": "Start etcd with a larger --max-txn-ops",
    "request is too large": "Start etcd with a larger --max-request-bytes",
    "database space exceeded": "Compact and defragment etcd, disarm its alarm, and set --auto-compaction-retention",
}
PLAIN = "Is etcd restarting? If it speaks TLS, add ?ca=/path to the URL"
WITH_TLS = "Is etcd restarting? If it does not speak TLS, leave ca= out of the URL"
OUTAGES = {
    "Connection refused": "Is etcd running there?",
    "no leader": "The cluster has no leader: are most of its members up and connected?",
    "before receiving SETTINGS": "Look whether etcd hangs, or something else listens there",
    "DNS resolution failed": "Check the host name in the URL",
}


def translate(error: Any, url: EtcdUrl) -> StoreUnavailable:
    """The StoreUnavailable, or StoreRefused, for a gRPC error."""
    details = str(error.details() or error.code().name)
    for text, advice in REFUSALS.items():
        if text in details:
            return StoreRefused(url.text, details, advice.format(namespace=url.namespace))
    if error.code() is StatusCode.DEADLINE_EXCEEDED:
        return unanswered(url)
    if "Socket closed" in details or "Connection reset" in details:
        return StoreUnavailable(url.text, details, WITH_TLS if "ca" in url.options else PLAIN)
    advice = next((advice for text, advice in OUTAGES.items() if text in details), "Look at the log of etcd")
    return StoreUnavailable(url.text, details, advice)


def unanswered(url: EtcdUrl) -> StoreUnavailable:
    advice = "Look whether etcd hangs, its disk is slow or a firewall is in between"
    return StoreUnavailable(url.text, "no answer in time", advice)


def closed(url: EtcdUrl) -> StoreUnavailable:
    return StoreUnavailable(url.text, "this client was closed", "Open the store again")
