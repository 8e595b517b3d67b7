"""Roles on the admin port, and the tokens of an OpenID Connect issuer on loopback that stand for them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jwt
import orjson
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from server.errors import ConfigError, HttpError
from server.gateway import GatewayConfig, openapi
from server.gateway.access import oidc, roles
from server.gateway.access.keys import KeyRing
from server.gateway.access.oidc import AdminAccess
from server.gateway.access.records import INFER, granted
from server.gateway.app import build_app, routes_of
from server.gateway.config import ROLES, OidcSettings, Role
from server.gateway.middleware import is_public
from tests.server.asking import answering
from tests.server.gateway.harness import ADMIN, RunningGateway, get, new_key, post, request, running_gateway
from tests.server.refusals import refuses


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    with running_gateway(tmp_path_factory.mktemp("roles")) as running:
        yield running


async def status(gateway: RunningGateway, method: str, path: str, header: str) -> tuple[int, str]:
    answer = await gateway.ask(request(method, path, headers=header), admin=True)
    found = orjson.loads(answer.body) if answer.body.startswith(b"{") else {}
    return answer.status, found.get("error", {}).get("code", "")


def test_a_role_has_the_rights_of_the_lower_ones() -> None:
    assert granted((INFER,)) == {INFER}
    assert granted(("operator", INFER)) == {INFER, "operator", "viewer"}
    assert granted(("admin",)) == set(ROLES)


def test_the_table_has_every_route_and_no_other(tmp_path: Path) -> None:
    app = build_app(GatewayConfig(store=f"sqlite://{tmp_path}/store.db", model="m"))
    routes = {f"{method} {path}" for method, path in routes_of(app) if path == "/openapi.json" or not is_public(path)}
    assert routes == set(roles.NEEDED)
    assert roles.undeclared([("GET", "/admin/weights"), ("PUT", "/admin/weights")]) == ["PUT /admin/weights"]


@pytest.mark.parametrize(
    ("method", "path", "role"),
    [
        ("GET", "/admin/weights", "viewer"),
        ("POST", "/admin/instances/a b/drain", "operator"),
        ("POST", "/admin/instances/a/b/drain", "admin"),  # there is none
        ("POST", "/admin/keys\n", "admin"),
        ("PUT", "/admin/weights", "admin"),
    ],
)
def test_what_no_route_answers_to_asks_for_the_highest_role(method: str, path: str, role: Role) -> None:
    assert roles.needed(method, path) == role


async def test_a_key_is_admitted_where_its_role_is_enough_and_nowhere_else(gateway: RunningGateway) -> None:
    headers = {}
    for role in ROLES:
        _, headers[role] = await new_key(gateway, scopes=[role])
    examples = {
        "viewer": ("GET", "/admin/weights"),
        "operator": ("POST", "/admin/weights/activate"),
        "publisher": ("POST", "/admin/weights"),
        "admin": ("POST", "/admin/keys"),
    }
    for needed, (method, path) in examples.items():
        for role, header in headers.items():
            enough = ROLES.index(role) >= ROLES.index(needed)
            got = await status(gateway, method, path, header)
            assert (got[1] != "insufficient_scope") == enough, (role, method, path, got)
            assert (got[0] == 403) == (not enough)
    assert await status(gateway, "POST", "/admin/keys%0A", headers["viewer"]) == (403, "insufficient_scope")


async def test_a_key_for_inference_alone_reads_nothing_and_a_role_alone_infers_nothing(gateway: RunningGateway) -> None:
    _, infer = await new_key(gateway)
    _, publisher = await new_key(gateway, scopes=["publisher"])
    assert await status(gateway, "GET", "/admin/weights", infer) == (403, "insufficient_scope")
    assert (await gateway.ask(post(headers=publisher))).status == 403
    assert (await gateway.ask(get("/healthz"), admin=True)).status == 200


def test_the_document_names_the_role_of_each_route(tmp_path: Path) -> None:
    app = build_app(GatewayConfig(store=f"sqlite://{tmp_path}/store.db", model="m"))
    told = orjson.loads(openapi.admin(app))
    assert told["paths"]["/admin/keys"]["post"]["security"] == [{"bearer": ["admin"]}, {"apiKey": ["admin"]}]
    assert told["paths"]["/healthz"]["get"]["security"] == []


# tokens of an OpenID Connect issuer

AUDIENCE = "hotswap-admin"
RSA = {name: rsa.generate_private_key(65537, 2048) for name in ("first", "second", "stranger")}
ELLIPTIC = ec.generate_private_key(ec.SECP256R1())


class Issuer:
    """Discovery and keys over HTTP, as OpenID Connect Discovery 1.0 has them; tokens signed with PyJWT."""

    def __init__(self) -> None:
        self.keys: list[dict[str, Any]] = [public("first")]
        self.claimed: str | None = None  # what its document says it is, if not the truth
        self.fetched: list[str] = []
        self.broken, self.url = False, ""

    def answer(self, path: str, _: object) -> tuple[int, bytes]:
        self.fetched.append(path)
        document = {"issuer": self.claimed or self.url, "jwks_uri": f"{self.url}/keys"}
        answers = {"/.well-known/openid-configuration": document, "/keys": {"keys": self.keys}}
        return 500 if self.broken else 200, json.dumps(answers.get(path, {})).encode()

    def token(self, key: str = "first", *, kid: str | None = None, algorithm: str = "RS256", **claims: Any) -> bytes:
        now = time.time()
        told = {"iss": self.url, "sub": "ada", "aud": AUDIENCE, "exp": now + 60, "roles": ["sre"], **claims}
        told = {name: value for name, value in told.items() if value is not None}
        return jwt.encode(told, RSA[key], algorithm, headers={"kid": kid or key}).encode()


def public(name: str, **more: Any) -> dict[str, Any]:
    return {**json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(RSA[name].public_key())), "kid": name, "use": "sig", **more}


@pytest.fixture
def issuer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Issuer]:
    monkeypatch.setattr(oidc, "TIMEOUT_S", 60.0)
    running = Issuer()
    with answering(running.answer) as running.url:
        yield running


def access(issuer: Issuer, **settings: Any) -> AdminAccess:
    given = {"issuer": issuer.url, "audience": AUDIENCE, "roles": ("sre=operator", "ml=publisher"), **settings}
    return AdminAccess(KeyRing({}, required=False), OidcSettings(**given))


async def refusal(admitting: AdminAccess, token: bytes, role: str = "viewer") -> tuple[int, str]:
    with pytest.raises(HttpError) as refused:
        await admitting.authorize(token, role)
    assert token.decode() not in refused.value.message
    return refused.value.status, refused.value.code


async def test_a_token_has_the_role_that_its_claims_stand_for(issuer: Issuer) -> None:
    admitting = access(issuer)
    ada = await admitting.authorize(issuer.token(), "operator")
    assert (ada.name, ada.who) == ("ada", f"oidc ada ({issuer.url})")
    assert ada.scopes == {"viewer", "operator"}
    with refuses(403):
        await admitting.authorize(issuer.token(), "publisher")
    both = await admitting.authorize(issuer.token(roles=["sre", "ml", "x"]), "publisher")
    assert both.digest == ada.digest  # the same person
    assert (await admitting.authorize(issuer.token(sub="bob"), "viewer")).digest != ada.digest
    assert await refusal(admitting, issuer.token(roles=["x"])) == (403, "no_role")
    assert await refusal(admitting, issuer.token(roles=None)) == (403, "no_role")


@pytest.mark.parametrize(
    ("claim", "claims"),
    [
        ("realm_access.roles", {"realm_access": {"roles": ["ml"]}}),
        ("scope", {"scope": "openid ml"}),
        ("https://example.com/roles", {"https://example.com/roles": "ml"}),
    ],
)
async def test_the_claim_may_lie_within_an_object_or_be_a_text(issuer: Issuer, claim: str, claims: Any) -> None:
    admitted = await access(issuer, claim=claim).authorize(issuer.token(**claims), "publisher")
    assert "admin" not in admitted.scopes


async def test_tokens_that_are_not_for_here(issuer: Issuer) -> None:
    admitting, now = access(issuer), time.time()
    refused = {
        "expired_token": issuer.token(exp=now - 31),
        "immature_token": issuer.token(nbf=now + 90),
        "wrong_audience": issuer.token(aud="another"),
        "wrong_issuer": issuer.token(iss="https://example.com"),
    }
    for code, token in refused.items():
        assert await refusal(admitting, token) == (401, code)
    for claim in ("exp", "sub", "aud", "iss"):
        assert (await refusal(admitting, issuer.token(**{claim: None})))[0] == 401
    assert await refusal(admitting, issuer.token(sub="a\nb")) == (401, "invalid_token")
    await admitting.authorize(issuer.token(exp=time.time() - 2), "viewer")  # the leeway


async def test_signatures_that_prove_nothing(issuer: Issuer) -> None:
    """By a stranger's key; by none; by HS256 under the text of the public key; by a key that is for something else."""
    admitting = access(issuer)
    assert await refusal(admitting, issuer.token("stranger", kid="first")) == (401, "invalid_token")
    assert await refusal(admitting, issuer.token("stranger")) == (401, "invalid_token")
    header, payload, _ = issuer.token().split(b".")
    unsigned = jwt.encode({"iss": issuer.url, "sub": "ada", "aud": AUDIENCE}, "", "none", headers={"kid": "first"})
    assert await refusal(admitting, unsigned.encode()) == (401, "invalid_token")
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    pem = RSA["first"].public_key().public_bytes(serialization.Encoding.PEM, form)
    hmac = jwt.algorithms.HMACAlgorithm(jwt.algorithms.HMACAlgorithm.SHA256)
    forged_head = jwt.utils.base64url_encode(b'{"alg":"HS256","typ":"JWT","kid":"first"}')
    forged = forged_head + b"." + payload
    forged += b"." + jwt.utils.base64url_encode(hmac.sign(forged, pem))
    assert await refusal(admitting, forged) == (401, "invalid_token")
    assert await refusal(admitting, header + b"." + payload + b".AAAA") == (401, "invalid_token")
    assert await refusal(admitting, issuer.token(algorithm="RS512")) == (401, "invalid_token")
    assert await refusal(access(issuer, algorithms=("RS512",)), issuer.token()) == (401, "invalid_token")
    issuer.keys = [public("first", use="enc")]
    assert await refusal(access(issuer), issuer.token()) == (401, "invalid_token")


async def test_other_kinds_of_keys(issuer: Issuer) -> None:
    row = {**json.loads(jwt.algorithms.ECAlgorithm.to_jwk(ELLIPTIC.public_key())), "kid": "e"}
    issuer.keys = [{"kty": "oct", "k": "c2VjcmV0", "kid": "o"}, {"kty": "EC", "crv": "none", "kid": "b"}, row]
    claims = {"iss": issuer.url, "sub": "ada", "aud": AUDIENCE, "exp": time.time() + 60, "roles": "ml"}
    admitting = access(issuer)
    await admitting.authorize(jwt.encode(claims, ELLIPTIC, "ES256").encode(), "publisher")  # no id: the only one
    await admitting.authorize(jwt.encode(claims, ELLIPTIC, "ES256", headers={"kid": "e"}).encode(), "publisher")


async def test_rotation_and_an_issuer_that_is_away(issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oidc, "REFETCH_S", 3600.0)
    admitting = access(issuer)
    for _ in range(3):
        await admitting.authorize(issuer.token(), "viewer")
    assert issuer.fetched == [oidc.DISCOVERY, "/keys"]
    issuer.keys = [public("second")]
    assert await refusal(admitting, issuer.token("second")) == (401, "invalid_token")
    assert len(issuer.fetched) == 2  # not again at once, whatever tokens are made up
    monkeypatch.setattr(oidc, "REFETCH_S", 0.0)
    await admitting.authorize(issuer.token("second"), "viewer")
    assert await refusal(admitting, issuer.token("first")) == (401, "invalid_token")
    issuer.broken = True
    monkeypatch.setattr(oidc, "KEYS_S", 0.0)
    await admitting.authorize(issuer.token("second"), "viewer")  # the last keys count for a while
    monkeypatch.setattr(oidc, "STALE_S", 0.0)
    with refuses(503):
        await admitting.authorize(issuer.token("second"), "viewer")


async def test_a_document_of_another_issuer_is_not_believed(issuer: Issuer) -> None:
    issuer.claimed = "https://example.com"
    assert await refusal(access(issuer), issuer.token()) == (503, "oidc_unavailable")


async def test_over_the_admin_port_beside_keys(issuer: Issuer, tmp_path: Path) -> None:
    settings = OidcSettings(issuer=issuer.url, audience=AUDIENCE, roles=("sre=operator",))
    with running_gateway(tmp_path, oidc=settings) as gateway:
        bearer = f"Authorization: Bearer {issuer.token().decode()}\r\n"
        assert (await gateway.ask(get("/admin/weights", bearer), admin=True)).status == 200
        refused = await gateway.ask(post("/admin/keys", {"name": "x"}, bearer), admin=True)
        assert refused.refusal == (403, "insufficient_scope")
        assert (await gateway.ask(post("/admin/keys", {"name": "x"}, ADMIN), admin=True)).status == 200
        assert (await gateway.ask(post(headers=bearer))).status == 401  # inference takes keys alone


@pytest.mark.parametrize(
    "given",
    [
        {"issuer": "http://example.com", "audience": "a", "roles": ("a=admin",)},
        {"issuer": "https://example.com", "roles": ("a=admin",)},
        {"issuer": "https://example.com", "audience": "a"},
        {"issuer": "https://example.com", "audience": "a", "roles": ("a=root",)},
        {"issuer": "https://example.com", "audience": "a", "roles": ("admin",)},
        {"audience": "a"},
        {"issuer": "https://example.com", "audience": "a", "roles": ("a=admin",), "leeway_s": 301.0},
    ],
)
def test_settings_that_would_admit_too_many(given: Any) -> None:
    with pytest.raises(ConfigError, match="--oidc-"):
        OidcSettings(**given)


async def test_without_an_issuer_a_token_is_an_unknown_key(issuer: Issuer) -> None:
    with refuses(401, 503):
        await AdminAccess(KeyRing({}, required=False), OidcSettings()).authorize(issuer.token(), "viewer")
