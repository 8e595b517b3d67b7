"""The least role that each route of the admin port needs: one table, read before a body is.

    viewer      reads what is there; nobody shows secrets
    operator    works the fleet: drains, pauses and wakes instances, activates published versions and rolls back
    publisher   brings new weights, as trainers do, too
    admin       makes and revokes keys, too

A role may do what the roles before it may. A key has roles among its scopes (records.py); a token of an OpenID Connect
issuer has those that its claims stand for (oidc.py). A gateway does not start with a route that is missing here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from server.gateway.config import ROLES, Role

NEEDED: Final[Mapping[str, Role]] = {
    "GET /openapi.json": "viewer",
    "GET /admin/weights": "viewer",
    "POST /admin/weights": "publisher",
    "POST /admin/weights/activate": "operator",
    "POST /admin/weights/rollback": "operator",
    "POST /admin/weights/split": "operator",
    "DELETE /admin/weights/split": "operator",
    "GET /admin/weights/active": "viewer",
    "GET /admin/weights/diff": "operator",
    "GET /admin/weights/schema": "viewer",
    "POST /admin/weights/upload": "publisher",
    "GET /admin/editions": "viewer",
    "POST /admin/editions": "publisher",
    "PUT /admin/editions/{number}": "operator",
    "DELETE /admin/editions/{number}": "operator",
    "GET /admin/swap": "viewer",
    "GET /admin/swaps": "viewer",
    "GET /admin/ledger": "viewer",
    "GET /admin/releases": "viewer",
    "POST /admin/releases": "operator",
    "POST /admin/releases/cancel": "operator",
    "GET /admin/releases/policies": "viewer",
    "PUT /admin/releases/policies/{name}": "admin",
    "DELETE /admin/releases/policies/{name}": "admin",
    "GET /admin/models": "viewer",
    "POST /admin/models/reload": "admin",
    "GET /admin/policy": "viewer",
    "PUT /admin/policy": "admin",
    "GET /admin/approvals": "viewer",
    "POST /admin/approvals/{pending_id}": "operator",
    "DELETE /admin/approvals/{pending_id}": "operator",
    "GET /admin/instances": "viewer",
    "POST /admin/instances/{instance_id}/drain": "operator",
    "POST /admin/instances/{instance_id}/resume": "operator",
    "POST /admin/instances/{instance_id}/sleep": "operator",
    "POST /admin/instances/{instance_id}/wake": "operator",
    "GET /admin/sleep": "viewer",
    "GET /admin/pause": "viewer",
    "POST /admin/pause": "operator",
    "POST /admin/pause/{pause_id}/renew": "operator",
    "DELETE /admin/pause/{pause_id}": "operator",
    "GET /admin/series": "viewer",
    "POST /admin/training/metrics": "publisher",
    "GET /admin/keys": "viewer",
    "POST /admin/keys": "admin",
    "POST /admin/keys/inference/open": "admin",
    "GET /admin/keys/{key_id}": "viewer",
    "PATCH /admin/keys/{key_id}": "admin",
    "DELETE /admin/keys/{key_id}": "admin",
    "POST /admin/keys/{key_id}/rotate": "admin",
    # vLLM's routes for trainers
    "POST /init_weight_transfer_engine": "publisher",
    "POST /shutdown_weight_transfer_engine": "publisher",
    "POST /start_weight_update": "publisher",
    "POST /update_weights": "publisher",
    "POST /finish_weight_update": "publisher",
    "POST /v1/load_lora_adapter": "publisher",
    "POST /skyrl/v1/load_lora_adapter": "publisher",
    "POST /v1/unload_lora_adapter": "publisher",
    "POST /start_draft_weight_update": "publisher",
    "POST /pause": "operator",
    "POST /resume": "operator",
    "GET /is_paused": "viewer",
    "GET /weight_info": "viewer",
    "GET /get_world_size": "viewer",
    "GET /server_info": "viewer",
    "POST /reset_prefix_cache": "operator",
    "POST /abort_requests": "operator",
    "POST /collective_rpc": "publisher",
    # SGLang's
    "POST /begin_weight_update": "publisher",
    "POST /end_weight_update": "publisher",
    "POST /update_weights_from_disk": "publisher",
    "POST /load_lora_adapter": "publisher",
    "POST /unload_lora_adapter": "publisher",
    "POST /update_weights_from_tensor": "publisher",
    "POST /pause_generation": "operator",
    "POST /continue_generation": "operator",
    "GET /flush_cache": "operator",
    "POST /flush_cache": "operator",
    "GET /get_model_info": "viewer",
    "GET /model_info": "viewer",
    "GET /health_generate": "viewer",
    "POST /abort_request": "operator",
    "POST /update_weight_version": "publisher",
    "POST /init_weights_update_group": "publisher",
    "POST /destroy_weights_update_group": "publisher",
    "POST /update_weights_from_distributed": "publisher",
    "POST /update_weights_from_ipc": "publisher",
    "POST /init_weights_send_group_for_remote_instance": "publisher",
    "POST /send_weights_to_remote_instance": "publisher",
    "GET /release_memory_occupation": "operator",
    "POST /release_memory_occupation": "operator",
    "GET /resume_memory_occupation": "operator",
    "POST /resume_memory_occupation": "operator",
}
FORWARDED: Final[Role] = "operator"  # vLLM's routes between machines, which the gateway forwards from the admin port

_TEMPLATES: Final = tuple(
    (re.compile(re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(route))), role)
    for route, role in NEEDED.items()
    if "{" in route
)


def needed(method: str, path: str) -> Role:
    """The role that a request needs; the highest where no route is found, so that no odd spelling asks for less."""
    asked = f"{method} {path}"
    exact = NEEDED.get(asked)
    if exact is not None:
        return exact
    return next((role for template, role in _TEMPLATES if template.fullmatch(asked)), "admin")


def undeclared(routes: Iterable[tuple[str, str]]) -> list[str]:
    """Those of `routes` (method, path template) that NEEDED does not have."""
    return sorted({f"{method} {path}" for method, path in routes} - NEEDED.keys())


def table() -> str:
    """NEEDED as Markdown, for docs/security.md."""
    routes = {role: [f"`{route}`" for route, least in NEEDED.items() if least == role] for role in ROLES}
    rows = [f"| `{role}` | {', '.join(listed)} |" for role, listed in routes.items()]
    return "\n".join(["| least role | route |", "|---|---|", *rows])
