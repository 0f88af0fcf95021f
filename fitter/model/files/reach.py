"""Which hosts this process may ask for models: all of them, or only those of the public internet.

That is decided once for the process, so that nothing that asks can be forgotten. What is checked is the address that
is connected to: whatever a name or a redirect says, and whatever it says the next time.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket

from fitter.errors import ModelError

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
"""RFC 6052: the last 32 bits are an IPv4 address."""
_LOCAL = (ipaddress.ip_network("64:ff9b:1::/48"), ipaddress.ip_network("192.0.0.0/24"))
"""RFC 8215 and RFC 6890, of which some versions of Python take some addresses for public."""

_is_limited = False


def only_public(is_so: bool = True) -> None:
    """Have every connection for a model refused whose peer is not public: loopback, private, link-local and the like.

    Proxies are not used then, as they would connect to what they like.
    """
    global _is_limited
    _is_limited = is_so


def is_limited() -> bool:
    """Whether only public addresses are connected to."""
    return _is_limited


def is_public(address: str) -> bool:
    """Whether ``address``, in numbers, is of the public internet; of one that stands for another, whether both are."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour or (found.teredo[1] if found.teredo else None)
        if found in _NAT64:
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if inner is not None and not is_public(str(inner)):
            return False
        if found.ipv4_mapped is not None or found in _NAT64:
            return True
        if found.is_site_local:
            return False
    if any(found in network for network in _LOCAL):
        return False
    return found.is_global and not (found.is_multicast or found.is_reserved or found.is_unspecified)


class PublicConnection(http.client.HTTPConnection):
    """A connection to a public address, or none: the name is looked up once, and what was found is connected to."""

    def connect(self) -> None:
        """Raises ``ModelError`` where the host has an address that is not public, and ``OSError``."""
        found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        if not all(is_public(str(address[0])) for *_, address in found):
            raise ModelError(
                f"{self.host} is in a private network, which is not asked for models: start the server with "
                "--allow-private-addresses if it may be"
            )
        failed: OSError | None = None
        for family, kind, protocol, _, address in found:
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
    """The same with TLS, which asks for the certificate of the name."""


def connection_kind(scheme: str) -> type[http.client.HTTPConnection]:
    """What connects to a host of a URL with that scheme, ``http`` or ``https``."""
    if _is_limited:
        return PublicTlsConnection if scheme == "https" else PublicConnection
    return http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
