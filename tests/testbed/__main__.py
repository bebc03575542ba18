"""`make testbed`: a Proxmox host on loopback with real containers, to try the commands of the README against."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from testbed.proxmox import HOST, Proxmox, missing_machine
from testbed.sshd import missing_sshd

DEMO_TARGET = Path(__file__).resolve().parents[2] / "build" / "demo" / "target"
_TARGET_INSIDE = "/opt/target"


def main() -> int:
    """Bring it up, say how to reach it, and wait for Ctrl-C; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m testbed", description=__doc__)
    parser.add_argument("--pct-delay", type=float, default=0.0, metavar="SECONDS", help="as the real pct takes: 0.7")
    arguments = parser.parse_args()
    if reason := missing_sshd() or missing_machine():
        print(f"error: {reason}", file=sys.stderr)
        return 1
    # Ended as by Ctrl-C: whatever ends this program, what it made goes with it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    host = Proxmox()
    try:
        host.set_knobs(delay=arguments.pct_delay)
        if DEMO_TARGET.is_dir():
            for ct in ("200", "201"):
                host[ct].bind(DEMO_TARGET, _TARGET_INSIDE)
                host[ct].restart()
        _explain(host)
        signal.pause()
    except KeyboardInterrupt:
        return 0
    finally:
        host.close()
    return 0


def _explain(host: Proxmox) -> None:
    print(f"A Proxmox host is up: {HOST} as this ssh configuration has it, on loopback. In another terminal:\n")
    print(f"    export DFLASHCTL_SSH_CONFIG={host.ssh_config('root')}")
    print(f"    dflashctl deploy --host {HOST} --ct 200 --python {host['200'].python}\n")
    if DEMO_TARGET.is_dir():
        data = "/workspace/dflashctl/current/templates/demo/replies.jsonl.gz"
        print(f"    dflashctl start --config templates/demo.toml --target-model {_TARGET_INSIDE} --data-dir {data}\n")
    print("Containers: 200 privileged, 201 unprivileged, 202 stopped, 203 stopped and locked, 299 on another node.")
    print(f"A user who may only `sudo -n /usr/sbin/pct`: {host.ssh_config('ops')}")
    if not DEMO_TARGET.is_dir():
        print("After `make demo` they also have the demo's target, for a real run.")
    print("Ctrl-C ends it and removes everything.", flush=True)


if __name__ == "__main__":
    sys.exit(main())
