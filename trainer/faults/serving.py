"""Taking the serving side back to a version, through the gateway's admin port."""

from __future__ import annotations

import httpx

from trainer.config import TelemetryConfig
from trainer.connection import Bearer, verify
from trainer.errors import PublishError

ROUTE = "/admin/weights/rollback"


def roll_back_serving(config: TelemetryConfig, version: int, timeout_s: float) -> None:
    """Serve `version` again; returns when the whole fleet does. `config` says where the admin port is and its key.

    Raises PublishError when the gateway refuses (the version may no longer be held) or does not answer.
    """
    url, key = config.admin_url.rstrip("/") + ROUTE, Bearer(config.admin_key)
    try:
        answer = httpx.post(url, json={"version": version}, auth=key, verify=verify(config), timeout=timeout_s)
    except httpx.HTTPError as error:
        raise PublishError(f"the gateway's admin port does not answer: {error or type(error).__name__}") from error
    if answer.is_error:
        raise PublishError(f"the gateway would not go back to version {version}: {answer.text[:300]}")
