"""Whether a release can run a configuration here: what start asks before a launch, and restart before it stops anything."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, cast

from remote.agent.gpus import memory_used
from remote.agent.preflight import SKIP_DEVICES, preflight
from remote.agent.selfcheck import kept_check, selfcheck
from remote.agent.startplan import StartPlan
from remote.agent.wire import Answer
from remote.protocol.errors import DflashError, preflight_error, together
from remote.protocol.layout import RootLayout


def require_ready(
    root: RootLayout, plan: StartPlan, answer: Answer, flags: Sequence[str] = (), *, check_release: bool = False
) -> None:
    """Raise one DflashError (2 or 7) for everything that is missing: GPUs, model, data, space, a sound release.

    `flags` are further ones of `python -m trainer preflight`. With `check_release` a release that was never checked with
    this interpreter is checked now, for 20 s.
    """
    if plan.instead_of:
        answer.say(
            f"release {plan.release.name} is current there and is launched, not {plan.instead_of}, which was deployed from here "
            "last: `dflashctl releases` lists them, `--deploy` ships this tree first",
            "warning",
        )
    problems: list[DflashError] = []
    try:
        memory_used(plan.spec.devices)
    except DflashError as error:
        problems.append(error)
    if plan.preflight:
        _require_sound(root, plan, answer, check_release)
        answer.phase("preflight")
        began = time.monotonic()
        # nvidia-smi has told already: the trainer, which asks CUDA's driver, would say the same in other words.
        problems += _trainer_says(root, plan, answer, [*flags, *([SKIP_DEVICES] if problems else [])])
        if not problems:
            answer.phase("preflight", "passed", time.monotonic() - began)
    if problems:
        raise together(problems)


def _trainer_says(root: RootLayout, plan: StartPlan, answer: Answer, flags: Sequence[str]) -> list[DflashError]:
    try:
        preflight(plan.python, plan.preflight_environment(root.path), plan.spec.config, answer, flags)
    except DflashError as error:
        return [error]
    return []


def _require_sound(root: RootLayout, plan: StartPlan, answer: Answer, check_release: bool) -> None:
    """Raise a preflight error when the release's own check failed with this interpreter and these packages."""
    if plan.interpreter is None:
        return
    release = plan.release.name
    kept = kept_check(root, release, plan.interpreter)
    if kept.get("ok") is True:
        return
    if kept:
        result = kept.get("result")
        said = cast("dict[str, Any]", result) if isinstance(result, dict) else {}
        raise preflight_error(
            f"release {release} failed its selfcheck",
            cause=str(said.get("cause") or said.get("error") or f"it ended with code {kept.get('code')}"),
            hint="mend it and `dflashctl deploy` again; `dflashctl deploy --no-selfcheck` lets it start all the same",
        )
    if check_release:
        selfcheck(root, release, plan.python, answer)
    else:
        answer.say(f"release {release} was not checked with {plan.python}: `dflashctl deploy` does that", "warning")
