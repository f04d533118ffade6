"""Rules that keep web pages from using this server with the rights of the person who views the page.

A page in a browser on this machine can send requests to loopback, where a server often has no keys. Three rules hold on
every route:

1. Host. A server bound to loopback answers loopback names and --allowed-hosts only. A page whose domain resolves to
   127.0.0.1 (DNS rebinding) sends the name of its domain. A server bound to another address does not know its names: it
   answers any Host, unless --allowed-hosts is given. A request without Host (HTTP/1.0) is answered, since every browser
   sends a Host. 0.0.0.0, which many programs say for loopback, is answered, but not to a browser: browsers leave
   Sec-Fetch-Site out there, so rule 2 could not tell whose page a GET is of.
2. Origin. A request of a page of another origin is refused, with any method and type. The Origin header of such a
   request is neither this server's host and port nor one of --allowed-origins. Browsers send Origin with every POST to
   another origin. A plain GET (an image, a link) has no Origin, but has cross-site or same-site in Sec-Fetch-Site.
3. Content-Type. The body of a POST or PUT is JSON, octets, or of curl's default type (curl -d), or has no type. This
   rule is a second defence behind rule 2: a page can send text/plain, multipart and forms to another origin without a
   preflight request. Forms have curl's default type, so only rule 2 stops them.

Rule 2 refuses preflight requests (OPTIONS) of other origins. Starlette's CORSMiddleware answers those of
--allowed-origins. Without that flag no reply has a CORS header.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

from starlette.types import Scope

from fastdeploy.core.config import ServeConfig, is_loopback
from fastdeploy.core.errors import FastDeployError, Forbidden, UnsupportedBody

BODY_TYPES = ("application/json", "application/octet-stream", "application/x-www-form-urlencoded")
HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)]|([^:\[\]]*))(?::[0-9]*)?")  # an address in brackets, or a name; and a port
ANY_ADDRESS = ("0.0.0.0", "::")
BROWSER = "mozilla/"  # the beginning of the User-Agent of every browser, which pages cannot change in a plain GET
OWN_SITE = ("none", "same-origin")  # values of Sec-Fetch-Site: typed by the user, or sent by a page of this server


@dataclasses.dataclass(frozen=True)
class PagePolicy:
    """The settings of the rules. hosts: names that Host may have besides those of loopback; None = any. origins:
    origins of other pages that may use this server; "*" = any."""

    hosts: frozenset[str] | None
    origins: frozenset[str]

    @classmethod
    def of(cls, config: ServeConfig) -> PagePolicy:
        """Return the policy of a server with these settings."""
        named = frozenset(host_name(host) for host in config.allowed_hosts)
        anything = "*" in named or (not named and not is_loopback(config.host))
        return cls(None if anything else named | {host_name(config.host)}, frozenset(config.allowed_origins))

    def check(self, scope: Scope) -> FastDeployError | None:
        """Return the :func:`refusal` of the request of ``scope``."""
        return refusal(scope["method"], scope["headers"], self)


def refusal(method: str, headers: Iterable[tuple[bytes, bytes]], policy: PagePolicy) -> FastDeployError | None:
    """Return the error for a request that breaks a rule of this module, or None."""
    given: dict[str, list[str]] = {}
    for name, value in headers:
        given.setdefault(name.decode("latin-1"), []).append(value.decode("latin-1").strip())
    hosts = given.get("host", [])
    from_browser = any(agent.lower().startswith(BROWSER) for agent in given.get("user-agent", []))
    if not all(_is_allowed_host(host, policy.hosts, from_browser) for host in hosts):
        return Forbidden("the Host header names no host of this server (--allowed-hosts adds names)")
    own = hosts[0] if hosts else ""
    if _is_foreign(given.get("origin", []), given.get("sec-fetch-site", []), own, policy.origins):
        return Forbidden("requests of web pages of other origins are refused (--allowed-origins adds origins)")
    types = given.get("content-type", [])
    if method in ("POST", "PUT") and not all(_media_type(value) in BODY_TYPES for value in types):
        return UnsupportedBody(f"Content-Type: expected application/json (or {', '.join(BODY_TYPES[1:])})")
    return None


def _is_allowed_host(host: str, allowed: frozenset[str] | None, from_browser: bool) -> bool:
    name = host_name(host)
    if name in ANY_ADDRESS:
        return not from_browser
    return allowed is None or not name or is_loopback(name) or name in allowed


def _is_foreign(origins: list[str], sites: list[str], own_host: str, allowed: frozenset[str]) -> bool:
    if "*" in allowed:
        return False
    if origins:  # a page in a file or a sandbox has the origin "null", which is never allowed
        return not all(o in allowed or (own_host and o.partition("://")[2] == own_host) for o in origins)
    return not all(site in OWN_SITE for site in sites)


def _media_type(value: str) -> str:
    return value.partition(";")[0].strip().lower()


def host_name(host: str) -> str:
    """Return ``host`` without port and brackets, in lower case: "[::1]:80" becomes "::1". Text of any other form is no
    name of a host, and is returned as a whole: a part of it must not pass for one."""
    match = HOST.fullmatch(host)
    return (match[1] or match[2] if match else host).lower().removesuffix(".")
