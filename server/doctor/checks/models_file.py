"""The file of models that a gateway is to serve (docs/models.md), and whether what it names is there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx

from server.doctor.registry import Finding, check, fail, ok, skip, warn
from server.doctor.world import World
from server.errors import CliError, ConfigError
from server.gateway.models.file import External, ModelEntry, ModelsFile, read
from server.up.paths import resolve_model
from weightsync import open_store
from weightsync.control.records import Keys
from weightsync.errors import StoreError

TIMEOUT_S = 5.0


@check("models-file", "the file of `--models`: its text, checkpoints, instances, versions and upstreams")
def models_file(world: World) -> Iterator[Finding]:
    if world.models is None:
        yield skip("no file of models is named: pass --models FILE")
        return
    try:
        file = read(world.models)
    except ConfigError as error:
        yield fail(str(error), "See docs/models.md")
        return
    yield ok(
        f"{world.models}: {len(file.own)} model(s), {len(file.external)} upstream(s), {len(file.aliases)} alias(es)"
    )
    for entry in file.own.values():
        if entry.checkpoint:
            yield _checkpoint(entry)
    yield from _serving(world.store, file)
    for external in file.external.values():
        yield _upstream(external)


def _checkpoint(entry: ModelEntry) -> Finding:
    """A name of the hub is left to `up`, which fetches it."""
    if not Path(entry.checkpoint).expanduser().exists() and not entry.checkpoint.startswith((".", "/", "~")):
        return ok(f"{entry.name}: `up` fetches {entry.checkpoint}")
    try:
        return ok(f"{entry.name}: the checkpoint is {resolve_model(entry.checkpoint)}")
    except CliError as error:
        return fail(f"{entry.name}: {error}", "Name a directory with config.json and *.safetensors")


def _serving(url: str | None, file: ModelsFile) -> Iterator[Finding]:
    """Of the models that `up` does not start. Nothing where no store is named, or none can be read (see `store`)."""
    elsewhere = [entry.name for entry in file.own.values() if not entry.checkpoint]
    if url is None or not elsewhere:
        return
    try:
        found = asyncio.run(_registered(url, elsewhere))
    except StoreError:
        return
    for name, (instances, active) in found.items():
        push = f"`python -m weightsync.push --store URL --model {name} DIR`"
        start = f"`hotswap instance --store URL --model DIR --name {name}`"
        if not active:
            yield warn(f"{name}: no version was ever committed", f"Publish one: {push}")
        if not instances:
            yield warn(f"{name}: no instance is registered in the store", f"Start one: {start}")
        if active and instances:
            yield ok(f"{name}: {instances} instance(s), and a version")


async def _registered(url: str, names: list[str]) -> dict[str, tuple[int, bool]]:
    """By model how many instances there are, and whether a version was committed."""
    store = open_store(url, create=False)
    try:
        return {
            name: (len((await store.list(keys.instances))[0]), await store.get(keys.active) is not None)
            for name in names
            for keys in [Keys(name)]
        }
    finally:
        await store.close()


def _upstream(external: External) -> Finding:
    """Asked for its models, with the gateway's key, as the gateway would ask it."""
    where = f"{external.name}: {external.entry.url}"
    headers = {"authorization": f"Bearer {external.key}"} if external.key else {}
    try:
        verify = external.tls if external.tls is not None else True
        answer = httpx.get(
            f"{external.entry.url.rstrip('/')}/models", headers=headers, timeout=TIMEOUT_S, verify=verify
        )
    except httpx.HTTPError as error:
        return fail(
            f"{where} cannot be reached ({error or type(error).__name__})", "Look at url, ca-file and the network"
        )
    if answer.status_code in (401, 403):
        return fail(f"{where} does not take the key ({answer.status_code})", "Look at api-key-file or api-key-env")
    if answer.is_error:
        return warn(
            f"{where} answers {answer.status_code} for its models", "Look at url: it ends in /v1 for most servers"
        )
    try:
        models = [str(model["id"]) for model in answer.json()["data"]]
    except (ValueError, KeyError, TypeError):
        return warn(f"{where} answers /models with something else than OpenAI's list", "Look at url")
    if external.model not in models:
        return warn(
            f"{where} does not list {external.model}", f"It lists {', '.join(models[:5]) or 'none'}; look at model"
        )
    return ok(f"{where} answers, and lists {external.model}")
