"""What the operator's ssh configuration says about a destination: the hops on the way, nearest first.

`ssh -G` is asked where ssh is installed, so that Include, Match, tokens and defaults mean what they mean to ssh itself. Without
it paramiko's reader serves: no Include, no Match exec, no system-wide file. Nothing is contacted here.
"""

from __future__ import annotations

import getpass
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remote.protocol.errors import DflashError, usage_error

CONNECT_TIMEOUT = 10.0
"""Seconds each stage of a connection may take where the configuration sets no ConnectTimeout."""
_MOST_HOPS = 8
_SSH_PATIENCE = 10.0
_PORT = 22
# The characters OpenSSH 9.6 refuses in names on its command line (ssh.c): `Match exec` hands names to a shell. And brackets.
_UNSAFE = set("'`\"$\\;&<>|(){}[]")
_DEFAULT_KEYS = tuple(
    f"~/.ssh/id_{kind}" for kind in ("rsa", "ecdsa", "ecdsa_sk", "ed25519", "ed25519_sk", "xmss", "dsa")
)

Options = Mapping[str, Sequence[str]]
"""The configuration of one destination: lower-case key to its values, as `ssh -G` prints them."""


@dataclass(frozen=True)
class Address:
    """A destination as typed, taken apart; "" and 0 where it leaves user and port to the configuration."""

    host: str
    user: str = ""
    port: int = 0


@dataclass(frozen=True)
class Hop:
    """One machine on the way. `key_name` is its name in known_hosts, of which `known_hosts` are the files."""

    host: str
    port: int
    user: str
    user_named: bool
    key_name: str
    known_hosts: tuple[Path, ...]
    global_known_hosts: tuple[Path, ...]
    revoked_keys: tuple[Path, ...] = ()
    hash_names: bool = False
    identities: tuple[Path, ...] = ()
    default_identities: bool = True
    certificates: tuple[Path, ...] = ()
    identities_only: bool = False
    agent: str = "SSH_AUTH_SOCK"
    proxy_command: str = ""
    timeout: float = CONNECT_TIMEOUT
    is_gateway: bool = False

    @property
    def place(self) -> str:
        """Where it is: host, and the port where it is not 22."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORT else f"{host}:{self.port}"

    @property
    def label(self) -> str:
        """Its name in a sentence."""
        return f"the gateway {self.place}" if self.is_gateway else self.place


def parse_destination(text: str) -> Address:
    """Take `[user@]host[:port]` apart; an IPv6 address with a port stands in brackets. Raises a usage error."""
    plain = text.removeprefix("ssh://")
    user, at, place = plain.rpartition("@")
    if "/" in plain:
        raise _bad(text, "a host has no slash: a container is named with --ct")
    if ":" in user:
        raise _bad("USER:...@" + place, "a password has no place on a command line; keys and agents log in")
    bracketed = re.fullmatch(r"\[([0-9A-Fa-f:.]+(?:%[\w.-]+)?)\](?::(.*))?", place)
    if bracketed:
        host, port = bracketed[1], bracketed[2]
    elif place.count(":") > 1:
        host, port = place, None
    else:
        host, colon, behind = place.partition(":")
        port = behind if colon else None
    if (at and not user) or not _is_safe(user, may_be_empty=True) or not _is_safe(host):
        raise _bad(text, "a name there is empty, begins with a dash, or has a character that no name has")
    if port is not None and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise _bad(text, f"{port!r} is no port")
    return Address(host, user, int(port or 0))


def resolve(destination: str, config_file: str = "") -> tuple[Hop, ...]:
    """Return the hops to `destination`, the nearest first and itself last. Raises a usage error.

    As in OpenSSH the last of `ProxyJump a,b` is reached through the ones before it, in place of a ProxyJump of its own.
    """
    hops: list[Hop] = []
    address, via = parse_destination(destination), None
    while True:
        options = _options(address, config_file)
        jumps = _jumps(options) if via is None else via
        hops.insert(0, _hop(address, options, behind_another=bool(jumps), is_gateway=bool(hops)))
        if not jumps:
            return tuple(hops)
        if len(hops) == _MOST_HOPS:
            raise usage_error(
                f"cannot reach {destination} like this",
                cause=f"the ssh configuration leads over more than {_MOST_HOPS} gateways: a ProxyJump goes round in a circle",
                hint=f"look at `ssh -G {destination}`",
            )
        *earlier, address = jumps
        # None, not []: a first gateway may have one of its own, by its own configuration.
        via = earlier or None


def behind_host(destination: str, config_file: str) -> str:
    """Return what stands behind --host in a command line that means the same, for hints."""
    return f"{destination} --ssh-config {shlex.quote(config_file)}" if config_file else destination


def _bad(text: str, cause: str) -> DflashError:
    return usage_error(
        f"{text!r} is no destination", cause=cause, hint="expected [user@]host[:port], with an IPv6 address in brackets"
    )


def _is_safe(name: str, *, may_be_empty: bool = False) -> bool:
    if not name:
        return may_be_empty
    # A leading dash would be an option of ssh: -oProxyCommand=... runs a command here.
    return name.isprintable() and not (name.startswith("-") or _UNSAFE & set(name) or any(map(str.isspace, name)))


def _options(address: Address, config_file: str) -> Options:
    program = shutil.which("ssh")
    if program is None:
        return _options_without_ssh(address, config_file)
    command = [program, "-G"]
    command += ["-F", config_file] if config_file else []
    command += ["-l", address.user] if address.user else []
    command += ["-p", str(address.port)] if address.port else []
    try:
        answer = subprocess.run(
            [*command, "--", address.host],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SSH_PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _bad_configuration(
            address, config_file, f"`ssh -G` said nothing for {_SSH_PATIENCE:.0f} s: a Match exec that hangs?"
        ) from None
    if answer.returncode != 0:
        said = answer.stderr.decode("utf-8", "replace").strip().splitlines()
        raise _bad_configuration(
            address, config_file, next((line for line in said if "Pseudo-" not in line), "no reason")
        )
    options: dict[str, list[str]] = {}
    # A file name may hold bytes that are no UTF-8; surrogateescape brings them back to the file system unchanged.
    for line in answer.stdout.decode("utf-8", "surrogateescape").splitlines():
        key, _, value = line.partition(" ")
        options.setdefault(key.lower(), []).append(value)
    return options


def _options_without_ssh(address: Address, config_file: str) -> Options:
    from paramiko import SSHConfig
    from paramiko.ssh_exception import ConfigParseError

    path = Path(config_file or "~/.ssh/config").expanduser()
    try:
        config = SSHConfig.from_path(str(path)) if config_file or path.is_file() else SSHConfig()
        found: dict[str, Any] = dict(config.lookup(address.host))
    except (OSError, ConfigParseError, ImportError, UnicodeDecodeError) as error:
        raise _bad_configuration(address, config_file, str(error)) from None
    options: dict[str, list[str]] = {"hostname": [address.host]}
    for key, value in found.items():
        # None is what it makes of `ProxyCommand none`.
        options[key] = [value] if isinstance(value, str) else list(value or ())
    options["user"] = [address.user] if address.user else options.get("user", [_local_user()])
    options["port"] = [str(address.port)] if address.port else options.get("port", [str(_PORT)])
    options.setdefault("identityfile", list(_DEFAULT_KEYS))
    options.setdefault("userknownhostsfile", ["~/.ssh/known_hosts ~/.ssh/known_hosts2"])
    options.setdefault("globalknownhostsfile", ["/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"])
    return options


def _bad_configuration(address: Address, config_file: str, cause: str) -> DflashError:
    return usage_error(
        f"the ssh configuration for {address.host} cannot be used",
        cause=cause,
        hint=f"look at {config_file} (--ssh-config)" if config_file else f"try `ssh -G {address.host}`",
    )


def _local_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""


def _jumps(options: Options) -> list[Address]:
    text = _one(options, "proxyjump")
    return [parse_destination(jump.strip()) for jump in text.split(",")] if text else []


def _one(options: Options, key: str) -> str:
    value = next(iter(options.get(key, ())), "")
    return "" if value.lower() == "none" else value


def _hop(address: Address, options: Options, *, behind_another: bool, is_gateway: bool) -> Hop:
    host, user = _one(options, "hostname") or address.host, _one(options, "user")
    port = int(_one(options, "port") or _PORT)
    alias, timeout = _one(options, "hostkeyalias"), _one(options, "connecttimeout")
    name = host.lower() if port == _PORT else f"[{host.lower()}]:{port}"
    tokens = {"h": host, "p": str(port), "r": user, "n": address.host, "k": alias or address.host, "u": _local_user()}
    tokens |= {"d": str(Path.home()), "%": "%"}
    identities = options.get("identityfile", [])
    return Hop(
        host=host,
        port=port,
        user=user,
        user_named=bool(address.user) or user != _local_user(),
        key_name=alias or name,
        known_hosts=_paths(_file_list(options, "userknownhostsfile"), tokens),
        global_known_hosts=_paths(_file_list(options, "globalknownhostsfile"), tokens),
        revoked_keys=_paths(_file_list(options, "revokedhostkeys"), tokens),
        hash_names=_one(options, "hashknownhosts") == "yes",
        identities=_paths(identities, tokens),
        default_identities=set(identities) <= set(_DEFAULT_KEYS),
        certificates=_paths(options.get("certificatefile", []), tokens),
        identities_only=_one(options, "identitiesonly") == "yes",
        agent=_agent(options, tokens),
        proxy_command="" if behind_another else _one(options, "proxycommand"),
        timeout=float(timeout) if timeout.isdigit() and int(timeout) else CONNECT_TIMEOUT,
        is_gateway=is_gateway,
    )


def _agent(options: Options, tokens: Mapping[str, str]) -> str:
    """Return the agent's socket, or the variable that names it; "" for none."""
    if "identityagent" not in options:
        return "SSH_AUTH_SOCK"
    value = _one(options, "identityagent")
    if not value or value == "SSH_AUTH_SOCK" or value.startswith("$"):
        return value.strip("${}")
    return str(Path(expand(value, tokens)).expanduser())


def _file_list(options: Options, key: str) -> list[str]:
    # `ssh -G` prints several files in one line and quotes nothing: a new one begins where a path can begin.
    return re.split(r"\s+(?=[/~%]|[A-Za-z]:[\\/])", text) if (text := _one(options, key)) else []


def _paths(names: Sequence[str], tokens: Mapping[str, str]) -> tuple[Path, ...]:
    return tuple(Path(expand(name, tokens)).expanduser() for name in names if name.lower() != "none")


def expand(text: str, tokens: Mapping[str, str]) -> str:
    """Put `tokens` in for %h and the like, in one pass; a token that is not among them stays as it is."""
    return re.sub("%(.)", lambda match: tokens.get(match[1], match[0]), text)
