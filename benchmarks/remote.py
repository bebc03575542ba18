"""`python -m benchmarks.remote`: what the remote verbs cost, through a real sshd, pct and a container on this machine.

Brings the testbed up (as root, with the packages that tests/testbed names), ships a stand-in trainer into container 200
and measures: calls of pct a verb, a whole `dflashctl status` against a bare `ssh HOST pct exec 200 -- true`, a status
over an open connection against `true` over the same, and a log that is followed. What is compared is measured in turns,
and medians are shown, for the machine may be busy. Prints a table, then all figures as one line of JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

TREE = Path(__file__).resolve().parents[1]
sys.path.append(str(TREE / "tests"))

from system.faults.laptop import make_tree  # noqa: E402
from testbed.machine import missing_machine  # noqa: E402
from testbed.proxmox import HOST, Proxmox  # noqa: E402

from dflashctl.session import Session  # noqa: E402
from dflashctl.transport import Transport  # noqa: E402

CT = "200"
PCT_SECONDS = 0.7
"""What the real perl tool takes for a call: 0.5 to 1 s."""
LINE = b"2026-11-30T19:51:06.774Z step step=836 total_steps=1000000 epoch=0 loss=0.0120 accuracy=0.1000 lr=1.000e-04\n"
RSS_PAUSE = 0.1


@dataclass(frozen=True)
class Row:
    """One line of the table. `bound`: what the figure may be at most, None where it is only told."""

    what: str
    figure: float
    unit: str
    bound: float | None = None

    def line(self) -> str:
        verdict = (
            "" if self.bound is None else f"{'ok' if self.figure <= self.bound else 'OVER':>5} (at most {self.bound:g})"
        )
        return f"{self.what:<66} {self.figure:9.4g} {self.unit:<5}{verdict}".rstrip()


class Bed:
    """The testbed with a run in container 200 that lives and writes nothing by itself."""

    def __init__(self, proxmox: Proxmox, folder: Path) -> None:
        self.proxmox = proxmox
        self.folder = folder
        # As it is installed: compiled files are kept, beside nobody's sources.
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("DFLASHCTL_", "PYTHON"))}
        own = {"DFLASHCTL_HOME": str(folder / "home"), "PYTHONPYCACHEPREFIX": str(folder / "compiled")}
        self.environment = kept | own | {"PYTHONPATH": str(TREE), "OMP_NUM_THREADS": "1"}
        tree = make_tree(folder / "tree", "--pause", "0.02", "--hang-after", "1")
        way = ["--host", HOST, "--ct", CT, "--ssh-config", str(proxmox.ssh_config())]
        self.deploy = ["deploy", *way, "--source", str(tree)]
        self.release = json.loads(self.run([*self.deploy, "--json"]))["release"]
        self.run_id = json.loads(self.run(["start", "--json"]))["run_id"]
        self.log = proxmox[CT].path(f"/workspace/dflashctl/runs/{self.run_id}/train.log")

    def command(self, words: Sequence[str]) -> list[str]:
        return [sys.executable, "-m", "dflashctl", *words]

    def run(self, words: Sequence[str]) -> str:
        done = subprocess.run(
            self.command(words), check=False, env=self.environment, cwd=self.folder, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"{words}: {done.stderr}")
        return done.stdout

    @contextlib.contextmanager
    def begin(self, words: Sequence[str]) -> Iterator[tuple[int, IO[bytes]]]:
        """Yield pid and stdout of a command that is ended at the end."""
        with subprocess.Popen(
            self.command(words),
            env=self.environment,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as process:
            assert process.stdout is not None
            try:
                yield process.pid, process.stdout
            finally:
                process.terminate()


def in_turns(count: int, **works: Callable[[], object]) -> dict[str, list[float]]:
    """Return the seconds of each work, `count` times one after the other."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(count):
        for name, work in works.items():
            began = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def count_calls(bed: Bed) -> list[Row]:
    """Count the calls of pct of each verb, as pct itself saw them."""
    rows: list[Row] = []
    for words in (["status"], bed.deploy, ["logs", "--tail", "1"], ["runs"], ["stop", "--now"]):
        before = len(bed.proxmox.calls())
        bed.run(words)
        label = "deploy, nothing changed" if words is bed.deploy else " ".join(words)
        rows.append(Row(f"calls of pct: {label}", len(bed.proxmox.calls()) - before, "", 1))
    return rows


def whole_command(bed: Bed, count: int, delay: float) -> list[Row]:
    """Compare `dflashctl status` with OpenSSH's client that runs `true`; both are new processes on new connections."""
    bare = ["ssh", "-F", str(bed.proxmox.ssh_config()), "-o", "BatchMode=yes", HOST, f"/usr/sbin/pct exec {CT} -- true"]
    with bed.proxmox.knobs(delay=delay):
        took = in_turns(
            count,
            ssh=lambda: subprocess.run(bare, check=True, stdin=subprocess.DEVNULL, capture_output=True),
            status=lambda: bed.run(["status"]),
        )
    ssh, status = (1000 * statistics.median(took[name]) for name in ("ssh", "status"))
    where = f"pct {delay * 1000:.0f} ms"
    return [
        Row(f"ssh {HOST} pct exec {CT} -- true, {where}", ssh, "ms"),
        Row(f"dflashctl status, {where}", status, "ms"),
        Row(f"  the difference, {where}", status - ssh, "ms", 400),
    ]


def open_connection(bed: Bed, count: int, delay: float) -> list[Row]:
    """Compare a status with `true`, both over one connection that is open already."""
    session = Session.open({}, environment=bed.environment, directory=bed.folder)
    try:
        session.client.status()
        with bed.proxmox.knobs(delay=delay):
            took = in_turns(count, true=lambda: run_true(session.transport), status=session.client.status)
    finally:
        session.transport.close()
    true, status = (statistics.median(took[name]) for name in ("true", "status"))
    where = f"open connection, pct {delay * 1000:.0f} ms"
    # Without pct's own time there is little to compare with: the bound is for a real host.
    return [
        Row(f"true, {where}", 1000 * true, "ms"),
        Row(f"status, {where}", 1000 * status, "ms"),
        Row(f"  times as long, {where}", status / true, "", 1.3 if delay else None),
    ]


def run_true(transport: Transport) -> None:
    channel = transport.open(["true"])
    channel.finish()
    while channel.receive(30.0):
        pass
    channel.close()


class Stopwatch:
    """Writes lines that carry the time to a run's log and reads them from a follower; both read one clock."""

    def __init__(self, bed: Bed) -> None:
        self.arrived: list[tuple[float, float]] = []
        """Of each line that came: when it was written and when it was on the client's stdout, in seconds."""
        self._log = bed.log.open("ab", buffering=0)

    def read(self, lines: IO[bytes]) -> None:
        for line in lines:
            self.arrived.append((float(line), time.monotonic()))

    def write(self) -> float:
        now = round(time.monotonic(), 6)
        self._log.write(b"%.6f\n" % now)
        return now

    def write_until_read(self, since: float) -> float:
        """Write a line every 20 ms until one written after `since` has come; return when it came."""
        while not (came := [then for wrote, then in self.arrived if wrote > since]):
            self.write()
            time.sleep(0.02)
        return came[0]

    def close(self) -> None:
        self._log.close()


@contextlib.contextmanager
def followed(bed: Bed) -> Iterator[Stopwatch]:
    """Yield a stopwatch once following has begun."""
    with contextlib.closing(Stopwatch(bed)) as watch:
        with bed.begin(["logs", "--follow", "--tail", "0"]) as (_, lines):
            reader = threading.Thread(target=watch.read, args=[lines])
            reader.start()
            watch.write_until_read(0.0)
            yield watch
        reader.join()


def follow_latency(bed: Bed, count: int) -> list[Row]:
    """Measure the time from the write of a line to its arrival on the client's stdout."""
    # Seeded: where in the far end's pause a line falls is drawn, and drawn the same each time.
    draw = random.Random(0)
    with followed(bed) as watch:
        begun = last = round(time.monotonic(), 6)
        for _ in range(count):
            last = watch.write()
            time.sleep(draw.uniform(0.02, 0.06))
        watch.write_until_read(last)
    ordered = sorted(1000 * (then - wrote) for wrote, then in watch.arrived if begun < wrote <= last)
    return [
        Row(f"logs --follow: write to stdout, median of {len(ordered)}", statistics.median(ordered), "ms", 100),
        Row("logs --follow: write to stdout, 95 of 100", ordered[int(0.95 * len(ordered))], "ms"),
    ]


def come_back(bed: Bed, count: int) -> list[Row]:
    """Measure how long a follower whose sshd was killed shows nothing; the first 0.2 s it waits on purpose."""
    took: list[float] = []
    with followed(bed) as watch:
        for _ in range(count):
            killed = time.monotonic()
            bed.proxmox.sshd.kill_sessions()
            took.append(1000 * (watch.write_until_read(killed) - killed))
    return [Row("logs --follow: a killed sshd to the next line, median", statistics.median(took), "ms")]


def resident(pid: int) -> float:
    """Return the resident memory of a process in MB, 0 when it is gone."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024
    return 0.0


def agents(release: str) -> Iterator[int]:
    """Yield the pids of the Pythons that run the `logs` of a release's agent."""
    agent = f"/{release}/agent.pyz".encode()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdecimal() else []
            if len(words) > 3 and b"python" in words[0] and words[2].endswith(agent) and words[3] == b"logs":
                yield int(entry.name)


def bulk(bed: Bed, megabytes: int, words: list[str]) -> list[Row]:
    """Read a whole log of so many MB; memory of both ends is sampled from the first byte on."""
    whole = hashlib.sha256(bed.log.read_bytes()).digest()
    left = bed.log.stat().st_size
    client, agent, received = [0.0], [0.0], hashlib.sha256()
    began, sampled = time.perf_counter(), 0.0
    with bed.begin(words) as (pid, stdout):
        while left and (data := os.read(stdout.fileno(), min(1 << 20, left))):
            received.update(data)
            left -= len(data)
            if time.perf_counter() - sampled > RSS_PAUSE:
                sampled = time.perf_counter()
                client.append(resident(pid))
                agent.append(max(map(resident, agents(bed.release)), default=0.0))
        took = time.perf_counter() - began
    if received.digest() != whole:
        raise RuntimeError(f"{words}: what came is not the log")
    name = f"{' '.join(words[:2])}, {megabytes} MB"
    return [
        Row(name, took, "s", 20),
        Row(f"  client's memory at the first byte, {name}", client[1], "MB"),
        Row(f"  client's memory at most, {name}", max(client), "MB", round(client[1] + 24)),
        Row(f"  agent's memory at most, {name}", max(agent), "MB", 48),
    ]


def measure(bed: Bed, count: int, megabytes: int) -> Iterator[Row]:
    """Yield all rows; the last ones end the run."""
    for delay in (0.0, PCT_SECONDS):
        yield from whole_command(bed, count, delay)
        yield from open_connection(bed, count, delay)
    yield from follow_latency(bed, 20 * count)
    yield from come_back(bed, count)
    with bed.log.open("ab") as log:
        for _ in range(megabytes):
            log.write(LINE * (1_000_000 // len(LINE)))
    yield from bulk(bed, megabytes, ["logs"])
    yield from bulk(bed, megabytes, ["logs", "--follow", "--tail", str(megabytes * 100_000)])
    yield from count_calls(bed)


def machine() -> dict[str, Any]:
    return {"python": platform.python_version(), "cpus": os.cpu_count(), "load": os.getloadavg()[0]}


def main(argv: list[str] | None = None) -> int:
    """Measure what the command line asks for; return 1 when a figure is over its bound."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.remote", description=__doc__)
    parser.add_argument("--count", type=int, default=12, help="repetitions of each command (default 12)")
    parser.add_argument("--megabytes", type=int, default=300, help="size of the log (default 300)")
    arguments = parser.parse_args(argv)
    if reason := missing_machine():
        print(f"error: {reason}", file=sys.stderr)
        return 2
    before = machine()
    with contextlib.closing(Proxmox()) as proxmox, tempfile.TemporaryDirectory() as folder:
        bed = Bed(proxmox, Path(folder))
        rows: list[Row] = []
        for row in measure(bed, arguments.count, arguments.megabytes):
            print(row.line(), flush=True)
            rows.append(row)
    figures = {row.what.strip(): round(row.figure, 4) for row in rows}
    print(json.dumps({"before": before, "after": machine(), "figures": figures}))
    return int(any(row.bound is not None and row.figure > row.bound for row in rows))


if __name__ == "__main__":
    sys.exit(main())
