"""The package's exceptions. Each is raised before anything has changed."""


class ChunkCacheError(Exception):
    """Base of every error that chunkcache raises on purpose."""


class InvalidConfigError(ChunkCacheError, ValueError):
    """An argument or a configuration that is not allowed.

    The message names the argument, what was given and what is allowed.
    """


class UnknownSequenceError(ChunkCacheError, LookupError):
    """A sequence or pin handle that was never given out, or was already removed."""


class OutOfChunksError(ChunkCacheError):
    """The pool cannot give the chunks that an operation needs.

    Attributes:
        needed: chunks that the operation needs.
        free: chunks on the free list.
        evictable: chunks that eviction could free.
    """

    def __init__(self, message: str, needed: int, free: int, evictable: int) -> None:
        """Keep the sizes beside the message."""
        super().__init__(message, needed, free, evictable)
        self.needed = needed
        self.free = free
        self.evictable = evictable

    def __str__(self) -> str:
        """Return the message alone."""
        return str(self.args[0])


class StalePlanError(ChunkCacheError):
    """A plan that was used after it was closed, or after its epoch."""


class KernelError(ChunkCacheError):
    """A compute kernel that could not be built, loaded or run."""


class EngineError(ChunkCacheError):
    """The engine could not go on with a request; `__cause__` is what happened, if it is known."""
