"""Roles in etcd: one for each kind of process, with no more rights to keys than its work needs.

    gateway     coordinates swaps, publishes what is uploaded, keeps API keys; writes no instance's record. Restoring
                versions from disk needs this role, too
    instance    writes what it says of itself; reads the model's records and no key of a client
    trainer     publishes versions and asks for them; makes none active
    peer        says which copies a host holds in memory and on disk, and where its slots are

A process with a role's credentials can do what that kind of process does, and no more. All may read the records of the
model, which hold no secrets. `Administrator` makes the roles in an etcd, and users that have them; a second time it
changes only what differs.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from aetcd import rpc

from weightsync.control.editions import prefix_of
from weightsync.control.records import ARENA_KEY, Keys
from weightsync.store.etcd_members import Members
from weightsync.store.etcd_url import EtcdUrl

NAMES = ("gateway", "instance", "trainer", "peer")
ARENAS = "arenas/"
SLICES = "slices/"  # weightsync/peer/slices.py
LEDGER = "ledger/"  # weightsync/control/chain.py
GATEWAYS = "gateway/"  # API keys, their use, and the secret of cache scopes (server/gateway/access)
ROOT = "root"
Grant = tuple[int, bytes, bytes]  # etcd's type of permission, first key, end of the range ("": one key)


@dataclass(frozen=True)
class Role:
    """The rights of one kind of process: keys, and prefixes that end in "/". A key that may be written may be read."""

    name: str
    reads: frozenset[str]
    writes: frozenset[str]


def roles(models: Iterable[str]) -> tuple[Role, ...]:
    """The roles of the processes of these models."""
    reads: dict[str, set[str]] = {name: {ARENA_KEY, ARENAS} for name in NAMES}
    writes: dict[str, set[str]] = {name: set() for name in NAMES}
    for keys in map(Keys, models):
        publishing = {keys.versions, keys.counter, keys.schema, keys.target, ARENA_KEY, ARENAS, LEDGER}
        publishing |= {keys.forms, f"{keys.root}schemas/", f"{keys.root}publishers/", prefix_of(keys)}
        leading = {keys.active, keys.swap, keys.leader, keys.history, keys.pauses}
        ordering = {f"{keys.root}drains/", f"{keys.root}sleeps/", keys.training, keys.disks, GATEWAYS}
        writes["gateway"] |= publishing | leading | ordering
        writes["instance"] |= {keys.instances, keys.starts, keys.config}
        writes["instance"] |= {f"{keys.root}sleepers/", f"{SLICES}{keys.model}/"}
        writes["trainer"] |= publishing
        writes["peer"] |= {keys.copies, keys.disks, ARENA_KEY, ARENAS}
        reads["trainer"].add(keys.history)  # what became of a swap that it has asked for
        for read in reads.values():
            read |= {keys.root, keys.copies, f"{SLICES}{keys.model}/"}
    return tuple(Role(name, frozenset(reads[name] - writes[name]), frozenset(writes[name])) for name in NAMES)


class Administrator:
    """An etcd as its administrator sees it. The URL's user must have the role root, unless authentication is off."""

    def __init__(self, url: str) -> None:
        """Raises StoreUnavailable."""
        self._url = EtcdUrl.parse(url)
        self._members = Members(self._url)

    async def make_role(self, role: Role) -> None:
        """Lets `role` do what it says under the URL's namespace, and nothing else. Raises StoreUnavailable."""
        if role.name not in (await self._ask("RoleList", rpc.AuthRoleListRequest())).roles:
            await self._ask("RoleAdd", rpc.AuthRoleAddRequest(name=role.name))
        found = await self._ask("RoleGet", rpc.AuthRoleGetRequest(role=role.name))
        has = {(p.permType, bytes(p.key), bytes(p.range_end)) for p in found.perm}
        wanted = self._grants(role)
        for kind, key, end in wanted - has:
            permission = rpc.Permission(permType=kind, key=key, range_end=end)
            await self._ask("RoleGrantPermission", rpc.AuthRoleGrantPermissionRequest(name=role.name, perm=permission))
        for key, end in {grant[1:] for grant in has} - {grant[1:] for grant in wanted}:
            request = rpc.AuthRoleRevokePermissionRequest(role=role.name, key=key, range_end=end)
            await self._ask("RoleRevokePermission", request)

    async def make_users(self, passwords: Mapping[str, str]) -> None:
        """A user of each name with that password and the role of the same name; ROOT is the administrator.

        Raises StoreUnavailable.
        """
        await self._make_root_role(passwords)
        known = set((await self._ask("UserList", rpc.AuthUserListRequest())).users)
        for name, password in passwords.items():
            if name in known:
                await self._ask("UserChangePassword", rpc.AuthUserChangePasswordRequest(name=name, password=password))
            else:
                await self._ask("UserAdd", rpc.AuthUserAddRequest(name=name, password=password))
            await self._ask("UserGrantRole", rpc.AuthUserGrantRoleRequest(user=name, role=name))

    async def require_users(self) -> None:
        """Turns authentication on: from now on nobody gets in without a user. Raises StoreUnavailable."""
        await self._ask("AuthEnable", rpc.AuthEnableRequest())

    async def _make_root_role(self, names: Container[str]) -> None:
        if ROOT in names and ROOT not in (await self._ask("RoleList", rpc.AuthRoleListRequest())).roles:
            await self._ask("RoleAdd", rpc.AuthRoleAddRequest(name=ROOT))

    async def close(self) -> None:
        await self._members.close()

    async def _ask(self, name: str, request: Any) -> Any:
        return await self._members.call(name, request, repeat=False)

    def _grants(self, role: Role) -> set[Grant]:
        read, both = rpc.Permission.READ, rpc.Permission.READWRITE
        kinds = dict.fromkeys(role.reads, read) | dict.fromkeys(role.writes, both)
        return {(kind, *self._range(name)) for name, kind in kinds.items()}

    def _range(self, name: str) -> tuple[bytes, bytes]:
        key = (self._url.namespace + name).encode()
        return (key, key[:-1] + b"0") if name.endswith("/") else (key, b"")  # "0" follows "/"
