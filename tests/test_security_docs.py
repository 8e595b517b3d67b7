"""docs/security.md: its commands make certificates that members accept, and its tables say what the code does."""

from __future__ import annotations

import asyncio
import re
import subprocess
from pathlib import Path

from server.gateway.access.roles import table
from tests.lacking import program
from tests.weightsync.test_tls import echo, shown
from weightsync.format.signing import Signer, Trust
from weightsync.store.etcd_roles import roles
from weightsync.tls import ClusterTls

PAGE = (Path(__file__).parents[1] / "docs" / "security.md").read_text()


def test_the_openssl_commands(tmp_path: Path) -> None:
    program("openssl")
    commands = re.findall(r"^    ((?:openssl|printf) .*)$", PAGE, re.MULTILINE)
    assert len(commands) == 6
    subprocess.run(["/bin/sh", "-ec", "\n".join(commands)], cwd=tmp_path, check=True, capture_output=True)
    assert Signer(tmp_path / "publisher.key").key_id in Trust([tmp_path / "publisher.pub"]).key_ids
    member = ClusterTls(tmp_path)

    async def meet() -> bytes:
        async with echo(member.server_context()) as port:
            return await shown(port, member.client_context())

    assert asyncio.run(meet())


def test_the_table_of_roles() -> None:
    table = dict(
        re.findall(r"^\| `(gateway|instance|trainer|peer)` \| (.*) \|$", PAGE.partition("## Roles")[2], re.MULTILINE)
    )
    assert table.keys() == {role.name for role in roles(["MODEL"])}
    for role in roles(["MODEL"]):
        assert _documented(table[role.name]) == role.writes, role.name


def test_the_table_of_routes() -> None:
    assert table() in PAGE, "run `make tables`"


def _documented(cell: str) -> set[str]:
    below, *rest = cell.split("; ") if cell.startswith("in `models/MODEL/`: ") else ("", cell)
    names = {"models/MODEL/" + name for name in re.findall(r"`([^`]+)`", below.partition(": ")[2])}
    return names.union(*(re.findall(r"`([^`]+)`", part) for part in rest))
