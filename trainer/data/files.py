"""Which files make a data set, and in which form each is read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from remote.protocol.errors import DflashError, preflight_error
from trainer.data.chunks import Chunk
from trainer.data.jsonl import SUFFIXES
from trainer.data.tokenised_jsonl import read_jsonl

_ARROW_SUFFIXES = (".parquet", ".arrow")


def read_chunks(path: Path) -> Iterator[Chunk]:
    """Yield the documents of a data set in the order of its files.

    Raises:
        DflashError: the path is missing or holds nothing known, two forms at once, or a file that cannot be read.
    """
    files = data_files(path)
    for file in files:
        if file.name.endswith(SUFFIXES):
            yield from read_jsonl(file)
        else:
            # pyarrow is optional, so it is imported where such a file is met.
            from trainer.data.arrow_files import read_arrow, read_parquet

            yield from read_parquet(file) if file.suffix == ".parquet" else read_arrow(file)


def data_files(path: Path) -> list[Path]:
    """Return the files of a data set, in reading order."""
    if path.is_file():
        if not path.name.endswith((*SUFFIXES, *_ARROW_SUFFIXES)):
            raise _unknown(path, f"the name ends in {path.suffix or 'nothing'}")
        return [path]
    if not path.is_dir():
        raise preflight_error(
            f"no data at {path}",
            cause="the path does not exist",
            hint="name where data are with --data-dir, and with --held-out-dir",
        )
    if (path / "dataset_dict.json").is_file():
        path = _split(path)
    if (path / "state.json").is_file():
        return _saved_files(path)
    files = sorted(p for p in path.iterdir() if p.is_file() and p.name.endswith((*SUFFIXES, *_ARROW_SUFFIXES)))
    forms = sorted({"jsonl" if file.name.endswith(SUFFIXES) else file.suffix[1:] for file in files})
    if not files:
        names = ", ".join(sorted(p.name for p in path.iterdir())[:8]) or "nothing"
        raise _unknown(path, f"it holds {names}")
    if len(forms) > 1:
        raise preflight_error(
            f"{path} holds data in {len(forms)} forms",
            cause=" and ".join(forms),
            hint="keep one form, since the same documents may be in both",
        )
    return files


def _split(path: Path) -> Path:
    """Return the directory of the split to train on: train, or the only one."""
    splits = _json(path / "dataset_dict.json").get("splits", [])
    if "train" in splits:
        return path / "train"
    if len(splits) == 1:
        return path / splits[0]
    raise preflight_error(
        f"{path} has no split named train",
        cause=f"its splits: {', '.join(splits) or 'none'}",
        hint="give the directory of one split",
    )


def _saved_files(path: Path) -> list[Path]:
    """Return the arrow files of a `datasets` directory in the order of its state.json."""
    state = _json(path / "state.json")
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise preflight_error(
            f"{path} was saved with an index of its rows",
            cause="an old version of datasets wrote it",
            hint="save it again after flatten_indices()",
        )
    files = [path / entry["filename"] for entry in state.get("_data_files", [])]
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        raise preflight_error(
            f"{path} is incomplete",
            cause=f"missing: {', '.join(missing)}" if missing else "state.json names no data file",
            hint="copy the directory again",
        )
    return files


def _json(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise preflight_error(f"{path} is no valid JSON", cause=str(error), hint="copy the directory again") from error


def _unknown(path: Path, cause: str) -> DflashError:
    return preflight_error(
        f"{path} is no tokenised data set",
        cause=cause,
        hint="give a datasets directory, or files that end in .parquet, .arrow, .jsonl or .jsonl.gz",
    )
