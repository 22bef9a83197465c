"""Print the requirements of the project and of some extras, to install them without building it.

Usage: python tools/extras.py EXTRA...
"""

import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def requirements(extras: list[str]) -> list[str]:
    """Return the requirements of the project and of `extras` in pyproject.toml, each once."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    groups = [project["dependencies"], *(project["optional-dependencies"][e] for e in extras)]
    return list(dict.fromkeys(line for group in groups for line in group))


if __name__ == "__main__":
    sys.stdout.write("\n".join(requirements(sys.argv[1:])) + "\n")
