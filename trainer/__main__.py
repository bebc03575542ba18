"""`python -m trainer VERB`: train, preflight, prepare, generate, evaluate, export, selfcheck."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback

from remote.protocol.codec import dumps
from remote.protocol.errors import DflashError, ExitCode

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


def main(argv: list[str] | None = None) -> int:
    """Run a verb; returns its exit code. A DflashError becomes error/cause/hint on stderr, or with --json one line on stdout."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    verb = arguments[0] if arguments else ""
    if verb not in VERBS:
        verbs = "\n".join(f"  {name:<10} {about}" for name, (_, about) in VERBS.items())
        print(f"usage: python -m trainer VERB [flags]\n\nverbs:\n{verbs}", file=sys.stderr)
        return ExitCode.OK if verb in ("-h", "--help") else ExitCode.USAGE
    module = importlib.import_module(VERBS[verb][0])
    parser = argparse.ArgumentParser(prog=f"python -m trainer {verb}", description=VERBS[verb][1], allow_abbrev=False)
    module.add_arguments(parser)
    try:
        return module.run(parser.parse_args(arguments[1:]))
    except DflashError as error:
        print(error.render(), file=sys.stderr)
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
