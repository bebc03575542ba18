"""Stands in for torch's launcher where a test is about the ranks: torch is imported once, and every rank is a fork.

One JSON request a line on stdin, {"plan": path, "ranks": n, "log": path, "faults": {rank: fault}} (see faults.py); one answer
a line on stdout, {"codes": [...]}.
A rank that fails takes the others down, as the real launcher does it. Starting the real one costs 3 s of CPU a process.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

from faults import inject  # Beside this script.

# TERM ends a rank at once, but one that is frozen.
_GRACE_SECONDS = 1.0


def main() -> None:
    import transformers.models.llama.modeling_llama  # noqa: F401

    import trainer.pipeline.roles  # noqa: F401
    from trainer.pipeline import rank

    print(json.dumps({"pid": os.getpid()}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        port = free_port()
        pids = [fork_rank(rank.main, request, number, port) for number in range(request["ranks"])]
        print(json.dumps({"codes": wait_all(pids)}), flush=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def fork_rank(work, request: dict, number: int, port: int) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.setsid()  # As torch's launcher does: no group kill reaches a rank.
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(
            {
                "DFLASH_PLAN": request["plan"],
                "RANK": str(number),
                "LOCAL_RANK": str(number),
                "WORLD_SIZE": str(request["ranks"]),
                "GROUP_RANK": "0",
                "GROUP_WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
        )
        if fault := request["faults"].get(str(number)):
            inject(fault)
        code = work()
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait_all(pids: list[int]) -> list[int]:
    """Return the exit codes (-N: killed by signal N) of all ranks."""
    codes: dict[int, int] = {}
    deadline = None
    while len(codes) < len(pids):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[pid] = os.waitstatus_to_exitcode(status)
            if codes[pid] != 0 and deadline is None:
                deadline = time.monotonic() + _GRACE_SECONDS
                send(set(pids) - set(codes), signal.SIGTERM)
            continue
        if deadline is not None and time.monotonic() > deadline:
            send(set(pids) - set(codes), signal.SIGKILL)
        time.sleep(0.005)
    return [codes[pid] for pid in pids]


def send(pids: set[int], number: int) -> None:
    for pid in pids:
        os.kill(pid, number)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    main()
