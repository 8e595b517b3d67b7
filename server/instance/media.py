"""Media that a request names by URL (images, sound, video) is fetched from the public network alone.

An instance stands where clients may not look: beside other services of its host, and of the cluster. vLLM fetches from
any address unless the operator lists domains. Here every connection is checked when its address is known, so neither a
name that resolves to a private address nor a redirect to one gets there. Hosts in `--allowed-media-domains` may be
private, and so may the proxies that the environment names.

This is vLLM's media connector "hotswap" (`VLLM_MEDIA_CONNECTOR`), registered on import.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import urllib.request
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from vllm.connections import HTTPConnection
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector

NAME = "hotswap"
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


@MEDIA_CONNECTOR_REGISTRY.register(NAME)
class PublicMedia(MediaConnector):
    """vLLM's connector, with connections that are checked. Made anew for each request that names media."""

    def __init__(self, *args: Any, allowed_media_domains: list[str] | None = None, **kwargs: Any) -> None:
        kwargs["connection"] = _connection(tuple(allowed_media_domains or ()))
        super().__init__(*args, allowed_media_domains=allowed_media_domains, **kwargs)


@lru_cache(maxsize=4)
def _connection(domains: tuple[str, ...]) -> PublicConnection:
    return PublicConnection(domains)


class PublicConnection(HTTPConnection):  # type: ignore[misc]
    """Connects to public addresses, and to those of `domains` and of proxies. Others are a VLLMValidationError."""

    def __init__(self, domains: tuple[str, ...]) -> None:
        super().__init__()
        self._async_client: aiohttp.ClientSession | None = None
        self._domains = domains
        self._allowed: set[str] = {host for host in domains if _address(host) is not None}

    async def get_async_client(self) -> aiohttp.ClientSession:
        if self._async_client is None:
            proxies = [urlsplit(url).hostname or "" for url in urllib.request.getproxies().values()]
            self._allowed |= {host for host in proxies if _address(host) is not None}
            resolver = _Resolver({*self._domains, *proxies}, self._allowed)
            connector = aiohttp.TCPConnector(resolver=resolver, socket_factory=self._socket, use_dns_cache=False)
            self._async_client = aiohttp.ClientSession(trust_env=True, connector=connector)
        return self._async_client

    def get_sync_client(self) -> Any:
        """vLLM's routes are asynchronous; nothing may go around the check."""
        raise VLLMValidationError("media are fetched by asynchronous routes only")

    def _socket(self, found: Any) -> socket.socket:
        """For an address that was found. Raises VLLMValidationError: not one that vLLM would try again."""
        family, kind, protocol, _, address = found
        if address[0] not in self._allowed and not is_public(address[0]):
            raise VLLMValidationError(
                "this URL leads to an address that is not public; send the data itself (data:...;base64,...), or have "
                "the operator list the host with --allowed-media-domains"
            )
        return socket.socket(family, kind, protocol)


class _Resolver(aiohttp.ThreadedResolver):
    """Notes in `allowed` what the hosts in `listed` resolve to."""

    def __init__(self, listed: set[str], allowed: set[str]) -> None:
        super().__init__(loop=asyncio.get_running_loop())
        self._listed, self._noted = listed, allowed

    async def resolve(self, host: str, port: int = 0, family: Any = socket.AF_INET) -> Any:
        found = await super().resolve(host, port, family)
        if host in self._listed:
            self._noted.update(one["host"] for one in found)
        return found


def is_public(host: str) -> bool:
    """Whether an address (no name) is reached by the public network, an address in another one's clothes too."""
    address = _address(host)
    if address is None or not address.is_global or address.is_multicast:
        return False
    if isinstance(address, ipaddress.IPv4Address):
        return True
    inside = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if address in _NAT64:
        inside.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return all(one.is_global for one in inside if one is not None)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
