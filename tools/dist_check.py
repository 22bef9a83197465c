"""Build the sdist, then a wheel from the sdist alone, and import that wheel beside numpy alone."""

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Imports the package, uses the compiled half, and fails if anything but numpy came with it.
PROBE = """
import sys
import chunkcache
tree = chunkcache.PrefixTree(8, chunk_size=4)
tree.insert([1, 2, 3, 4, 5])
tree.check_invariants()
from chunkcache.kernels.build import source_folder
from chunkcache.kernels.table import instances
assert instances() and source_folder().is_relative_to(sys.prefix), source_folder()
extra = {"torch", "transformers", "cuda", "typer", "rich", "matplotlib"} & set(sys.modules)
sys.exit(f"imported without need: {extra}" if extra else 0)
"""


def run(*command: str | Path, cwd: Path) -> None:
    """Run a command and fail with it."""
    subprocess.run([str(word) for word in command], cwd=cwd, check=True)


def only(folder: Path, pattern: str) -> Path:
    """Return the one file of `folder` that matches `pattern`."""
    (path,) = folder.glob(pattern)
    return path


def main() -> None:
    """Build and try the distributions in a temporary folder."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(sys.executable, "-m", "maturin", "sdist", "--out", folder, cwd=ROOT)
        sdist = only(folder, "chunkcache-*.tar.gz")
        # pip unpacks the sdist elsewhere and builds there: nothing of the checkout is in reach.
        pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation")
        run(*pip, "--wheel-dir", folder, sdist, cwd=folder)
        wheel = only(folder, "chunkcache-*-cp311-abi3-*.whl")
        venv.create(folder / "venv", with_pip=True)
        python = folder / "venv" / "bin" / "python"
        run(python, "-m", "pip", "install", "--quiet", wheel, cwd=folder)
        run(python, "-W", "error", "-c", PROBE, cwd=folder)
    sys.stdout.write(f"{sdist.name} and {wheel.name} are sound\n")


if __name__ == "__main__":
    main()
