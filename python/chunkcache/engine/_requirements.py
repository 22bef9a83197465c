"""Says which extra is missing, before an import fails with less."""

from importlib.util import find_spec

for _package in ("torch", "transformers"):
    if find_spec(_package) is None:
        raise ModuleNotFoundError(
            f"chunkcache.engine needs {_package}: pip install 'chunkcache[hf]'", name=_package
        )
