"""What the words of pct, lxc-attach, sudo and ssh mean, and the way out of each.

The texts are those of pve-container 6.1 and of LXC 4 and 5; older versions of pct put `Error: ` before theirs. They are only
looked at when no agent answered, and only to explain: an exit code is never branched on.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto

from dflashctl.errors import ConnectionLost, NoAnswer
from remote.protocol.errors import DflashError, preflight_error


@dataclass(frozen=True)
class Place:
    """A container as its sentences name it. `pct`: the command as a person would type it on the host; `user`: who may."""

    ct: str
    host: str
    pct: str
    user: str


class Ask(Enum):
    """What has to be asked before the sentence is complete."""

    NOTHING = auto()
    LOCK = auto()
    NODE = auto()
    STATUS = auto()


@dataclass(frozen=True)
class _Row:
    """One kind of words. `error` and `hint` may name {ct}, {host}, {pct} and the groups of `pattern`."""

    pattern: str
    error: str
    hint: str
    ask: Ask = Ask.NOTHING
    only_silent: bool = False


@dataclass(frozen=True)
class Reading:
    """What was understood: the sentence as far as the words give it, and what would make it better."""

    error: NoAnswer
    ask: Ask


_STOPPED = ("container {ct} on {host} is stopped", "start it there: `{pct} start {ct}`")
_MISSING = (
    "there is no container {ct} on {host}",
    "`{pct} list` shows the containers of that node; one on another node of the cluster is reached with --host of that node",
)
_COPY_HINT = "dflashctl copies nothing with pct; another program on {host} did, and what it copied is not to be trusted"
_NO_PYTHON_HINT = (
    "install one from there: `{pct} exec {ct} -- apt-get install -y python3 python3-venv`; "
    "or name another one with --python PATH"
)
_NOT_PROXMOX = (
    "{host} has no pct: it is not a Proxmox host",
    "name the Proxmox host of container {ct} with --host, or leave --ct out to run on {host} itself",
)
_SUDOERS_HINT = (
    "allow it there: `{user} ALL=(root) NOPASSWD: /usr/sbin/pct` in /etc/sudoers.d/dflashctl, or use --host root@..."
)
_BUG = (
    "pct on {host} does not understand what dflashctl asked",
    "this is a bug of dflashctl: please report it with -v's lines",
)

_ROWS = (
    # pct: the container's state.
    _Row(r"container '{ct}' not running!|CT {ct} not running", *_STOPPED, Ask.LOCK),
    _Row(
        r"CT {ct} already running",
        "container {ct} on {host} was being started by somebody else",
        "repeat the command: it runs now",
    ),
    _Row(
        r"CT is locked \((?P<lock>[\w-]+)\)",
        "container {ct} on {host} is locked ({lock})",
        "wait until that has ended; a lock that a dead task left is removed there with `{pct} unlock {ct}`",
    ),
    _Row(r"Configuration file 'nodes/[^/']+/lxc/{ct}\.conf' does not exist", *_MISSING, Ask.NODE),
    _Row(
        r"can't lock file '[^']*pve-config-{ct}\.lock' - got timeout",
        "container {ct} on {host} is busy: its configuration stayed locked",
        "another pct works on it; repeat the command when that has ended",
    ),
    _Row(
        r"trying to acquire lock",
        "container {ct} on {host} is busy: pct waits for its lock",
        "another pct works on it; repeat the command when that has ended",
        only_silent=True,
    ),
    # pct push and pull: never used by us, and explained all the same for whoever wraps pct around them.
    _Row(
        r"can only (?:push|pull) files (?:to|from) a running (?:CT|VM)",
        "pct cannot copy files: container {ct} on {host} does not run there",
        "start it there: `{pct} start {ct}`; or it is on another node of the cluster",
        Ask.STATUS,
    ),
    _Row(
        r"failed to create file: (?P<path>.+): (?P<why>[A-Z][a-z][A-Za-z ]+)",
        "pct could not write {path} in container {ct}: {why}",
        _COPY_HINT,
    ),
    _Row(
        r"failed to open (?P<path>.+) for reading",
        "pct could not read {path} to copy it for container {ct}",
        _COPY_HINT,
    ),
    _Row(
        r"failed to change file owner: |invalid mode: '|failed to get [ug]id for: ",
        "pct could not set owner or mode of a file in container {ct}",
        _COPY_HINT,
    ),
    # lxc-attach. Before 2019 pct left it to this one to find out that the container does not run.
    _Row(r"lxc-attach: {ct}: .*Failed to get (?:init pid|attach context)", *_STOPPED, Ask.STATUS),
    _Row(
        r"lxc-attach: {ct}: .*Permission denied - Failed to exec \"(?P<program>[^\"]+)\"",
        "{program} in container {ct} on {host} is not executable",
        "make it executable, or name another Python with --python PATH",
    ),
    _Row(
        r"lxc-attach: {ct}: .*Failed to exec \"(?P<program>[^\"]+)\"",
        "container {ct} on {host} has no {program}",
        _NO_PYTHON_HINT,
    ),
    # The host: no pct, or none for this user.
    _Row(
        # bash, dash and sudo; zsh and fish put the words the other way round.
        r"\bpct: (?:command not found|not found|No such file or directory)"
        r"|(?:no such file or directory|command not found|Unknown command): (?:/usr/sbin/)?pct\b",
        *_NOT_PROXMOX,
    ),
    _Row(
        r"sudo: (?:a password is required|a terminal is required|no tty present)",
        "sudo on {host} wants a password for pct",
        _SUDOERS_HINT,
    ),
    _Row(
        r"sudo: (?:command not found|not found)",
        "{host} has no sudo, and pct needs root",
        "use --host root@..., or install sudo there",
    ),
    _Row(
        r"is not in the sudoers file|is not allowed to execute|is not allowed to run sudo",
        "sudo on {host} does not allow pct to {user}",
        _SUDOERS_HINT,
    ),
    _Row(
        r"please run as root",
        "pct on {host} has to be run by root",
        "use --host root@..., or a user who may run `sudo -n /usr/sbin/pct`",
    ),
    # Words for a pct that was called wrongly: nobody but us can mend that.
    _Row(r"400 (?:Parameter verification failed|unable to parse option)", *_BUG),
    _Row(r"Unknown option: |missing command at \S*pct\.pm line|ERROR: unknown command 'pct", *_BUG),
)

# What OpenSSH says where it carries us (a ProxyCommand); our own connections fail with exceptions that name the hop.
_SSH_ROWS = (
    _Row(
        r"REMOTE HOST IDENTIFICATION HAS CHANGED!",
        "the host key of a hop to {host} has changed",
        "if the machine was set up anew: `dflashctl hosts trust --replace`; if not, somebody may be in between",
    ),
    _Row(
        r"Host key verification failed\.",
        "the host key of a hop to {host} is not known",
        "compare its fingerprint and accept it: `dflashctl hosts trust`",
    ),
    _Row(
        r"Permission denied \([a-z-]+(?:,[a-z-]+)*\)",
        "a hop to {host} refused the login",
        "check user and key: `ssh HOST true` must work without a question",
    ),
    _Row(
        r"(?m)(?:^|connect to .*: )Connection refused",
        "a hop to {host} refused the connection",
        "check that sshd runs there and the port is right",
    ),
    _Row(
        r"Connection timed out",
        "a hop to {host} did not answer",
        "check that the machine is up and no firewall is between",
    ),
    _Row(
        r"Could not resolve hostname",
        "the name of a hop to {host} is not known",
        "check its spelling and HostName in the ssh configuration",
    ),
)


def read(said: str, place: Place, *, silent: bool = False) -> Reading | None:
    """Return what `said` means for `place`; None when nothing in it is known. Noise before, after and between is skipped."""
    for row in (*_ROWS, *_SSH_ROWS):
        match = re.search(row.pattern.replace("{ct}", re.escape(place.ct)), said)
        if match is None or (row.only_silent and not silent):
            continue
        names = {**vars(place), **match.groupdict()}
        error = NoAnswer(row.error.format(**names), cause=_line_of(match), hint=row.hint.format(**names))
        return Reading(error, row.ask)
    return None


def _line_of(match: re.Match[str]) -> str:
    """Return the line a match stands in: the far end's own words."""
    text = match.string
    start = text.rfind("\n", 0, match.start()) + 1
    end = text.find("\n", match.end())
    return text[start : len(text) if end < 0 else end].strip()[:300]


def stopped(place: Place, lock: str, cause: str) -> NoAnswer:
    """Return the sentence for a container that does not run; `lock`: what holds it ("" for nothing)."""
    if lock:
        return NoAnswer(
            f"container {place.ct} on {place.host} is stopped and locked ({lock})",
            cause=f"a task of that kind works on it, or died and left its lock; {cause}",
            hint=f"wait for its end, else `{place.pct} unlock {place.ct}`; then `{place.pct} start {place.ct}`",
        )
    error, hint = (text.format(**vars(place)) for text in _STOPPED)
    return NoAnswer(error, cause=cause, hint=hint)


def frozen(place: Place, lock: str) -> NoAnswer:
    """Return the sentence for a container that runs, as pct says, and does not answer."""
    if lock:
        return NoAnswer(
            f"container {place.ct} on {place.host} does not answer while it is locked ({lock})",
            cause="pct says that it runs; a backup in suspend mode freezes a container while it copies",
            hint="repeat the command when that has ended; what runs in the container goes on then",
        )
    return NoAnswer(
        f"container {place.ct} on {place.host} does not answer: it is frozen or overloaded",
        cause="pct says that it runs, and nothing came of what was started in it",
        hint=f"`lxc-info -n {place.ct}` there says FROZEN if it is, and `lxc-unfreeze -n {place.ct}` wakes it",
    )


def elsewhere(place: Place, found: str, cause: str) -> NoAnswer | None:
    """Return the sentence for a guest whose configuration lies at `found` (/etc/pve/nodes/NODE/KIND/ID.conf)."""
    match = re.search(rf"/nodes/([^/\s]+)/(lxc|qemu-server)/{re.escape(place.ct)}\.conf", found)
    if match is None:
        return None
    node, kind = match.groups()
    if kind == "qemu-server":
        return NoAnswer(
            f"{place.ct} is a virtual machine on node {node}, not a container",
            cause=cause,
            hint="reach a virtual machine by ssh: --host of its own and no --ct",
        )
    return NoAnswer(
        f"container {place.ct} is on node {node}, not on {place.host}",
        cause=cause,
        hint=f"name that node's address with --host, or migrate the container: `pct migrate {place.ct} ...` on {node}",
    )


def host_silent(place: Place, seconds: float) -> NoAnswer:
    """Return the sentence for a host that did not even answer a question about the container."""
    return NoAnswer(
        f"{place.host} does not answer",
        cause=f"neither container {place.ct} nor `pct status {place.ct}` said anything, the latter for {seconds:.0f} s",
        hint="the host hangs or is overloaded, or the connection to it is gone; repeat the command when it is back",
    )


_OLD_PYTHON = re.compile(r"agent: Python 3\.11 or newer is needed, this is (?P<version>[0-9.]+)")


def old_python(said: str, where: str, python: str) -> DflashError | None:
    """Return the sentence for a Python that is too old to run an agent, or None when it is not that (exit code 7)."""
    match = _OLD_PYTHON.search(said)
    if match is None:
        return None
    return preflight_error(
        f"{python} of {where} is Python {match['version']}, and 3.11 or newer is needed",
        cause=_line_of(match),
        hint="over there: `apt-get install -y python3.11 python3.11-venv` (or another way to get one), then "
        "`python3.11 -m venv /opt/dflash-venv`, and here --python /opt/dflash-venv/bin/python",
    )


CONNECTION_LOST = "the connection broke off"
"""What a channel says, as its diagnostics, when its connection ended before the command had said that it did."""


def broke_off(said: str, where: str) -> ConnectionLost | None:
    """Return the sentence for a command whose connection was lost before it answered, None when it was not."""
    if CONNECTION_LOST not in said.splitlines():
        return None
    return ConnectionLost(
        f"the connection to {where} broke off",
        cause="it ended before there was an answer",
        hint="repeat the command; what runs over there goes on",
    )


_SPOKE = re.compile(r"can't open file '|can't find '__main__' module|Traceback \(most recent call last\)|\bagent: ")


def python_spoke(said: str) -> bool:
    """Whether a Python at the far end said something: then every hop is well, and the fault lies behind them."""
    return _SPOKE.search(said) is not None
