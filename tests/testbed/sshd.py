"""A real sshd on loopback: keys of its own, a random port, and the failures of a real one on demand."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

SSHD = "/usr/sbin/sshd"
_START_PATIENCE = 5.0

# Debian's sshd asks PAM, which would look at the machine's own accounts and print its message of the day; this one does
# not. MaxStartups: the default drops connections at random from the tenth unauthenticated one on.
_CONFIGURATION = """\
{extra}
ListenAddress {address}:{port}
{host_keys}
AuthorizedKeysFile {folder}/authorized_keys
AllowUsers {users}
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
StrictModes no
UsePAM no
PidFile none
PrintMotd no
LogLevel VERBOSE
MaxStartups 200
"""


def missing_sshd() -> str:
    """Return why no sshd can be run here, "" when one can."""
    wanted = {SSHD: "openssh-server", "ssh-keygen": "openssh-client", "setpriv": "util-linux"}
    packages = [package for program, package in wanted.items() if shutil.which(program) is None]
    return f"no sshd here: apt-get install {' '.join(packages)}" if packages else ""


def free_port(address: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port


def make_key(path: Path, kind: str = "ed25519", passphrase: str = "") -> Path:
    """Make a key pair at `path` and `path`.pub; returns `path`."""
    command = ["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-C", "testbed", "-f", str(path)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    return path


class Sshd:
    """An sshd that lets `users` in by `client_key`. As an ordinary user only that user can be let in.

    `extra` are lines of its configuration, which win over the ones written here. `host_key_types` as ssh-keygen names
    them. `enter` is a command line prefix that runs what follows in another process namespace, which ends it at last: nsenter.
    Call start() from the thread that lives as long as the sshd shall: it dies with it.
    """

    def __init__(
        self,
        *,
        users: Sequence[str] = (),
        extra: str = "",
        host_key_types: Sequence[str] = ("ed25519",),
        address: str = "127.0.0.1",
        enter: Sequence[str] = (),
        folder: Path | None = None,
    ) -> None:
        self.users = tuple(users) or (getpass.getuser(),)
        self.extra = extra
        self.address = address
        self.port = 0
        # Not pytest's own directory: the keys are read by the user who logs in, and pytest's is closed to others.
        self.folder = folder or Path(tempfile.mkdtemp(prefix="testbed-sshd-"))
        self.folder.mkdir(exist_ok=True)
        self.folder.chmod(0o755)
        self.client_key = make_key(self.folder / "client_key")
        self._types = tuple(host_key_types)
        self._enter = tuple(enter)
        self._listener: subprocess.Popen[bytes] | None = None
        self._make_host_keys()
        (self.folder / "authorized_keys").write_text((self.folder / "client_key.pub").read_text())

    @property
    def host_keys(self) -> list[str]:
        """The public host keys, `type base64`, in the order of host_key_types."""
        files = (self.folder / f"host_{kind}.pub" for kind in self._types)
        return [" ".join(file.read_text().split()[:2]) for file in files]

    @property
    def host_key(self) -> str:
        """The first public host key, `type base64`."""
        return self.host_keys[0]

    @property
    def fingerprint(self) -> str:
        """SHA256:... of the first host key, as ssh-keygen says it."""
        command = ["ssh-keygen", "-l", "-f", str(self.folder / f"host_{self._types[0]}.pub")]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[1]

    @property
    def pid(self) -> int:
        """Of the listener."""
        assert self._listener is not None
        # Entering a process namespace takes a fork: then the child is the sshd, and has sshds below it.
        return next(iter(_sshds_below(self._listener.pid))) if self._enter else self._listener.pid

    def known_hosts_line(self, name: str = "", *, port: bool = True) -> str:
        """Return the lines of known_hosts for `name` ("" for the address), without the port for a HostKeyAlias."""
        name = name or self.address
        name = f"[{name}]:{self.port}" if port and self.port != 22 else name
        return "".join(f"{name} {key}\n" for key in self.host_keys)

    def authorize(self, public_key: Path) -> None:
        """Let the holder of another key in as well."""
        with (self.folder / "authorized_keys").open("a") as file:
            file.write(public_key.read_text())

    def log(self) -> str:
        """Return what it wrote so far, e.g. one "Accepted publickey" a connection."""
        return (self.folder / "log").read_text(errors="replace")

    def start(self) -> Sshd:
        """Start listening, on the port of before if it ran already."""
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        for _ in range(5):
            self.port = self.port or free_port(self.address)
            if self._listen():
                return self
            self.port = 0
        raise AssertionError(f"sshd does not start: {self.log()}")

    def _listen(self) -> bool:
        """Return False when another process was given the port meanwhile."""
        configuration = self.folder / "sshd_config"
        configuration.write_text(
            _CONFIGURATION.format(
                extra=self.extra,
                address=self.address,
                port=self.port,
                host_keys="\n".join(f"HostKey {self.folder}/host_{kind}" for kind in self._types),
                folder=self.folder,
                users=" ".join(self.users),
            )
        )
        # An interrupted test run must leave no sshd behind: it is killed when this thread dies.
        command = ["setpriv", "--pdeathsig", "KILL", *self._enter, SSHD, "-D", "-e", "-f", str(configuration)]
        with (self.folder / "log").open("ab") as log:
            before = len(self.log())
            self._listener = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + _START_PATIENCE
        while self._listener.poll() is None and time.monotonic() < deadline:
            # Its own log line, not a connection: one would count as a session that never logged in.
            if f"Server listening on {self.address} port {self.port}" in self.log()[before:]:
                return True
            time.sleep(0.01)
        self._end_listener()
        assert "Address already in use" in self.log()[before:], self.log()
        return False

    def stop(self) -> None:
        """End the listener and every session. start() brings it back on the same port."""
        if self._listener is not None:
            # Stopped first, so that no session is born between.
            _signal([self.pid], signal.SIGSTOP)
        sessions = self.sessions()
        self._end_listener()
        _signal(sessions, signal.SIGKILL)

    def close(self) -> None:
        """Stop and remove the keys."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def freeze(self) -> None:
        """Stop listener and sessions in their tracks: connections are still accepted, by the kernel."""
        # The listener first, so that no session escapes between.
        _signal([self.pid], signal.SIGSTOP)
        _signal(self.sessions(), signal.SIGSTOP)

    def thaw(self) -> None:
        if self._listener is not None:
            # nsenter stops itself with its child.
            _signal([*self.sessions(), self.pid, self._listener.pid], signal.SIGCONT)

    def sessions(self) -> list[int]:
        """Return the pids of the sshds that serve connections; what they run is not among them."""
        return list(_sshds_below(self.pid)) if self._listener is not None else []

    def kill_sessions(self) -> None:
        """Cut every connection at once; what ran through it goes on."""
        _signal(self.sessions(), signal.SIGKILL)

    def new_host_key(self) -> None:
        """Become another machine: new host keys on the same port. Open sessions go on."""
        self._end_listener()
        self._make_host_keys()
        self.start()

    def _make_host_keys(self) -> None:
        for kind in self._types:
            for name in (f"host_{kind}", f"host_{kind}.pub"):
                (self.folder / name).unlink(missing_ok=True)
            make_key(self.folder / f"host_{kind}", kind)

    def _end_listener(self) -> None:
        if self._listener is None:
            return
        if self._listener.poll() is None:
            _signal([self.pid, self._listener.pid], signal.SIGKILL)
        self._listener.wait()
        self._listener = None

    def __enter__(self) -> Sshd:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _sshds_below(parent: int) -> Iterator[int]:
    # sshd, or sshd-session from OpenSSH 9.8 on: a monitor, and below it for an ordinary user the process of that user.
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                name, _, rest = (entry / "stat").read_text(errors="replace").partition("(")[2].rpartition(")")
                if name.startswith("sshd") and not rest.startswith(" Z"):
                    children.setdefault(int(rest.split()[1]), []).append(int(entry.name))
    waiting = [parent]
    while waiting:
        found = children.get(waiting.pop(), [])
        yield from found
        waiting += found
