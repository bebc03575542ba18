"""Logging in by key: which keys are offered, in OpenSSH's order, and what is said when none opens the door. No passwords."""

from __future__ import annotations

import base64
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paramiko
from paramiko.agent import AgentKey, AgentSSH
from paramiko.pkey import UnknownKeyType  # pyright: ignore  # not in the stubs
from paramiko.ssh_exception import BadAuthenticationType

from dflashctl.errors import NoAnswer
from dflashctl.transport.knownhosts import HostKey
from dflashctl.transport.sshconfig import Hop


@dataclass(frozen=True)
class Offer:
    """A key to log in with, and its name for people."""

    key: Any
    name: str


class _Agent(AgentSSH):
    """The agent at a socket. paramiko's own knows the one of SSH_AUTH_SOCK only, and waits for it for ever."""

    def __init__(self, path: str, seconds: float) -> None:
        super().__init__()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(seconds)
            connection.connect(path)
            self._connect(connection)  # pyright: ignore  # not in the stubs; what paramiko's own agents call
        except BaseException:
            connection.close()
            raise

    def close(self) -> None:
        self._close()  # pyright: ignore  # as above


class KeyLogin:
    """Logs in at one hop; paramiko calls `authenticate` once the host key was verified."""

    def __init__(self, hop: Hop) -> None:
        self._hop = hop
        self._refused: list[str] = []
        self._left_out: list[str] = []
        self._encrypted: list[Path] = []
        self._agent: _Agent | paramiko.Agent | None = None

    def authenticate(self, transport: paramiko.Transport) -> list[str]:
        """Offer key after key until one is accepted. Raises NoAnswer that names who, and what was offered."""
        try:
            methods: list[str] = []
            for offer in self._offers():
                try:
                    further = transport.auth_publickey(self._hop.user, offer.key)
                except BadAuthenticationType as error:
                    methods = list(error.allowed_types)
                    break
                except (paramiko.SSHException, OSError, EOFError) as error:
                    self._refused.append(offer.name)
                    if not transport.is_active() or _is_timeout(error):
                        raise self._broke_off(offer, error) from error
                else:
                    if further:
                        raise self._wants_more(offer, further)
                    return []
            # Some servers (Tailscale's) let in without any key; the others name the methods that they accept.
            return self._log_in_without_key(transport, methods)
        finally:
            if self._agent is not None:
                self._agent.close()

    def _log_in_without_key(self, transport: paramiko.Transport, methods: list[str]) -> list[str]:
        try:
            transport.auth_none(self._hop.user)
        except BadAuthenticationType as error:
            raise self._denied(methods or list(error.allowed_types)) from None
        except (paramiko.SSHException, OSError, EOFError):
            raise self._denied(methods) from None
        return []

    def _offers(self) -> Iterator[Offer]:
        """Yield certificates and keys: those of the agent that the configuration names, the agent's others, then files."""
        in_agent = self._agent_keys()
        named = {blob: path for path in self._hop.identities if (blob := _public_blob(path))}
        for blob, key in in_agent.items():
            if blob in named:
                yield Offer(key, f"{_shown(named[blob])} (from the agent)")
        for blob, key in in_agent.items():
            if blob not in named and not self._hop.identities_only:
                yield Offer(key, f"{getattr(key, 'comment', '') or HostKey(key.get_name(), blob)} (from the agent)")
        for path in self._hop.identities:
            if _public_blob(path) not in in_agent:
                yield from self._file_offers(path)

    def _file_offers(self, path: Path) -> Iterator[Offer]:
        key = self._load(path)
        if key is None:
            return
        # A certificate beside the key was loaded with it; offered first, as it may open what the bare key does not.
        if key.public_blob is not None:
            yield Offer(key, f"{_shown(path)}-cert.pub")
            key.public_blob = None
        for certificate in self._hop.certificates:
            if _certifies(certificate, key):
                key.load_certificate(str(certificate))
                yield Offer(key, _shown(certificate))
                key.public_blob = None
        yield Offer(key, _shown(path))

    def _load(self, path: Path) -> Any:
        try:
            return paramiko.PKey.from_path(path)
        except FileNotFoundError:
            # The default names are tried on every machine; one that somebody wrote down should be there.
            if not self._hop.default_identities:
                self._left_out.append(f"{_shown(path)} (no such file)")
        except TypeError:
            # What cryptography raises for a key that needs a passphrase.
            self._encrypted.append(path)
            self._left_out.append(f"{_shown(path)} (encrypted, and not in the agent)")
        except OSError as error:
            self._left_out.append(f"{_shown(path)} ({error.strerror})")
        except (ValueError, paramiko.SSHException, UnknownKeyType):
            # A public key alone means the agent's private one (IdentitiesOnly with a hardware key).
            kind = "not in the agent" if _public_blob(path) else "no private key that dflashctl can read"
            self._left_out.append(f"{_shown(path)} ({kind})")
        return None

    def _agent_keys(self) -> dict[bytes, AgentKey]:
        name = self._hop.agent
        try:
            if sys.platform == "win32":
                self._agent = paramiko.Agent()
            else:
                path = name if os.sep in name else os.environ.get(name, "")
                if not path:
                    return {}
                self._agent = _Agent(path, self._hop.timeout)
            return {key.asbytes(): key for key in self._agent.get_keys()}
        except (OSError, paramiko.SSHException) as error:
            self._left_out.append(f"the agent ({getattr(error, 'strerror', '') or error})")
            return {}

    def _broke_off(self, offer: Offer, error: Exception) -> NoAnswer:
        hop, count = self._hop, len(self._refused)
        if "signing" in str(error):
            return NoAnswer(
                f"the ssh agent does not sign with {offer.name}",
                cause="it refused, or whoever had to confirm did not",
                hint="try `ssh-add -l` and `ssh-add -T PUBLIC_KEY_FILE`",
            )
        if _is_timeout(error):
            return NoAnswer(
                f"{hop.label} fell silent while {hop.user} logged in",
                cause=f"no answer to {offer.name} within {hop.timeout:.0f} s",
                hint="try again; ConnectTimeout in the ssh configuration allows more time",
            )
        if count > 1:
            return NoAnswer(
                f"{hop.label} does not let {hop.user} in",
                cause=f"it closed the connection after {count} keys: {', '.join(self._refused)}",
                hint=self._with_user(
                    "name the right key with IdentityFile and IdentitiesOnly yes in the ssh configuration"
                ),
            )
        return NoAnswer(
            f"{hop.label} closed the connection while {hop.user} logged in",
            cause=str(error) or "it ended without a word",
            hint="see its log (`journalctl -u ssh`): sshd says there why",
        )

    def _wants_more(self, offer: Offer, further: list[str]) -> NoAnswer:
        return NoAnswer(
            f"{self._hop.label} wants more than a key of {self._hop.user}",
            cause=f"it accepted {offer.name} and asks for {', '.join(further)} besides",
            hint="let this account in by key alone: dflashctl cannot answer questions",
        )

    def _denied(self, methods: list[str]) -> NoAnswer:
        hop = self._hop
        parts = [f"refused: {', '.join(self._refused)}" if self._refused else "there was no key to offer"]
        parts += [f"left out: {', '.join(self._left_out)}"] if self._left_out else []
        parts += [f"it accepts {', '.join(methods)}"] if methods and "publickey" not in methods else []
        if self._encrypted:
            hint = f"unlock the key: `ssh-add {_shown(self._encrypted[0])}`"
        elif methods and "publickey" not in methods:
            hint = "let this account in by key (PubkeyAuthentication yes there): dflashctl types no passwords"
        else:
            port = "" if hop.port == 22 else f"-p {hop.port} "
            hint = f"put a public key of yours into authorized_keys there: `ssh-copy-id {port}{hop.user}@{hop.host}`"
        return NoAnswer(f"{hop.label} does not let {hop.user} in", cause="; ".join(parts), hint=self._with_user(hint))

    def _with_user(self, hint: str) -> str:
        if self._hop.user_named:
            return hint
        return f"nobody named a user, so it was {self._hop.user}: try --host root@{self._hop.host}; or {hint}"


def _is_timeout(error: Exception) -> bool:
    return isinstance(error, TimeoutError) or "timeout" in str(error).lower()


def _shown(path: Path) -> str:
    try:
        return f"~/{path.relative_to(Path.home()).as_posix()}"
    except ValueError:
        return str(path)


def _public_blob(path: Path) -> bytes:
    """Return the public key that belongs to a key file: from the file beside it, else from itself; b"" where unknown."""
    for candidate in (path.with_name(path.name + ".pub"), path):
        try:
            text = candidate.read_bytes()
            words = text.split()
            if text.startswith(b"-----BEGIN OPENSSH"):
                return _blob_in_private_key(base64.b64decode(b"".join(words[4:-4])))
            blob = base64.b64decode(words[1], validate=True)
            if _strings(blob)[0] == words[0]:
                return blob
        except (OSError, ValueError, IndexError):
            continue
    return b""


def _blob_in_private_key(body: bytes) -> bytes:
    # openssh/PROTOCOL.key: a magic word, cipher, KDF and its options, the number of keys; the public key is never encrypted.
    magic = b"openssh-key-v1\0"
    fields = _strings(body.removeprefix(magic), 3)
    return _strings(body[len(magic) + sum(4 + len(field) for field in fields) + 4 :])[0]


def _strings(data: bytes, count: int = 1) -> list[bytes]:
    """Return the first `count` strings of an ssh message, each behind its length in four bytes."""
    found: list[bytes] = []
    for _ in range(count):
        length = int.from_bytes(data[:4], "big")
        found.append(data[4 : 4 + length])
        data = data[4 + length :]
    return found


def _certifies(certificate: Path, key: Any) -> bool:
    """Whether a certificate is one of `key`: it repeats the key's numbers behind its own type and nonce."""
    blob: bytes = key.asbytes()
    numbers = blob[4 + len(_strings(blob)[0]) :]
    return numbers in _public_blob(certificate)
