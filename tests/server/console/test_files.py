"""The console's files over HTTP: who gets which, under which headers, and that nothing else can be had through them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.gateway.console import routes as files
from tests.server.gateway.harness import ADMIN_KEY, RunningGateway, get, post, private, running_gateway

ROOT = Path(__file__).parents[3]
API_KEY = "a-key-for-inference-only"
NAMES = sorted(files.load())


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    directory = tmp_path_factory.mktemp("gateway")
    keys = private(directory / "keys", API_KEY)
    with running_gateway(directory, api_key_file=keys) as running:
        yield running


@pytest.mark.parametrize("admin", [True, False], ids=["admin", "public"])
async def test_the_page_needs_no_key_and_comes_with_a_strict_policy(gateway: RunningGateway, admin: bool) -> None:
    answer = await gateway.ask(get("/console"), admin=admin)
    assert answer.status == 200
    assert (await gateway.ask(get("/console/"), admin=admin)).body == answer.body
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy == {
        "default-src": "'none'", "script-src": "'self'", "style-src": "'self'", "connect-src": "'self'",
        "img-src": "'self' data:", "base-uri": "'none'", "form-action": "'none'", "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'", "trusted-types": "'none'",
    }  # fmt: skip
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert "set-cookie" not in answer.headers
    assert (b"Admin key" in answer.body) == admin


async def test_the_admin_port_says_where_the_page_is(gateway: RunningGateway) -> None:
    answer = await gateway.ask(get("/"), admin=True)
    assert answer.refusal == (404, "not_found")
    assert b"The console is at /console." in answer.body


@pytest.mark.parametrize("name", NAMES)
async def test_the_admin_port_has_every_file_and_the_public_port_the_chats(gateway: RunningGateway, name: str) -> None:
    answer = await gateway.ask(get(f"/console/{name}"), admin=True)
    assert (answer.status, answer.body) == (200, (files.STATIC / name).read_bytes())
    assert answer.headers["content-type"] == files.TYPES[Path(name).suffix]
    public = await gateway.ask(get(f"/console/{name}"))
    if name in files.PUBLIC:
        assert (public.status, public.body, public.headers["etag"]) == (200, answer.body, answer.headers["etag"])
    else:
        assert public.refusal == (404, "not_found")


def test_what_the_public_page_needs_is_public_and_nothing_of_it_knows_a_control_route() -> None:
    assert set(NAMES) >= files.PUBLIC
    needed, seen = {files.PUBLIC_PAGE}, set[str]()
    while needed - seen:
        name = min(needed - seen)
        seen.add(name)
        needed |= references(name)
    assert seen == files.PUBLIC
    for name in files.PUBLIC:
        assert "/admin/" not in (files.STATIC / name).read_text(), name


def test_every_file_is_used_and_every_reference_leads_to_one() -> None:
    used = {files.ADMIN_PAGE, files.PUBLIC_PAGE}.union(*map(references, NAMES))
    assert used == set(NAMES)


def references(name: str) -> set[str]:
    """The console's files that one of them loads."""
    text = (files.STATIC / name).read_text()
    return set(re.findall(r'(?:href|src)="/console/([\w.]+)"', text)) | set(re.findall(r'from "\./([\w.]+)"', text))


@pytest.mark.parametrize("name", NAMES)
def test_no_file_reaches_out_or_makes_markup_of_text(name: str) -> None:
    text = (files.STATIC / name).read_text()
    addresses = set(re.findall(r"https?://[^\s\"')]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg", "https://html.spec.whatwg.org/multipage/server-sent-events.html"}
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|localStorage", text
    )
    if name.endswith(".html"):
        assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", text)
        assert all('src="/console/' in script for script in re.findall(r"<script[^>]*>", text))
    assert len(text.splitlines()) <= 200


async def test_a_client_that_has_a_file_is_not_sent_it_again(gateway: RunningGateway) -> None:
    first = await gateway.ask(get("/console/style.css"))
    tag = first.headers["etag"]
    assert first.headers["cache-control"] == "no-cache"
    for header in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        again = await gateway.ask(get("/console/style.css", f"If-None-Match: {header}\r\nConnection: close\r\n"))
        assert (again.status, again.body, again.headers["etag"]) == (304, b"", tag)
    other = await gateway.ask(get("/console/style.css", 'If-None-Match: "other"\r\n'))
    assert (other.status, other.body) == (200, first.body)


async def test_a_head_request_gets_the_head(gateway: RunningGateway) -> None:
    async with gateway.client(b"HEAD /console HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n") as client:
        data = await client.rest()
    assert data.startswith(b"HTTP/1.1 200 ")
    assert data.endswith(b"\r\n\r\n")
    assert b"content-length: %d\r\n" % len((files.STATIC / files.PUBLIC_PAGE).read_bytes()) in data.lower()


SPELLINGS = """
/console//style.css /console/../gateway.py /console/%2e%2e/gateway.py /console/..%2f..%2fgateway.py
/console/%2e%2e%2fgateway.py /console/..%5cgateway.py /console/static/style.css /console/style.css//
/console/style.css%00.html /console/%00 /console/STYLE.CSS /console/. /console/.. /console/routes.py
/console/__init__.py /console//etc/passwd /console/%2fetc%2fpasswd /consolex /console.html /Console
/console/..;/admin/weights /console/../admin/weights /console/..%2fadmin%2fweights /console/%2e%2e/admin/instances
/console/admin/swaps
"""


@pytest.mark.parametrize("admin", [True, False], ids=["admin", "public"])
@pytest.mark.parametrize("path", SPELLINGS.split())
async def test_no_spelling_leads_to_another_file_or_to_a_control_route(
    gateway: RunningGateway, path: str, admin: bool
) -> None:
    key = f"Authorization: Bearer {ADMIN_KEY}\r\n" if admin else ""
    answer = await gateway.ask(get(path, key), admin=admin)
    assert answer.refusal == (404, "not_found")


async def test_the_files_are_only_read(gateway: RunningGateway) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        raw = post("/console").replace(b"POST", method.encode(), 1)
        answer = await gateway.ask(raw)
        assert answer.refusal == (405, "method_not_allowed")


async def test_on_the_admin_port_inference_takes_the_same_keys(gateway: RunningGateway) -> None:
    for key in (API_KEY, ADMIN_KEY):
        answer = await gateway.ask(get("/v1/models", f"Authorization: Bearer {key}\r\n"), admin=True)
        assert answer.refusal == (503, "no_instance")  # past the key
