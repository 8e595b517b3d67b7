"""Makes the roles of etcd_roles.py in an etcd, and users that have them. Doing it again changes only what differs."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from aetcd import rpc

from weightsync.store.etcd_members import Members
from weightsync.store.etcd_roles import Role
from weightsync.store.etcd_url import EtcdUrl

ROOT = "root"
Grant = tuple[int, bytes, bytes]  # etcd's type of permission, first key, end of the range ("": one key)


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
