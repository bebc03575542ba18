"""What is said of a hop that cannot be used: one sentence a reason, each with its cause and its way out."""

from __future__ import annotations

from paramiko.ssh_exception import IncompatiblePeer

from dflashctl.errors import NoAnswer
from dflashctl.transport.knownhosts import Changed, HostKey, Revoked, Unknown, Verdict
from dflashctl.transport.sshchannel import LOST
from dflashctl.transport.sshconfig import Hop


class HostKeyRefused(NoAnswer):
    """A hop showed a key that known_hosts does not vouch for."""


def refused(hop: Hop, key: HostKey, verdict: Verdict, destination: str) -> HostKeyRefused:
    """Return the sentence for a key that is unknown, changed or revoked. `destination`: as the operator typed it."""
    trust = f"dflashctl hosts trust --host {destination}"
    if isinstance(verdict, Revoked):
        return HostKeyRefused(
            f"the host key of {hop.label} is revoked",
            cause=f"it showed {key}, which {verdict.place} forbids",
            hint="do not connect: somebody else may have this key; the machine needs a new one",
        )
    if isinstance(verdict, Changed):
        old = ", ".join(f"{entry.key} in {entry.place}" for entry in verdict.entries)
        return HostKeyRefused(
            f"the host key of {hop.label} has changed",
            cause=f"it showed {key}, but known is {old}: another machine, or one that was installed anew",
            hint=f"if it was, compare the fingerprint with the one there, then run `{trust} --replace`",
        )
    cause = f"it showed {key}"
    if isinstance(verdict, Unknown) and verdict.authority is not None:
        cause += f"; {verdict.authority.place} trusts a certificate authority for it, which dflashctl cannot check"
    return HostKeyRefused(
        f"the host key of {hop.label} is not known",
        cause=cause,
        hint=f"compare it with `ssh-keygen -lf /etc/ssh/ssh_host_{key.name.lower()}_key.pub` there, then run `{trust}`",
    )


def no_handshake(hop: Hop, error: Exception, version: str, seconds: float, trouble: str) -> NoAnswer:
    """Return the sentence for a connection that was made and on which no ssh came about.

    `version`: what the far end called itself, "" if it did not; `seconds` it took; `trouble`: what a proxy command said.
    """
    if trouble:
        return NoAnswer(
            f"the ProxyCommand for {hop.label} failed",
            cause=trouble,
            hint="try `ssh` by hand with the same destination",
        )
    if isinstance(error, IncompatiblePeer):
        return NoAnswer(
            f"{hop.label} and dflashctl have no algorithm in common",
            cause=str(error),
            hint="its sshd is older than 2016 or configured narrowly; see Ciphers, KexAlgorithms and HostKeyAlgorithms there",
        )
    if "Signature verification" in str(error):
        return NoAnswer(
            f"{hop.label} does not prove that the host key it shows is its own",
            cause=str(error),
            hint="do not trust this way: something between changes what is sent",
        )
    if not isinstance(error, LOST):
        return _garbled(hop, error)
    if seconds >= hop.timeout - 0.2:
        what = "said nothing" if not version else f"({version}) fell silent while keys were agreed"
        return NoAnswer(
            f"{hop.label} accepts connections but does not answer",
            cause=f"it {what} for {hop.timeout:.0f} s",
            hint="its sshd hangs, or another program listens on that port",
        )
    if version:
        return NoAnswer(
            f"{hop.label} closed the connection while keys were agreed",
            cause=str(error) or "it ended without a word",
            hint="see its log (`journalctl -u ssh`): sshd says there why",
        )
    return NoAnswer(
        f"what listens on {hop.label} speaks no ssh",
        cause=str(error).removeprefix("Error reading SSH protocol banner") or "it closed the connection at once",
        hint="check the port (--host HOST:PORT); a busy sshd (MaxStartups) drops connections like this too",
    )


def lost(hop: Hop, error: Exception, when: str) -> NoAnswer:
    """Return the sentence for a connection that was there. `when`: what was going on, as "while ..."."""
    if isinstance(error, TimeoutError) or "imeout" in str(error):
        return NoAnswer(
            f"{hop.label} fell silent",
            cause=f"no answer within {hop.timeout:.0f} s, {when}",
            hint="its sshd hangs, or the network between is gone; try again",
        )
    if not isinstance(error, LOST):
        return _garbled(hop, error)
    return NoAnswer(
        f"the connection to {hop.label} broke off",
        cause=f"{str(error) or 'it ended without a word'}, {when}",
        hint="try again; what runs over there goes on",
    )


def _garbled(hop: Hop, error: Exception) -> NoAnswer:
    return NoAnswer(
        f"what {hop.label} sends cannot be understood",
        cause=f"{type(error).__name__}: {error}".removesuffix(": ")[:300],
        hint="something between damages what is sent, or it is no ssh; --debug shows where it was noticed",
    )
