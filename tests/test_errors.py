import pickle

import pytest

import chunkcache


@pytest.mark.parametrize(
    ("error", "base"),
    [
        (chunkcache.InvalidConfigError, ValueError),
        (chunkcache.UnknownSequenceError, LookupError),
        (chunkcache.OutOfChunksError, Exception),
        (chunkcache.StalePlanError, Exception),
        (chunkcache.KernelError, Exception),
    ],
)
def test_every_error_has_the_package_base_and_a_builtin_one(
    error: type[Exception], base: type[Exception]
) -> None:
    assert issubclass(error, chunkcache.ChunkCacheError)
    assert issubclass(error, base)


def test_out_of_chunks_survives_pickling() -> None:
    error = chunkcache.OutOfChunksError("out of chunks", 3, 1, 1)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.needed, copy.free, copy.evictable) == ("out of chunks", 3, 1, 1)
