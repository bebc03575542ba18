"""The containers of the testbed: a root file system of a few small files, the host's /usr, an init that reaps."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from testbed.pct import CONTROL

VENV = "/opt/venv"
"""Where a container has the environment that runs the tests."""
MEMORY_MB = 4096
_FOLDERS = ("dev", "etc", "mnt", "opt", "proc", "root", "run", "sys", "tmp", "usr", "var/tmp", "workspace", VENV[1:])
_LINKS = ("bin", "lib", "lib64", "sbin")
_FIRST_MAPPED_ID = 100000

# autodev is lxc's default: a /dev of its own, and a boot id that is new at each start.
_CONFIGURATION = """\
lxc.uts.name = {hostname}
lxc.rootfs.path = dir:{rootfs}
lxc.init.cmd = /init
lxc.mount.auto = proc:mixed sys:mixed cgroup:mixed:force
lxc.mount.entry = {state}/source/usr usr none ro,bind 0 0
lxc.mount.entry = {state}/source/venv opt/venv none ro,bind 0 0
lxc.mount.entry = tmpfs dev/shm tmpfs rw,nosuid,nodev,mode=1777,size=2048M,create=dir 0 0
lxc.mount.entry = tmpfs mnt/small tmpfs rw,nosuid,nodev,mode=1777,size=4M,create=dir 0 0
lxc.net.0.type = empty
lxc.net.0.flags = up
lxc.apparmor.profile = unconfined
lxc.cgroup.dir = {state.name}/{ct}
"""
_MAPPED = f"lxc.idmap = u 0 {_FIRST_MAPPED_ID} 65536\nlxc.idmap = g 0 {_FIRST_MAPPED_ID} 65536\n"


@dataclass(frozen=True)
class Spec:
    """What `pct config` says of a container, and on which node it is."""

    unprivileged: bool = False
    lock: str = ""
    node: str = "pve"
    started: bool = True

    def config(self, ct: str) -> dict[str, object]:
        return {
            "arch": "amd64",
            "cores": 2,
            "hostname": f"ct{ct}",
            "lock": self.lock,
            "memory": MEMORY_MB,
            "node": self.node,
            "ostype": "unmanaged",
            "rootfs": f"local-lvm:vm-{ct}-disk-0,size=8G",
            "unprivileged": self.unprivileged,
        }


SPECS = {
    "200": Spec(),
    "201": Spec(unprivileged=True),
    "202": Spec(started=False),
    "203": Spec(started=False, lock="backup"),
    "299": Spec(started=False, node="pve2"),
}


def memory_limit() -> str:
    """Return the configuration line of the memory limit; which key it takes depends on this machine's control groups."""
    top = Path("/sys/fs/cgroup")
    if (top / "memory" / "memory.limit_in_bytes").exists():
        return f"lxc.cgroup.memory.limit_in_bytes = {MEMORY_MB}M\n"
    controllers = top / "cgroup.subtree_control"
    if controllers.exists() and "memory" in controllers.read_text().split():
        return f"lxc.cgroup2.memory.max = {MEMORY_MB}M\n"
    return ""


def make_rootfs(rootfs: Path, init: Path, hostname: str) -> None:
    for folder in _FOLDERS:
        (rootfs / folder).mkdir(parents=True)
    for link in _LINKS:
        if Path("/", link).is_symlink():
            (rootfs / link).symlink_to(f"usr/{link}")
    (rootfs / "tmp").chmod(0o1777)
    (rootfs / "var/tmp").chmod(0o1777)
    shutil.copy(init, rootfs / "init")
    (rootfs / "init").chmod(0o755)
    for name in ("passwd", "group", "nsswitch.conf", "ld.so.cache"):
        if Path("/etc", name).exists():
            shutil.copy(Path("/etc", name), rootfs / "etc" / name)
    # Debian reaches awk, editor and others through these links.
    if Path("/etc/alternatives").is_dir():
        shutil.copytree("/etc/alternatives", rootfs / "etc/alternatives", symlinks=True)
    (rootfs / "etc/hostname").write_text(f"{hostname}\n")
    (rootfs / "etc/hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {hostname}\n")


def chown_tree(top: Path, owner: int) -> None:
    os.chown(top, owner, owner)
    for directory, folders, files in os.walk(top):
        for name in (*folders, *files):
            os.chown(Path(directory, name), owner, owner, follow_symlinks=False)


def make_container(state: Path, ct: str, spec: Spec) -> None:
    """Write the LXC configuration and the root file system of a container that was never started."""
    rootfs = state / "lxc" / ct / "rootfs"
    make_rootfs(rootfs, state / "init.py", f"ct{ct}")
    text = _CONFIGURATION.format(hostname=f"ct{ct}", rootfs=rootfs, state=state, ct=ct) + memory_limit()
    if spec.unprivileged:
        chown_tree(rootfs, _FIRST_MAPPED_ID)
        text += _MAPPED
    (state / "lxc" / ct / "config").write_text(text)


class Container:
    """One container as a test handles it; none of this is counted as a call of pct."""

    def __init__(self, state: Path, enter: tuple[str, ...], ct: str, spec: Spec) -> None:
        self.ct = ct
        self.spec = spec
        self.rootfs = state / "lxc" / ct / "rootfs"
        self.python = f"{VENV}/bin/python"
        self.workspace = "/workspace"
        self._state = state
        self._enter = enter
        self._pct = (*enter, "/usr/sbin/pct")
        self._bound: list[Path] = []

    def pct(self, command: str, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Call pct as the testbed's own."""
        return self._call([*self._pct, command, self.ct, *arguments], check)

    def _call(self, command: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8", CONTROL: "1"}
        done = subprocess.run(
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            cwd="/",
            env=environment,
        )
        assert not check or done.returncode == 0, (command, done.returncode, done.stdout, done.stderr)
        return done

    def run(self, *argv: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command inside."""
        return self.pct("exec", "--", *argv, check=check)

    def path(self, inside: str) -> Path:
        """Return where a file of the container lies for the test; what is on its tmpfs (/dev/shm) is not there."""
        return self.rootfs / inside.lstrip("/")

    def own(self, path: Path) -> None:
        """Give what a test put below `path` to the container's root, who else may read only what all may."""
        chown_tree(path, _FIRST_MAPPED_ID if self.spec.unprivileged else 0)

    @property
    def running(self) -> bool:
        return "running" in self.pct("status").stdout

    def start(self) -> None:
        self.pct("start")

    def stop(self) -> None:
        self.pct("stop")

    def restart(self) -> None:
        if self.running:
            self.stop()
        self.start()

    def _touch(self) -> None:
        (self._state / "touched" / self.ct).touch()

    def freeze(self) -> None:
        self._touch()
        self._lxc("lxc-freeze")

    def thaw(self) -> None:
        self._lxc("lxc-unfreeze")

    def _lxc(self, program: str) -> None:
        self._call([*self._enter, program, "-P", str(self._state / "lxc"), "-n", self.ct], check=True)

    def bind(self, source: Path, inside: str) -> None:
        """Bind a directory of this machine read-only, from the next start to the next reset.

        Its parents may be closed to others.
        """
        aside = self._state / "source" / f"{self.ct}-{len(self._bound)}"
        aside.mkdir()
        self._call([*self._enter, "mount", "--bind", str(source), str(aside)], check=True)
        self._bound.append(aside)
        self._touch()
        with self._configuration.open("a") as configuration:
            configuration.write(f"lxc.mount.entry = {aside} {inside.lstrip('/')} none ro,bind,create=dir 0 0\n")

    @property
    def _configuration(self) -> Path:
        return self._state / "lxc" / self.ct / "config"

    def _unbind(self) -> None:
        lines = self._configuration.read_text().splitlines(keepends=True)
        self._configuration.write_text("".join(line for line in lines if f"/source/{self.ct}-" not in line))
        for aside in self._bound:
            self._call([*self._enter, "umount", str(aside)], check=True)
            aside.rmdir()
        self._bound.clear()

    def clean(self) -> None:
        """Bring back the state of before: as started as it was, everything that ran in it ended, its files removed."""
        if self.running:
            self.stop()
        if self._bound:
            self._unbind()
        for folder in ("workspace", "tmp", "root", "opt/dflashctl", "var/tmp"):
            for path in self.path(folder).glob("*") if self.path(folder).is_dir() else ():
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        if self.spec.started:
            self.start()
