"""The verbs status and runs."""

from __future__ import annotations

from remote.agent.lifecycle import choose_run, run_ids, status_of
from remote.agent.wire import Answer, Request
from remote.protocol.codec import plain
from remote.protocol.layout import RootLayout
from remote.protocol.records import Lifecycle, RunStatus


def status(request: Request, answer: Answer) -> None:
    """Answer the RunStatus of one run; state `none` when there is no run at all."""
    run = choose_run(RootLayout(request.root), request.text("run", ""))
    answer.result(plain(RunStatus("", str(Lifecycle.NONE)) if run is None else status_of(run)))


def runs(request: Request, answer: Answer) -> None:
    """Answer {"runs": [RunStatus, ...]}, newest first, at most `limit` (20; 0 for all)."""
    root = RootLayout(request.root)
    limit = request.count("limit")
    ids = run_ids(root)
    chosen = ids[: 20 if limit is None else limit or len(ids)]
    answer.result({"runs": [plain(status_of(root.run(name))) for name in chosen]})
