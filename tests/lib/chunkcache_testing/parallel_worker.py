"""One process of a tensor-parallel engine: serves the cases of a file and writes what it got.

Usage: python -m chunkcache_testing.parallel_worker CASES RESULTS, with torchrun's environment. The
results are rewritten after each case, since a process may not survive its last one.
"""

import asyncio
import gc
import json
import os
import sys
import warnings
from typing import Any

import peft
import torch
import torch.distributed as dist
import transformers

from chunkcache.engine import LLM, AsyncLLM, SamplingParams
from chunkcache.engine.picker import TokenPicker
from chunkcache_testing.soak import CAPACITY, CHUNK_SIZE, Alone, make_prompts, soak

GREEDY = {"max_tokens": 12}
LONG = SamplingParams(max_tokens=200, ignore_eos=True)


def _llm(model: str, **options: Any) -> LLM:
    size = int(os.environ["WORLD_SIZE"])
    return LLM(model, chunk_size=16, tensor_parallel_size=size, **options)


def _message(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "served"


def _served(model: str, prompts: list[list[int]], params: dict[str, Any], options: Any) -> Any:
    llm = _llm(model, **options)
    outputs = llm.generate(prompts, SamplingParams(**params))
    llm.check_accounts()
    again = llm.generate(prompts, SamplingParams(max_tokens=1))
    return {
        "num_kv_heads": llm.spec.num_kv_heads,
        "num_preemptions": llm.stats.num_preemptions,
        "cached_tokens": [request.cached_tokens for request in again],
        "tokens": [[output.token_ids for output in request.outputs] for request in outputs],
        "texts": [[output.text for output in request.outputs] for request in outputs],
        "logprobs": [request.outputs[0].cumulative_logprob for request in outputs],
    }


def _adapted(model: str, prompts: list[list[int]], adapters: dict[str, str]) -> Any:
    """Serve every prompt bare and with each adapter, all in one batch."""
    llm = _llm(model, lora_adapters=adapters)
    names = [None, *adapters]
    pairs = [(prompt, name) for prompt in prompts for name in names]
    outputs = llm.generate(
        [prompt for prompt, _ in pairs],
        SamplingParams(**GREEDY),
        lora=[name for _, name in pairs],
    )
    llm.check_accounts()
    return [
        [name, request.outputs[0].token_ids]
        for (_, name), request in zip(pairs, outputs, strict=True)
    ]


def _refusal(model: str, options: Any) -> str:
    return _message(lambda: LLM(model, **options))


def _streamed(model: str, prompts: list[list[int]]) -> list[int]:
    """Leave a stream in the middle, and serve on."""
    llm = _llm(model)
    for piece in llm.generate(prompts, LONG, stream=True):
        if piece.index == 1:
            break
    llm.check_accounts()
    return llm.generate(prompts[0], SamplingParams(**GREEDY))[0].outputs[0].token_ids


def _arguments_differ(model: str) -> str:
    return _message(lambda: _llm(model, max_num_seqs=8 + int(os.environ["RANK"])))


def _requests_differ(model: str) -> list[str]:
    llm = _llm(model)
    params = SamplingParams(max_tokens=5 + dist.get_rank())
    first = _message(lambda: llm.generate([1, 2], params))
    return [first, _message(lambda: llm.generate([1, 2]))]


def _picking_fails(model: str) -> list[str]:
    """Let picking fail in the first process alone, and try a new engine."""
    llm = _llm(model)
    if dist.get_rank() == 0:
        llm.engine._engine._executor._picker._picker.pick = lambda *_: 1 / 0
    first = _message(lambda: llm.generate([1, 2], SamplingParams(**GREEDY)))
    return [first, _message(lambda: _llm(model).generate([1, 2], SamplingParams(**GREEDY)))]


def _step_fails(model: str, options: Any) -> str:
    """Let the model fail in the second process alone, while the first waits for it in a layer."""
    llm = _llm(model, **options)
    if dist.get_rank() == 1:
        llm.model.model.layers[1].mlp.forward = lambda _: 1 / 0
    return _message(lambda: llm.generate([1, 2], SamplingParams(**GREEDY)))


def _dies(model: str, options: Any) -> str:
    """Let the second process end in the middle of a step."""
    llm = _llm(model, **options)
    if dist.get_rank() == 1:
        llm.model.model.layers[1].mlp.forward = lambda _: os._exit(9)
    return _message(lambda: llm.generate([1, 2], SamplingParams(**GREEDY)))


def _asynchronous(model: str, prompts: list[list[int]]) -> Any:
    async def main() -> Any:
        size = int(os.environ["WORLD_SIZE"])
        options = {"chunk_size": 16, "capacity": 24, "max_num_seqs": 6}
        async with AsyncLLM(model, tensor_parallel_size=size, **options) as llm:
            if dist.get_rank() == 0:
                served = await _callers(llm, prompts)
            else:
                served = await _refused(llm, prompts[0])
        stats = llm.llm.cache.stats()
        return {
            "served": served,
            "num_steps": llm.stats.num_steps,
            "chunks": [stats.num_free, stats.num_evictable, stats.num_sequences],
        }

    return asyncio.run(main())


async def _callers(llm: AsyncLLM, prompts: list[list[int]]) -> Any:
    """Let callers come, leave, abort and ask for nonsense; return the texts of those who stay."""

    async def read(prompt: list[int], params: SamplingParams, **options: Any) -> Any:
        output = None
        async for latest in llm.generate(prompt, params, **options):
            output = latest
        assert output is not None
        return [output.outputs[0].token_ids, output.outputs[0].finish_reason]

    async def leave(prompt: list[int], after: int) -> None:
        outputs = llm.generate(prompt, LONG)
        async for _ in outputs:
            after -= 1
            if after == 0:
                break
        await outputs.aclose()

    stay = [
        asyncio.create_task(read(prompt, SamplingParams(**GREEDY), priority=i % 2))
        for i, prompt in enumerate(prompts * 3)
    ]
    gone = [asyncio.create_task(leave(prompt, 1 + i)) for i, prompt in enumerate(prompts)]
    cancelled = asyncio.create_task(read(prompts[0], LONG))
    aborted = asyncio.create_task(read(prompts[1], LONG, request_id="a"))
    refused = asyncio.create_task(read([-1], LONG))
    await asyncio.sleep(0.05)
    cancelled.cancel()
    await llm.abort("a")
    await asyncio.gather(*gone)
    await asyncio.wait({cancelled, refused})
    assert "token id" in str(refused.exception())
    tokens = [await task for task in stay]
    await llm.check_accounts()
    return {"tokens": tokens, "aborted": (await aborted)[1]}


def _soak(model: str) -> Any:
    """Let a crowd of callers do what callers do, and compare what they get with one process's."""

    async def main() -> Any:
        size = int(os.environ["WORLD_SIZE"])
        options = {"chunk_size": CHUNK_SIZE, "capacity": CAPACITY, "max_num_seqs": 12}
        async with AsyncLLM(
            model, tensor_parallel_size=size, max_num_batched_tokens=48, **options
        ) as llm:
            # Nor do the prompts have any.
            llm.llm.tokenizer = None
            record = None
            if dist.get_rank() == 0:
                record = await soak(llm, make_prompts(seed=1), seed=0, num_callers=100)
        stats = llm.llm.cache.stats()
        chunks = [stats.num_free, stats.num_evictable, stats.num_sequences]
        return record, {"num_steps": llm.stats.num_steps, "chunks": chunks}

    record, counts = asyncio.run(main())
    if record is not None:
        alone = Alone(transformers.AutoModelForCausalLM.from_pretrained(model).eval())
        for prompt, output in record.answers:
            alone.check(prompt, output)
        counts["ends"] = dict(record.ends)
    return counts


async def _refused(llm: AsyncLLM, prompt: list[int]) -> str:
    try:
        async for _ in llm.generate(prompt, LONG):
            pass
    except Exception as error:
        return str(error)
    return "served"


def _asynchronous_loss(model: str) -> str:
    """Let the second process die while callers of the first one wait."""

    async def main() -> str:
        async with AsyncLLM(model, tensor_parallel_size=int(os.environ["WORLD_SIZE"])) as llm:
            if dist.get_rank() == 1:
                llm.llm.model.model.layers[1].mlp.forward = lambda _: os._exit(9)
                await asyncio.sleep(60)
            return await _refused(llm, [1, 2])

    return asyncio.run(main())


def _on_devices(
    model: str, prompts: list[list[int]], adapters: dict[str, str], options: Any
) -> Any:
    """Serve on CUDA devices, and compare each step's logits with the whole model's."""
    whole = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float16)
    whole = whole.to("cuda").eval()
    llm = _llm(model, dtype="float16", lora_adapters=adapters, max_num_seqs=8, **options)
    seen: dict[int, list[torch.Tensor]] = {}
    pick = TokenPicker.pick

    def watching(self: Any, logits: torch.Tensor, picks: Any) -> Any:
        for each in picks:
            seen.setdefault(id(each.state), []).append(logits[each.row].float().cpu())
        return pick(self, logits, picks)

    TokenPicker.pick = watching
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    requests = [llm.request(prompt, params) for prompt in prompts]
    requests += [llm.request(prompts[0], params, lora=name) for name in adapters]
    llm.engine.add(requests)
    while llm.engine.num_unfinished:
        llm.engine.step()
    llm.check_accounts()
    TokenPicker.pick = pick
    errors = []
    for request in requests:
        adapted = whole
        if request.lora is not None:
            adapted = peft.PeftModel.from_pretrained(whole, adapters[request.lora])
        (sequence,) = request.sequences
        tokens = list(sequence.output.token_ids)
        ids = torch.tensor([[*request.prompt_token_ids, *tokens[:-1]]], device="cuda")
        with torch.inference_mode():
            logits = adapted(input_ids=ids).logits[0, request.num_prompt_tokens - 1 :]
        if request.lora is not None:
            whole = adapted.unload()
        if dist.get_rank() == 0:
            expected = logits.float().cpu()
            found = torch.stack(seen[id(sequence.state)][: len(tokens)])
            error = (found - expected).abs().amax(1) / expected.abs().amax(1)
            errors.append(float(error.max()))
    return {
        "tokens": [request.output.outputs[0].token_ids for request in requests],
        "errors": errors,
        "num_kv_heads": llm.spec.num_kv_heads,
        "device": str(llm.model.device),
    }


def _asynchronous_failure(model: str) -> str:
    """Let the second process be unable to follow."""

    async def main() -> str:
        async with AsyncLLM(model, tensor_parallel_size=int(os.environ["WORLD_SIZE"])) as llm:
            if dist.get_rank() == 0:
                return await _refused(llm, [1, 2])
            llm.llm.engine._follow = lambda *_: 1 / 0
            try:
                await llm.shutdown()
            except Exception as error:
                return f"{type(error).__name__}: {error}"
            return "ended"

    try:
        return asyncio.run(main())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _forgotten(model: str) -> str:
    """Let the first process forget its engine; the second then has nothing to follow."""
    llm = AsyncLLM(model, tensor_parallel_size=int(os.environ["WORLD_SIZE"]))
    if dist.get_rank() == 0:
        del llm
        gc.collect()
        return "ended"
    return _message(lambda: asyncio.run(llm.shutdown())).replace("served", "ended")


def _follower_leaves(model: str) -> str:
    """Let the second process's program end while the first one's callers are served."""
    llm = AsyncLLM(model, tensor_parallel_size=int(os.environ["WORLD_SIZE"]))
    if dist.get_rank() == 1:
        return "ended"

    async def main() -> str:
        async with llm:
            while (end := await _refused(llm, [1, 2])) == "served":
                pass
            return end

    return asyncio.run(main())


KINDS = {
    "soak": _soak,
    "asynchronous_failure": _asynchronous_failure,
    "follower_leaves": _follower_leaves,
    "forgotten": _forgotten,
    "on_devices": _on_devices,
    "served": _served,
    "adapted": _adapted,
    "refusal": _refusal,
    "streamed": _streamed,
    "arguments_differ": _arguments_differ,
    "requests_differ": _requests_differ,
    "picking_fails": _picking_fails,
    "step_fails": _step_fails,
    "dies": _dies,
    "asynchronous": _asynchronous,
    "asynchronous_loss": _asynchronous_loss,
}


def main(cases: str, results: str) -> None:
    """Serve every case."""
    torch.set_num_threads(1)
    if torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"]):
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        dist.init_process_group("gloo")
    with open(cases) as file:
        given = json.load(file)
    found = {}
    for name, (kind, arguments) in given.items():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # Of torch, transformers and peft about each other.
            warnings.filterwarnings("ignore", category=FutureWarning)
            warnings.filterwarnings("ignore", category=UserWarning, module="torch")
            found[name] = KINDS[kind](**arguments)
        with open(f"{results}.{os.environ['RANK']}", "w") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
