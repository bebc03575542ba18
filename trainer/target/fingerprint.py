"""Which model a target directory holds: what a resumed run compares. Torch-free: the leader asks."""

from __future__ import annotations

import hashlib
import json

from trainer.target.facts import TargetFacts

# What a newer transformers writes anew without changing a number.
_BOOKKEEPING = frozenset({"transformers_version", "_name_or_path", "use_cache", "architectures"})
# A finetuned copy differs in nearly every tensor, so few are enough; each costs one read, on a cold disk 10 ms.
_SAMPLED_TENSORS = 64
_SAMPLED_BYTES = 256


def target_fingerprint(facts: TargetFacts) -> str:
    """Return a sha256 of the text configuration, of the tensors' names, shapes and dtypes, and of the first bytes of some.

    Where the directory lies and how its tensors are dealt to files does not matter. Raises OSError.
    """
    config = {key: value for key, value in facts.text_config.items() if key not in _BOOKKEEPING}
    tensors = {name: [list(entry.shape), entry.dtype] for name, entry in facts.tensors.items()}
    described = json.dumps([facts.architecture, config, tensors], sort_keys=True)
    digest = hashlib.sha256(b"dflash target 1\n" + described.encode("utf-8"))
    names = sorted(facts.tensors)
    for name in names[:: -(-len(names) // _SAMPLED_TENSORS)]:
        entry = facts.tensors[name]
        with entry.file.open("rb") as file:
            file.seek(entry.start)
            digest.update(file.read(min(_SAMPLED_BYTES, entry.bytes)))
    return digest.hexdigest()
