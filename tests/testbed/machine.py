"""A machine inside this one: mounts, processes, users and programs of its own, so that nothing here is changed.

It is a mount and a process namespace. Its process 1 dies with the thread that made it, and with process 1 the kernel ends
everything that runs there, containers included: an interrupted test run leaves nothing that runs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from remote.protocol.identity import ProcessIdentity, read_pidfile, write_pidfile

HERE = Path(__file__).parent
PREFIX = "dflash-testbed-"
SUDO_USER = "ops"
"""May only `sudo -n /usr/sbin/pct`."""
OTHER_USER = "guest"
"""May log in, and nothing more."""

# Overlays on a tmpfs: what is written there is gone with the namespace. /usr is bound aside before pct is put into it,
# for a container has none.
_SET_UP = f"""\
set -eu
state=$1
venv=$2
mount -t tmpfs -o mode=755 testbed "$state/overlay"
mkdir "$state/overlay/etc" "$state/overlay/etc.work" "$state/overlay/sbin" "$state/overlay/sbin.work"
mount --bind /usr "$state/source/usr"
mount --bind "$venv" "$state/source/venv"
mount -t overlay -o "lowerdir=/etc,upperdir=$state/overlay/etc,workdir=$state/overlay/etc.work" testbed /etc
mount -t overlay -o "lowerdir=/usr/sbin,upperdir=$state/overlay/sbin,workdir=$state/overlay/sbin.work" testbed /usr/sbin
mount -t tmpfs -o mode=755 testbed /run
mkdir -p /run/sshd /run/lock/lxc
mount -t tmpfs -o mode=755 testbed /var/log
mount --bind "$state/home/root" /root
mkdir -p /etc/pve
mount --bind "$state/pve" /etc/pve
id=4200
for user in {SUDO_USER} {OTHER_USER}; do
    echo "$user:x:$id:$id::$state/home/$user:/bin/bash" >>/etc/passwd
    echo "$user:x:$id:" >>/etc/group
    echo "$user:*:19000::::::" >>/etc/shadow
    chown "$id:$id" "$state/home/$user"
    id=$((id + 1))
done
echo "root:100000:65536" | tee -a /etc/subuid >>/etc/subgid
echo "127.0.1.1 $(uname -n)" >>/etc/hosts
mkdir -p /etc/sudoers.d
echo "{SUDO_USER} ALL=(root) NOPASSWD: /usr/sbin/pct" >/etc/sudoers.d/testbed
chmod 440 /etc/sudoers.d/testbed
printf '#!/bin/sh\\nexec /usr/bin/python3 -IS %s/pct.py %s "$@"\\n' "$state" "$state" >/usr/sbin/pct
chmod 755 /usr/sbin/pct
exec /usr/bin/python3 -IS "$state/init.py"
"""


@cache
def missing_machine() -> str:
    """Return why there can be no machine with containers here, "" when there can."""
    if os.geteuid() != 0:
        return "containers need root"
    wanted = {
        "lxc-start": "lxc",
        "sudo": "sudo",
        "newuidmap": "uidmap",
        "/usr/sbin/sshd": "openssh-server",
        "/usr/bin/python3": "python3",
    }
    packages = [package for program, package in wanted.items() if shutil.which(program) is None]
    if packages:
        return f"no containers here: apt-get install {' '.join(packages)}"
    # The root of a container that is itself locked in may not.
    tried = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "true"], capture_output=True, text=True, check=False
    )
    return f"this root may make no namespaces: {tried.stderr.strip()}" if tried.returncode else ""


def new_state() -> Path:
    """Make a directory that all users may enter, and remove those of test runs that were killed."""
    for old in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        owner = read_pidfile(old / "owner.pid")
        if owner is not None and not owner.is_alive():
            remove_state(old)
    state = Path(tempfile.mkdtemp(prefix=PREFIX))
    state.chmod(0o755)
    write_pidfile(state / "owner.pid", ProcessIdentity.of(os.getpid()))
    for name in (
        "overlay",
        "source/usr",
        "source/venv",
        "home/root",
        f"home/{SUDO_USER}",
        f"home/{OTHER_USER}",
        "locks",
    ):
        (state / name).mkdir(parents=True)
    for name in ("init.py", "pct.py", "backends.py"):
        shutil.copy(HERE / name, state / name)
    return state


def remove_state(state: Path) -> None:
    """Remove a testbed's files and control groups. Its processes have to be gone."""
    shutil.rmtree(state, ignore_errors=True)
    # Below the control group of whoever runs the tests, in each hierarchy.
    for hierarchy in Path("/sys/fs/cgroup").glob(f"**/{state.name}"):
        # Bottom-up; the files in a control group's directory need no removal.
        for directory, _, _ in os.walk(hierarchy, topdown=False):
            _remove_control_group(Path(directory))


def _remove_control_group(directory: Path) -> None:
    deadline = time.monotonic() + 1.0
    while True:
        try:
            directory.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            # Busy: the kernel takes a killed process out of its group a little after its end.
            if time.monotonic() > deadline:
                return
            time.sleep(0.01)


class Machine:
    """The namespaces, up from construction to close()."""

    def __init__(self, state: Path, venv: Path) -> None:
        self.state = state
        namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child=KILL", "--mount-proc", "--"]
        command = [
            "setpriv",
            "--pdeathsig",
            "KILL",
            *namespaces,
            "/bin/sh",
            "-c",
            _SET_UP,
            "testbed",
            str(state),
            str(venv),
        ]
        with (state / "machine.log").open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, cwd="/", text=True
            )
        assert self._process.stdout is not None
        ready = self._process.stdout.readline()
        assert ready == "ready\n", (state / "machine.log").read_text()
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text()
        self._init = int(children.split()[0])
        self.enter: tuple[str, ...] = ("nsenter", "--target", str(self._init), "--mount", "--pid", "--")

    def run(self, *argv: str, check: bool = True, **settings: object) -> subprocess.CompletedProcess[str]:
        """Run a command as root in there."""
        command: Sequence[str] = [*self.enter, *argv]
        defaults: dict[str, object] = {
            "capture_output": True,
            "text": True,
            "stdin": subprocess.DEVNULL,
            "timeout": 60,
            "env": {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8"},
        }
        done = subprocess.run(command, check=False, **{**defaults, **settings})  # type: ignore[call-overload]
        assert not check or done.returncode == 0, (argv, done.returncode, done.stdout, done.stderr)
        return done

    def close(self) -> None:
        """End everything in there."""
        # Its process 1, which the kernel reports dead only after everybody else; unshare ends with it.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._init, signal.SIGKILL)
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
