"""`python -m trainer VERB`: train, preflight, prepare, generate, evaluate, export, selfcheck."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Iterable
from typing import NoReturn

from remote.protocol.codec import dumps
from remote.protocol.errors import DflashError, ExitCode, usage_error

# Verb -> module with `add_arguments(parser)` and `run(arguments) -> exit code`; imported only when asked for.
VERBS = {
    "train": ("trainer.pipeline.command", "train a drafter"),
    "preflight": ("trainer.pipeline.check_command", "say what of a configuration is missing here"),
    "prepare": ("trainer.data.prepare", "turn chats into token ids and loss masks"),
    "generate": ("trainer.data.generate", "let the target answer prompts"),
    "evaluate": ("trainer.evaluate", "measure acceptance by speculative decoding"),
    "export": ("trainer.export", "turn a checkpoint into a servable drafter"),
    "selfcheck": ("trainer.selfcheck", "compile, import and train a toy step"),
}


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the hint that names the known word most like `word`, empty when none is."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else ""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with a command line in the form of every other error, not by printing the whole usage."""

    def error(self, message: str) -> NoReturn:
        options = [option for action in self._actions for option in action.option_strings]
        unknown = message.removeprefix("unrecognized arguments: ").split()[0].split("=")[0]
        hint = nearest(unknown, options) if message.startswith("unrecognized") else ""
        raise usage_error(message, hint=hint or f"`{self.prog} --help` lists the flags")


def main(argv: list[str] | None = None) -> int:
    """Run a verb; returns its exit code. A DflashError becomes error/cause/hint on stderr, or with --json one line on stdout."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    verb = arguments[0] if arguments else ""
    if verb not in VERBS:
        if verb and not verb.startswith("-"):
            print(usage_error(f"no such verb: {verb}", hint=nearest(verb, VERBS)).render() + "\n", file=sys.stderr)
        verbs = "\n".join(f"  {name:<10} {about}" for name, (_, about) in VERBS.items())
        print(f"usage: python -m trainer VERB [flags]\n\nverbs:\n{verbs}", file=sys.stderr)
        return ExitCode.OK if verb in ("-h", "--help") else ExitCode.USAGE
    module = importlib.import_module(VERBS[verb][0])
    parser = _Parser(prog=f"python -m trainer {verb}", description=VERBS[verb][1], allow_abbrev=False)
    try:
        module.add_arguments(parser)
        return module.run(parser.parse_args(arguments[1:]))
    except DflashError as error:
        for each in (error, *error.problems):
            print(each.render(), file=sys.stderr)
        if "--json" in arguments:
            print(dumps(error.to_json()))
        return error.code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # `| head` has seen enough; the interpreter's own flush at exit must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK
    except Exception:
        traceback.print_exc()
        return ExitCode.FAILED


if __name__ == "__main__":
    sys.exit(main())
