"""The operator's side: ships the trainer to another machine, starts it there, watches and stops it."""

__version__ = "0.1.0"
