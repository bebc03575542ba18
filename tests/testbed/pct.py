"""A `pct` over real LXC: the argv rules, texts, locks and exit codes of the one of Proxmox VE (pve-container 6.1).

    pct.py STATE COMMAND ...

STATE is the testbed's directory: containers/ID.json says what a container is, knobs.json how this pct misbehaves,
calls.jsonl is what was asked of it. Stands alone, as it runs under `python3 -IS` in a machine without this repository.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).parent))

from backends import Backend, make_backend

CONTROL = "DFLASH_TESTBED_CONTROL"
"""Marks a call of the testbed itself, which is neither counted nor disturbed by a knob."""
NODE = "pve"
SOURCE = "/usr/share/perl5/PVE/CLI/pct.pm"
LOCK_TIMEOUT = 10.0
TRUE = {"1", "on", "yes", "true"}
FALSE = {"0", "off", "no", "false"}

# Positional arguments, boolean options, options with a value.
COMMANDS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "config": (("vmid",), ("current",), ()),
    "exec": (("vmid", "extra-args"), ("keep-env",), ()),
    "list": ((), (), ()),
    "pull": (("vmid", "path", "destination"), (), ("user", "group", "perms")),
    "push": (("vmid", "file", "destination"), (), ("user", "group", "perms")),
    "shutdown": (("vmid",), ("forceStop",), ("timeout",)),
    "start": (("vmid",), ("skiplock", "debug"), ()),
    "status": (("vmid",), ("verbose",), ()),
    "stop": (("vmid",), ("skiplock", "overrule-shutdown"), ()),
}

# Run inside the container, for the same view of paths and symlinks as pct's own copy has: argv is the destination as
# typed and as it is called there, mode, user, group. Like pct it writes in place, keeps an old file's mode, and calls a
# short write no failure.
WRITER = """
import grp, os, pwd, shutil, sys
typed, path, mode, user, group = sys.argv[1:]
try:
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, int(mode, 8))
except OSError as error:
    sys.exit(f"failed to create file: {typed}: {error.strerror}")
try:
    shutil.copyfileobj(sys.stdin.buffer, os.fdopen(target, "wb", 0))
except OSError:
    pass
try:
    uid = int(user) if user.isdecimal() else pwd.getpwnam(user).pw_uid
except KeyError:
    sys.exit(f"failed to get uid for: {user}")
try:
    gid = int(group) if group.isdecimal() else grp.getgrnam(group).gr_gid
except KeyError:
    sys.exit(f"failed to get gid for: {group}")
try:
    if os.geteuid() == 0:
        os.chown(path, uid, gid)
except OSError as error:
    sys.exit(f"failed to change file owner: {error.strerror}")
"""
READER = """
import shutil, sys
try:
    source = open(sys.argv[2], "rb")
except OSError as error:
    sys.exit(f"failed to open {sys.argv[1]} for reading: {error.strerror}")
shutil.copyfileobj(source, sys.stdout.buffer)
"""


class Failure(Exception):
    """What perl's die prints; the exit code is whatever errno happened to hold."""

    def __init__(self, text: str, code: int = 255) -> None:
        super().__init__(text)
        self.code = code


class Pct:
    """One call."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.knobs: dict[str, Any] = json.loads((state / "knobs.json").read_text())
        self.backend: Backend = make_backend(state)
        self.options: dict[str, str] = {}
        self.words: list[str] = []

    def run(self, argv: list[str]) -> int:
        time.sleep(self.knobs.get("delay", 0.0))
        if os.geteuid() != 0 and not self.backend.rootless:
            raise Failure("please run as root")
        if not argv or argv[0] not in COMMANDS:
            raise Failure(f"ERROR: unknown command 'pct {argv[0]}'" if argv else "ERROR: no command specified")
        command = argv[0]
        self.options, self.words = parse(command, argv[1:])
        if command != "list":
            check_vmid(command, self.words[0])
        method: Callable[[], int] = getattr(self, f"do_{command}")
        return method()

    @property
    def vmid(self) -> str:
        return self.words[0]

    def load(self) -> dict[str, Any]:
        """Return the configuration; one of another node reads as missing."""
        path = self.state / "containers" / f"{self.vmid}.json"
        config: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        if config.get("node") != NODE:
            raise Failure(f"Configuration file 'nodes/{NODE}/lxc/{self.vmid}.conf' does not exist", 2)
        return config

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the configuration's lock file, as everything that changes a container does."""
        name = f"pve-config-{self.vmid}.lock"
        with (self.state / "locks" / name).open("a") as file:
            if not try_lock(file.fileno()):
                print("trying to acquire lock...", file=sys.stderr, flush=True)
                deadline = time.monotonic() + self.knobs.get("lock_timeout", LOCK_TIMEOUT)
                while not try_lock(file.fileno()):
                    if time.monotonic() > deadline:
                        raise Failure(f"can't lock file '/run/lock/lxc/{name}' - got timeout")
                    time.sleep(0.02)
                print(" OK", file=sys.stderr, flush=True)
            yield

    def check_lock(self) -> None:
        held = self.load().get("lock", "")
        if held and "skiplock" not in self.options:
            raise Failure(f"CT is locked ({held})")

    def touch(self) -> None:
        """Note for the testbed that this container is no longer as it was."""
        (self.state / "touched" / self.vmid).touch()

    # The commands, each returns the exit code.

    def do_list(self) -> int:
        rows = [f"{'VMID':<10} {'Status':<10} {'Lock':<12} {'Name':<20}"]
        for path in sorted((self.state / "containers").glob("*.json")):
            config = json.loads(path.read_text())
            if config["node"] == NODE:
                status = "running" if self.backend.running(path.stem) else "stopped"
                rows.append(f"{path.stem:<10} {status:<10} {config.get('lock', ''):<12} {config['hostname']:<20}")
        print("\n".join(rows))
        return 0

    def do_config(self) -> int:
        for key, value in sorted(self.load().items()):
            if key != "node" and value != "":
                print(f"{key}: {int(value) if isinstance(value, bool) else value}")
        return 0

    def do_status(self) -> int:
        self.load()
        print("status: running" if self.backend.running(self.vmid) else "status: stopped")
        return 0

    def do_exec(self) -> int:
        self.load()
        command = self.words[1:]
        if not command:
            raise Failure(f"missing command at {SOURCE} line 279.")
        if not self.backend.running(self.vmid):
            raise Failure(f"container '{self.vmid}' not running!")
        self.touch()
        # What PVE's command line handler sets; the rest of the caller's environment goes in.
        environment = {**caller_environment(), "PATH": "/sbin:/bin:/usr/sbin:/usr/bin"}
        self.backend.execute(self.vmid, [in_locale(word, environment) for word in command], environment)

    def do_start(self) -> int:
        with self.lock():
            self.check_lock()
            if self.backend.running(self.vmid):
                raise Failure(f"CT {self.vmid} already running")
            self.touch()
            return self.backend.start(self.vmid)

    def do_stop(self) -> int:
        with self.lock():
            self.check_lock()
            if not self.backend.running(self.vmid):
                raise Failure(f"CT {self.vmid} not running")
            self.touch()
            return self.backend.stop(self.vmid)

    def do_shutdown(self) -> int:
        with self.lock():
            self.check_lock()
            if not self.backend.running(self.vmid):
                raise Failure(f"CT {self.vmid} not running")
            self.touch()
            timeout = float(self.options.get("timeout", "60"))
            if self.backend.shutdown(self.vmid, timeout) == 0:
                return 0
            if "forceStop" in self.options:
                return self.backend.stop(self.vmid)
            raise Failure("container did not stop")

    def do_push(self) -> int:
        source, destination = self.words[1:]
        with self.lock():
            # Not looked up first: a container that is missing reads as one that is stopped.
            if not self.backend.running(self.vmid):
                raise Failure(f"can only push files to a running CT at {SOURCE} line 598.")
            self.touch()
            try:
                # Opened like a file: a directory reads as an empty one.
                content = b"" if Path(source).is_dir() else Path(source).read_bytes()
            except OSError as error:
                print(f"failed to open {source} for reading: {error.strerror}", file=sys.stderr)
                return 0
            return self.copy_in(content, destination)

    def copy_in(self, content: bytes, destination: str) -> int:
        """Copy as pct's forked task does: whatever goes wrong in it, pct itself exits with 0."""
        time.sleep(self.knobs.get("push_seconds", 0.0))
        fault = self.knobs.get("push", "")
        if fault == "short":
            content = content[: len(content) // 2]
        elif fault:
            print(f"failed to create file: {destination}: {fault}", file=sys.stderr)
            return 0
        mode = self.options.get("perms", "0644")
        if not re.fullmatch(r"0?[0-7]{3}", mode):
            print(f"invalid mode: '{mode}'", file=sys.stderr)
            return 0
        names = [destination, self.backend.path(self.vmid, destination)]
        arguments = [*names, mode, self.options.get("user", "0"), self.options.get("group", "0")]
        self.inside(WRITER, arguments, content)
        return 0

    def do_pull(self) -> int:
        source, destination = self.words[1:]
        with self.lock():
            if not self.backend.running(self.vmid):
                raise Failure(f"can only pull files from a running CT at {SOURCE} line 531.")
            content = self.inside(READER, [source, self.backend.path(self.vmid, source)], b"")
            if content is not None:
                try:
                    Path(destination).write_bytes(content)
                except OSError as error:
                    print(f"failed to create file: {destination}: {error.strerror}", file=sys.stderr)
            return 0

    def inside(self, script: str, arguments: list[str], content: bytes) -> bytes | None:
        """Run python inside; returns what it wrote, None when it failed."""
        argv = ["/usr/bin/python3", "-IS", "-c", script, *arguments]
        command, settings = self.backend.command(self.vmid, argv)
        done = subprocess.run(command, input=content, stdout=subprocess.PIPE, check=False, **settings)
        return done.stdout if done.returncode == 0 else None


def parse(command: str, arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    """Parse as Getopt::Long does with permutation: up to `--` every word with a dash is an option, wherever it stands."""
    positional, booleans, valued = COMMANDS[command]
    options: dict[str, str] = {}
    words: list[str] = []
    unknown = False
    left = list(arguments)
    while left:
        word = left.pop(0)
        if word == "--":
            words += left
            break
        if not word.startswith("-") or word == "-":
            words.append(word)
            continue
        name, has_value, value = re.sub("^--?", "", word).partition("=")
        found = [known for known in (*booleans, *valued) if known.lower().startswith(name.lower())]
        if len(found) != 1:
            print(f"Unknown option: {name}", file=sys.stderr)
            unknown = True
        elif has_value:
            options[found[0]] = value
        # PVE declares a boolean with an optional value, so it swallows the next word unless that is an option.
        elif found[0] in valued or (left and not left[0].startswith("-")):
            options[found[0]] = left.pop(0) if left else ""
        else:
            options[found[0]] = "1"
    if unknown:
        raise Failure(f"400 unable to parse option\n{usage(command)}")
    return check(command, options, words, positional, booleans)


def check(
    command: str, options: dict[str, str], words: list[str], positional: tuple[str, ...], booleans: tuple[str, ...]
) -> tuple[dict[str, str], list[str]]:
    least = len(positional) - ("extra-args" in positional)
    if len(words) < least:
        raise Failure(f"400 not enough arguments\n{usage(command)}")
    if len(words) > least and "extra-args" not in positional:
        raise Failure(f"400 too many arguments\n{usage(command)}")
    for name in set(booleans) & set(options):
        if options[name].lower() in FALSE:
            del options[name]
        elif options[name].lower() not in TRUE:
            refuse(command, f"{name}: type check ('boolean') failed - got '{options[name]}'")
    return options, words


def check_vmid(command: str, vmid: str) -> None:
    if not re.fullmatch(r"[+-]?\d+", vmid):
        refuse(command, f"vmid: type check ('integer') failed - got '{vmid}'")
    if int(vmid) < 100:
        refuse(command, "vmid: value must have a minimum value of 100")
    if int(vmid) > 999999999:
        refuse(command, "vmid: value must have a maximum value of 999999999")


def refuse(command: str, text: str) -> NoReturn:
    raise Failure(f"400 Parameter verification failed.\n{text}\n{usage(command)}")


def usage(command: str) -> str:
    words = " ".join(f"[<{name}>]" if name == "extra-args" else f"<{name}>" for name in COMMANDS[command][0])
    return f"pct {command} {words} [OPTIONS]"


def try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def caller_environment() -> dict[str, str]:
    """Return the environment as it was given: python itself adds LC_CTYPE=C.UTF-8 to one without a locale."""
    pairs = Path("/proc/self/environ").read_bytes().split(b"\0")
    return dict(os.fsdecode(pair).split("=", 1) for pair in pairs if b"=" in pair)


def in_locale(word: str, environment: dict[str, str]) -> str:
    """Return an argument as it comes out: what is not ASCII does not survive a C locale."""
    locale = next((environment[name] for name in ("LC_ALL", "LC_CTYPE", "LANG") if environment.get(name)), "C")
    if re.search("utf-?8", locale, re.IGNORECASE):
        return word
    return re.sub(rb"[\x80-\xff]", b"?", os.fsencode(word)).decode("ascii")


def main() -> int:
    state = Path(sys.argv[1])
    pct = Pct(state)
    if CONTROL in os.environ:
        pct.knobs.clear()
    else:
        call = {"argv": sys.argv[2:], "user": os.environ.get("SUDO_USER", "root"), "at": time.time()}
        with (state / "calls.jsonl").open("a") as file:
            file.write(json.dumps(call) + "\n")
    try:
        return pct.run(sys.argv[2:])
    except Failure as failure:
        print(f"{pct.knobs.get('prefix', '')}{failure}", file=sys.stderr)
        return pct.knobs.get("failure_code", failure.code)


if __name__ == "__main__":
    sys.exit(main())
