"""A serving engine for Hugging Face models over the shared-prefix cache.

Needs the extra ``hf``: ``pip install 'chunkcache[hf]'``.
"""

# First, so that a missing extra is named.
from chunkcache.engine import _requirements as _requirements
from chunkcache.engine.async_llm import AsyncLLM
from chunkcache.engine.config import EngineConfig, ModelSpec
from chunkcache.engine.llm import LLM
from chunkcache.engine.loader import BUILTIN_MODEL
from chunkcache.engine.logprobs import Logprob
from chunkcache.engine.outputs import CompletionOutput, RequestOutput, StreamOutput
from chunkcache.engine.params import SamplingParams
from chunkcache.engine.stats import EngineStats

__all__ = [
    "BUILTIN_MODEL",
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineConfig",
    "EngineStats",
    "Logprob",
    "ModelSpec",
    "RequestOutput",
    "SamplingParams",
    "StreamOutput",
]
