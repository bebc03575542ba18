"""The verb deploy: take a release in, check it, switch to it."""

from __future__ import annotations

from typing import Any

from remote.agent.releases import switch_current
from remote.agent.roots import create_root, current_release, interpreter
from remote.agent.selfcheck import forget_failed_checks, selfcheck
from remote.agent.upload import damaged, receive
from remote.agent.wire import Answer, Request
from remote.protocol.errors import usage_error
from remote.protocol.layout import RootLayout
from remote.protocol.manifest import release_id


def deploy(request: Request, answer: Answer) -> None:
    """Answer {"release", "root", "changed", "previous", "selfcheck"}.

    One call: the request names the release, the event {"need": bool} says whether its tar has to be streamed, so an
    unchanged tree sends nothing. `current` changes last, when everything before succeeded.
    """
    root = RootLayout(request.root)
    release, manifest = _what(request)
    python = interpreter(request.text("python", ""))
    create_root(root)
    # A hundred small files: hashing them takes milliseconds and finds a copy that somebody edited in place.
    need = bool(damaged(root.release(release), manifest))
    answer.note({"need": need})
    if need:
        receive(root, release, manifest, request.data())
        answer.say(f"release {release}: {len(manifest)} files verified")
    result: dict[str, Any] = {"ok": None}
    if request.flag("selfcheck", True):
        result = selfcheck(root, release, python, answer)
    else:
        forget_failed_checks(root, release)
    # Last of all: a start that comes in between still uses the release that is known to work.
    before = current_release(root)
    switch_current(root, release)
    answer.result(
        {
            "release": release,
            "root": str(root.path),
            "changed": before != release,
            "previous": before,
            "sent": need,
            "selfcheck": result,
        }
    )


def _what(request: Request) -> tuple[str, dict[str, str]]:
    """Return release id and manifest. Raises a usage error when the id is not the manifest's hash."""
    release = request.text("release", "")
    # str(): a digest of another type then fails as a digest, with its path named.
    manifest = {path: str(digest) for path, digest in request.object("manifest").items()}
    try:
        computed = release_id(manifest)
    except ValueError as error:
        raise usage_error("the manifest is not usable", cause=str(error)) from error
    if not manifest or computed != release:
        raise usage_error(f"release {release!r} is not what its manifest says", cause=f"its hash is {computed}")
    return release, manifest
