"""Tokens of an OpenID Connect issuer as credentials of the admin port.

A token is a JWT that the issuer has signed with one of the keys which its discovery document names (OpenID Connect
Discovery 1.0, RFC 7517, RFC 7519; PyJWT reads and verifies). Before anything of it counts, its signature, issuer,
audience and times are checked. Only algorithms with public keys are allowed, and a key only for its own kind of
algorithm: a token signed with HS256 under a public key, or not at all, is nobody's.

The issuer's keys are kept for KEYS_S seconds. A token with an unknown key id has them fetched anew, so that a rotated
key works at once, but not more often than every REFETCH_S seconds: made-up tokens cost the issuer nothing. While the
issuer does not answer, its last keys count for STALE_S seconds.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import ssl
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from server.errors import ConfigError, HttpError
from server.gateway.access.keys import KeyRing, Principal, lacking
from server.gateway.access.records import granted
from server.gateway.config import OidcSettings

if TYPE_CHECKING:
    import httpx
    import jwt

log = logging.getLogger("hotswap.gateway")

KEYS_S = 300.0
REFETCH_S = 10.0
STALE_S = 3600.0
TIMEOUT_S = 5.0
MAX_DOCUMENT = 1 << 20  # bytes of what the issuer answers
DISCOVERY = "/.well-known/openid-configuration"
CLAIMS: Final = ["exp", "iss", "aud", "sub"]  # a token without one of them is refused


class AdminAccess:
    """Finds the caller of a request on the admin port: the owner of a key, or of a token."""

    def __init__(self, keys: KeyRing, settings: OidcSettings) -> None:
        """Raises ConfigError."""
        self._keys = keys
        self._tokens = Tokens(settings) if settings.issuer is not None else None

    async def authorize(self, credential: bytes | None, role: str) -> Principal:
        """The owner, who has `role`. Raises HttpError (401, 403, 503)."""
        if self._tokens is None or not credential or credential.count(b".") != 2 or self._keys.knows(credential):
            return self._keys.authorize(credential, role)
        principal = await self._tokens.principal(credential)
        if role not in principal.scopes:
            raise lacking(role)
        return principal


class Tokens:
    """Verifies tokens of one issuer."""

    def __init__(self, settings: OidcSettings) -> None:
        """Raises ConfigError."""
        assert settings.issuer is not None
        assert settings.audience is not None
        self._settings, self._issuer, self._audience = settings, settings.issuer, settings.audience
        self._keys: dict[str, jwt.PyJWK] = {}
        self._fetched = self._tried = float("-inf")  # monotonic
        self._fetching = asyncio.Lock()
        try:
            authorities = str(settings.ca_file) if settings.ca_file is not None else None
            self._tls = ssl.create_default_context(cafile=authorities)
        except OSError as error:
            raise ConfigError(f"--oidc-ca {settings.ca_file}: cannot be used ({error}); name a PEM file.") from error

    async def principal(self, token: bytes) -> Principal:
        """The owner of the token. Raises HttpError (401, 403, 503)."""
        claims = await self._claims(token)
        subject = claims["sub"]
        if not subject or len(subject) > 256 or not subject.isprintable():
            raise _refused("its subject is no printable name", code="invalid_token")
        roles = {self._settings.mapping[value] for value in self._values(claims) if value in self._settings.mapping}
        if not roles:
            raise HttpError(
                403,
                f"This token gives no role here: its claim {self._settings.claim!r} has none of the values that "
                "--oidc-role names.",
                code="no_role",
            )
        digest = hashlib.sha256(f"oidc {self._issuer} {subject}".encode()).digest()
        return Principal(subject, granted(roles), digest, who=f"oidc {subject} ({self._issuer})")

    async def _claims(self, token: bytes) -> dict[str, Any]:
        import jwt

        try:
            header = jwt.get_unverified_header(token)
        except jwt.InvalidTokenError as error:
            raise _refused("it is no JWT", code="invalid_token") from error
        algorithm = header.get("alg")
        if algorithm not in self._settings.allowed:
            allowed = ", ".join(self._settings.allowed)
            raise _refused(f"it must be signed with one of {allowed}", code="invalid_token")
        key = await self._key(header.get("kid"), algorithm)
        try:
            claims: dict[str, Any] = jwt.decode(
                token,
                key.key,
                algorithms=[algorithm],
                audience=self._audience,
                issuer=self._issuer,
                leeway=self._settings.leeway_s,
                options={"require": CLAIMS},
            )
        except jwt.ExpiredSignatureError as error:
            raise _refused("it has expired; get a new one", code="expired_token") from error
        except jwt.InvalidAudienceError as error:
            raise _refused(f"it is not for the audience {self._audience!r}", code="wrong_audience") from error
        except jwt.InvalidIssuerError as error:
            raise _refused(f"it is not of the issuer {self._issuer}", code="wrong_issuer") from error
        except jwt.ImmatureSignatureError as error:
            raise _refused("it is not valid yet; are the clocks right?", code="immature_token") from error
        except (jwt.InvalidTokenError, jwt.InvalidKeyError) as error:
            raise _refused(
                f"it does not stand up to its signature and claims ({error})", code="invalid_token"
            ) from error
        return claims

    def _values(self, claims: Mapping[str, Any]) -> Iterator[str]:
        """The values of the claim, one by one; a text may hold several, as `scope` does."""
        found: Any = claims.get(self._settings.claim)
        if found is None:
            found = claims
            for name in self._settings.claim.split("."):
                found = found.get(name) if isinstance(found, dict) else None
        if isinstance(found, str):
            yield from (found, *found.split())
        elif isinstance(found, list):
            yield from (value for value in found if isinstance(value, str))

    async def _key(self, kid: object, algorithm: str) -> jwt.PyJWK:
        """The key a token names; if it names none, the only one. Raises HttpError (401, 503)."""
        now = time.monotonic()
        if now - self._fetched > KEYS_S or not self._fits(kid):
            await self._fetch_unless_since(now)
        key = self._fits(kid)
        if key is None:
            raise _refused("its key is none of the issuer's", code="invalid_token")
        if key.algorithm_name != algorithm:
            raise _refused(f"its key is not for {algorithm}", code="invalid_token")
        return key

    def _fits(self, kid: object) -> jwt.PyJWK | None:
        if kid is None:
            return next(iter(self._keys.values())) if len(self._keys) == 1 else None
        return self._keys.get(kid) if isinstance(kid, str) else None

    async def _fetch_unless_since(self, asked: float) -> None:
        async with self._fetching:  # those who waited have what was fetched for the first
            if self._tried < asked and time.monotonic() - self._tried >= REFETCH_S:
                self._tried = time.monotonic()
                await self._fetch()
        if time.monotonic() - self._fetched > STALE_S:
            raise HttpError(
                503,
                "The issuer's keys cannot be read, so tokens cannot be checked; use a key, or try again.",
                code="oidc_unavailable",
            )

    async def _fetch(self) -> None:
        """The issuer's keys as they are now; what fails is logged, and leaves those of before."""
        import httpx
        import jwt

        try:
            async with httpx.AsyncClient(verify=self._tls, timeout=TIMEOUT_S, trust_env=False) as client:
                document = await _json(client, self._issuer.rstrip("/") + DISCOVERY)
                if document.get("issuer") != self._issuer:
                    raise ValueError(f"its discovery document is that of {document.get('issuer')!r}")
                where = document.get("jwks_uri")
                if not isinstance(where, str) or not OidcSettings.is_trustworthy(where):
                    raise ValueError(f"its keys are at {where!r}, which is not https")
                found = await _json(client, where)
            self._keys = dict(_usable(found))
        except (httpx.HTTPError, httpx.InvalidURL, jwt.PyJWTError, ValueError) as error:
            log.error("the keys of %s cannot be read, those of before stay in use: %s", self._issuer, error)
            return
        self._fetched = time.monotonic()
        log.info("%d keys of %s are in use", len(self._keys), self._issuer)


async def _json(client: httpx.AsyncClient, url: str) -> dict[str, Any]:
    """An object, of moderate size. Raises ValueError, httpx.HTTPError."""
    import orjson

    async with client.stream("GET", url) as answer:
        answer.raise_for_status()
        body = b""
        async for chunk in answer.aiter_bytes():
            body += chunk
            if len(body) > MAX_DOCUMENT:
                raise ValueError(f"{url} has over {MAX_DOCUMENT:,} bytes")
    found = orjson.loads(body)
    if not isinstance(found, dict):
        raise ValueError(f"{url} holds no JSON object")
    return found


def _usable(document: Mapping[str, Any]) -> Iterator[tuple[str, jwt.PyJWK]]:
    """The public keys for signatures, by id. Others, such as secrets and keys for encryption, are left out."""
    import jwt

    listed = document.get("keys")
    for row in listed if isinstance(listed, list) else ():
        if not isinstance(row, dict) or row.get("kty") not in ("RSA", "EC", "OKP") or row.get("use", "sig") != "sig":
            continue
        try:
            yield str(row.get("kid", "")), jwt.PyJWK(row)
        except jwt.PyJWTError as error:
            log.warning("ignoring a key of the issuer: %s", error)


def _refused(why: str, *, code: str) -> HttpError:
    return HttpError(401, f"This token is refused: {why}.", code=code)
