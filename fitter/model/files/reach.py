"""Hosts that this process may ask for models: all, or only those of the public internet.

Set once for the process, so that no connection can be forgotten. The checked address is the one that is connected to,
whatever names or redirects say.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket

from fitter.errors import ModelError, Remedy

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
"""RFC 6052: the last 32 bits are an IPv4 address."""
_LOCAL = (ipaddress.ip_network("64:ff9b:1::/48"), ipaddress.ip_network("192.0.0.0/24"))
"""Networks of RFC 8215 and RFC 6890 that some versions of Python call public."""

_is_limited = False


def only_public(is_so: bool = True) -> None:
    """Refuse connections for models to addresses that are not public: loopback, private, link-local and so on.

    Proxies are then ignored, because they connect to any address.
    """
    global _is_limited
    _is_limited = is_so


def is_limited() -> bool:
    """Return whether only public addresses are allowed."""
    return _is_limited


def is_public(address: str) -> bool:
    """Return whether a numeric address, and any address embedded in it, is of the public internet."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(parsed, ipaddress.IPv6Address):
        inner = parsed.ipv4_mapped or parsed.sixtofour or (parsed.teredo[1] if parsed.teredo else None)
        if parsed in _NAT64:
            inner = ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF)
        if inner is not None and not is_public(str(inner)):
            return False
        if parsed.ipv4_mapped is not None or parsed in _NAT64:
            return True
        if parsed.is_site_local:
            return False
    if any(parsed in network for network in _LOCAL):
        return False
    return parsed.is_global and not (parsed.is_multicast or parsed.is_reserved or parsed.is_unspecified)


class PublicConnection(http.client.HTTPConnection):
    """A connection to a public address: the name is resolved once, and the found address is connected to."""

    def connect(self) -> None:
        """Connect. Raises ``ModelError`` if the host has an address that is not public, and ``OSError``."""
        infos = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        if not all(is_public(str(address[0])) for *_, address in infos):
            raise ModelError(
                f"{self.host} is in a private network, which is not asked for models: ",
                Remedy("start the server with --allow-private-addresses if it may be", "allow_private_addresses"),
            )
        failed: OSError | None = None
        for family, kind, protocol, _, address in infos:
            sock = socket.socket(family, kind, protocol)
            try:
                sock.settimeout(self.timeout)
                sock.connect(address)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.sock = sock
                return
            except OSError as error:
                sock.close()
                failed = error
        raise failed or OSError(f"{self.host} has no address")


class PublicTlsConnection(http.client.HTTPSConnection, PublicConnection):
    """The same with TLS, with the certificate of the name."""


def connection_kind(scheme: str) -> type[http.client.HTTPConnection]:
    """Return the class of connections for a scheme, ``http`` or ``https``."""
    if _is_limited:
        return PublicTlsConnection if scheme == "https" else PublicConnection
    return http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
