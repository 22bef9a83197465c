"""The ``chunkcache`` command. Needs the extra ``cli``: ``pip install 'chunkcache[cli]'``."""

from __future__ import annotations

import sys
from importlib.util import find_spec


def main() -> None:
    """Run the command line."""
    missing = [name for name in ("typer", "rich", "matplotlib") if find_spec(name) is None]
    if missing:
        sys.exit(f"chunkcache needs {', '.join(missing)}: pip install 'chunkcache[cli,hf]'")
    from chunkcache.cli.app import app

    app()
