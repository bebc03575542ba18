"""What an interpreter of this machine can import, asked of itself."""

from __future__ import annotations

import hashlib
import json
import subprocess
from dataclasses import dataclass, field

from remote.agent.environment import base_environment
from remote.protocol.errors import preflight_error

PACKAGES = ("torch", "transformers", "safetensors", "numpy", "flash-linear-attention", "gguf", "accelerate", "psutil")

# Metadata only: importing torch to ask its version would take seconds.
_PROGRAM = """\
import json, os, sys, sysconfig
from importlib.metadata import PackageNotFoundError, distribution
found, where = {}, {}
for name in sys.argv[1:]:
    try:
        package = distribution(name)
        found[name], where[name] = package.version, str(package.locate_file(""))
    except PackageNotFoundError:
        pass
marker = os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED")
managed = sys.prefix == sys.base_prefix and os.path.exists(marker)
python = "%d.%d.%d" % sys.version_info[:3]
print(json.dumps({"python": python, "packages": found, "where": where, "managed": managed}))
"""


@dataclass(frozen=True)
class Interpreter:
    """A python and the versions of the packages that matter to us."""

    path: str
    python: str
    versions: dict[str, str]
    where: dict[str, str] = field(default_factory=dict[str, str])
    """Directory that each package was found in."""
    managed: bool = False
    """Whether pip refuses to install into it, for it belongs to the distribution (PEP 668)."""

    @property
    def fingerprint(self) -> str:
        """Return 12 hex digits that change with the path or any version."""
        # The path too: two venvs of equal versions may differ in how they were built.
        text = json.dumps([self.path, self.python, sorted(self.versions.items())])
        return hashlib.sha256(text.encode("utf-8")).hexdigest()[:12]


def packages_of(python: str) -> Interpreter:
    """Ask an interpreter. Raises a preflight error when it does not answer."""
    try:
        answer = subprocess.run(
            # -I: the answer must not depend on our working directory.
            [python, "-I", "-c", _PROGRAM, *PACKAGES],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=base_environment(python),
            timeout=60,
            check=True,
        )
        said = json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise preflight_error(
            f"{python} does not work", cause=str(error), hint="pass --python PATH of a Python 3.11 or newer"
        ) from error
    versions, where = ({str(key): str(value) for key, value in said[part].items()} for part in ("packages", "where"))
    return Interpreter(python, str(said["python"]), versions, where, bool(said["managed"]))
