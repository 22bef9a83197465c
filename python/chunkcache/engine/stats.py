"""What an engine counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class EngineStats:
    """What an engine has done since it began, or since `LLM.reset_stats`.

    Attributes:
        num_steps: forward passes.
        num_prompt_tokens_computed: rows of prompts that were run through the model.
        num_generated_tokens: tokens picked for sequences that still wanted them.
        num_preemptions: sequences set aside because the pool was full.
        num_decode_steps: those of the steps that computed no prompt.
        num_decode_tokens: tokens that came from those.
        decode_seconds: time of those, from the end of the step before to their own end.
        num_step_gaps: steps that followed another one while there was work all along.
        step_gap_seconds: time that passed between the end of a step and the start of such a
            following one, all together. The model has nothing to do meanwhile.
        peak_kv_bytes: most bytes of K/V held by live sequences at once.
        peak_num_seqs: most sequences that had a place in the cache at once.
    """

    num_steps: int = 0
    num_prompt_tokens_computed: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_decode_steps: int = 0
    num_decode_tokens: int = 0
    decode_seconds: float = 0.0
    num_step_gaps: int = 0
    step_gap_seconds: float = 0.0
    peak_kv_bytes: int = 0
    peak_num_seqs: int = 0
