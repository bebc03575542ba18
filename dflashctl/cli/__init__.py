"""The `dflashctl` command: finds the verb, imports only that one, and turns its outcome into an exit code.

A verb's module imports at its top what its signature needs and the rest when it is called: of the 0.14 s of CPU that
`dflashctl start --help` once took, half went into modules which a help page does not use.
"""

from __future__ import annotations

import difflib
import gc
import importlib
import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, cast

import typer

from dflashctl import __version__
from dflashctl.cli.help import VERBS, VerbCommand, VerbInfo, main_help
from dflashctl.cli.options import Interrupted, ReaderGone
from dflashctl.console import ERR, NO_ROOM, OUT
from dflashctl.errors import report, report_bug
from dflashctl.transport import connections
from remote.protocol.errors import DflashError, ExitCode, usage_error

# Typer vendors click in newer versions and depends on it in older ones; the base of BadParameter is the same class in both.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def main() -> None:
    """Entry point of the script."""
    # Where a supervisor or a test started us with SIGINT ignored, Ctrl-C would not reach the verbs that detach on it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _open_closed_streams()
    # A name may hold what the terminal's encoding lacks, or bytes that are no text at all: shown escaped, never a crash.
    cast("io.TextIOWrapper[Any]", sys.stdout).reconfigure(errors="backslashreplace")
    code = run(sys.argv[1:])
    # At its end the interpreter would search all that was imported for cycles: 45 ms for nothing.
    gc.freeze()
    sys.exit(code)


def _open_closed_streams() -> None:
    """Give the standard streams that the shell closed (`>&-`), which Python leaves as None, to the null device.

    Each gets its own number back, the lowest free one: else a pipe to the far end would become our stdout.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  # open until we exit


def run(arguments: Sequence[str]) -> int:
    """Run one command line; return its exit code."""
    # Looked up in the raw words, because they have to hold for an error in the command line itself.
    debug, as_json = "--debug" in arguments, "--json" in arguments
    if debug:
        _show_library_logs()
    try:
        with connections():
            return _dispatch(list(arguments))
    except DflashError as error:
        if debug:
            _show_traceback(error)
        return report(error, as_json=as_json)
    except _UsageError as error:
        return report(_as_usage_error(error, arguments), as_json=as_json)
    except (ReaderGone, BrokenPipeError):
        OUT.silence()
        return int(ExitCode.OK)
    except (Interrupted, KeyboardInterrupt):
        ERR.line("interrupted")
        return int(ExitCode.INTERRUPTED)
    except Exception as error:
        if debug:
            _show_traceback(error)
        # Of a file it would carry the name: this is stdout.
        if isinstance(error, OSError) and error.errno in NO_ROOM and error.filename is None:
            OUT.silence()
            return report(_no_room(error), as_json=False)
        return report_bug(error)


def _no_room(error: OSError) -> DflashError:
    return DflashError(
        "the output could not be written",
        cause=f"stdout: {error.strerror}",
        hint="make room, or send it elsewhere; what was asked for over there is done: `dflashctl status`",
    )


def _show_library_logs() -> None:
    """Let the libraries say on stderr what went wrong in their threads: paramiko's, with its tracebacks."""
    import logging

    logging.basicConfig(format="%(name)s: %(message)s")


def _show_traceback(error: Exception) -> None:
    import traceback

    ERR.file.write("".join(traceback.format_exception(error)))


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("--help", "-h", "help"):
        OUT.line(main_help())
        return int(ExitCode.OK if arguments else ExitCode.USAGE)
    if arguments[0] == "--version":
        OUT.line(f"dflashctl {__version__}")
        return int(ExitCode.OK)
    verb, rest = _find_verb(arguments)
    # One verb, one app: typer builds nothing for the others, and its group classes change between its versions.
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    module = importlib.import_module(f"dflashctl.cli.{verb.module}")
    settings = {"help_option_names": ["--help", "-h"], "max_content_width": 110}
    app.command(verb.name, cls=VerbCommand, context_settings=settings)(module.verb)
    outcome = typer.main.get_command(app).main(rest, prog_name=f"dflashctl {verb.name}", standalone_mode=False)
    return int(outcome or 0)


def _find_verb(arguments: list[str]) -> tuple[VerbInfo, list[str]]:
    for verb in VERBS:
        words = verb.name.split()
        if arguments[: len(words)] == words:
            return verb, arguments[len(words) :]
        # `config --help`: of a verb of two words there is one page, so its first word alone has it too.
        if arguments[0] == words[0] and arguments[1:2] in (["--help"], ["-h"]):
            return verb, arguments[1:]
    names = [verb.name for verb in VERBS]
    word = arguments[0]
    # A word that was not typed to its end means the verb that begins so; likeness alone takes `stat` for `start`.
    near = [name for name in names if name.startswith(word)] or difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    raise usage_error(
        f"no such {'option' if word.startswith('-') else 'verb'}: {word}",
        cause="a command line begins with a verb",
        hint=f"did you mean `dflashctl {near[0]}`?" if near else "`dflashctl --help` lists the verbs",
    )


def _as_usage_error(error: Exception, arguments: Sequence[str]) -> DflashError:
    """Put what typer found wrong into our three lines, with the nearest option where one is unknown."""
    message: str = getattr(error, "format_message", lambda: str(error))()
    option, possibilities = getattr(error, "option_name", ""), list(getattr(error, "possibilities", None) or ())
    verb = " ".join(word for word in arguments[:2] if any(word in info.name.split() for info in VERBS))
    hint = f"`dflashctl {verb} --help` lists the options"
    # Typer's own suggestions need a nearer miss than ours, and older versions give none.
    if option and not possibilities:
        context = getattr(error, "ctx", None)
        known = [name for parameter in context.command.params for name in parameter.opts] if context else []
        possibilities = difflib.get_close_matches(option, known, n=1, cutoff=0.5)
    if option and possibilities:
        message, hint = f"no such option: {option}", f"did you mean {possibilities[0]}?"
    return usage_error(message.rstrip("."), cause="the command line cannot be understood", hint=hint)
