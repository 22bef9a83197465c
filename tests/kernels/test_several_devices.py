"""Caches on two devices in one process, and calls whose device is not torch's current one."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from chunkcache import ChunkCache, InvalidConfigError, attention, reference
from chunkcache.kernels import tensors
from chunkcache_testing.devices import NEEDS_TWO_DEVICES, to_numpy
from chunkcache_testing.kernels.serving import Serving
from chunkcache_testing.prefix_kv import PrefixKv

from .test_tensors import CudaArray, Dlpack

pytestmark = NEEDS_TWO_DEVICES

HERE, THERE = 0, 1
TOKENS = list(range(40))


@pytest.fixture(autouse=True)
def current_device_stays() -> Iterator[None]:
    """What is done on another device leaves the current one as it was."""
    torch.cuda.set_device(HERE)
    yield
    assert torch.cuda.current_device() == HERE


def on(device: int, array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(f"cuda:{device}")


class Decoding:
    """A cache on one device with the prompt of one sequence in it."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.kv = PrefixKv(1, 2, 64, num_qo_heads=4, dtype="float16")
        self.cache = ChunkCache(
            1, 2, 64, dtype="float16", chunk_size=16, capacity=16, device=device, num_qo_heads=4
        )
        self.tokens = list(TOKENS)
        self.seq = self.cache.insert(self.tokens).seq
        self.k, self.v = (torch.zeros(1, 2, 64, device=f"cuda:{device}").half() for _ in range(2))
        self.q = torch.zeros(1, 4, 64, device=f"cuda:{device}").half()
        k, v = (on(device, part) for part in self.kv.keys_values(0, self.tokens))
        with self.cache.plan([self.seq], [0, len(self.tokens)]) as plan:
            self.cache.write_kv(0, k, v, plan)
            out = self.cache.attend(0, on(device, self.kv.queries(0, self.tokens)), plan)
            self.cache.commit(plan)
        self.check(out, len(self.tokens))

    def append(self, token: int) -> None:
        """Add a token, and put its rows into the fixed tensors."""
        self.tokens.append(token)
        self.cache.append(self.seq, token)
        k, v = (part[-1:] for part in self.kv.keys_values(0, self.tokens))
        q = self.kv.queries(0, self.tokens)[-1:]
        for fixed, rows in ((self.k, k), (self.v, v), (self.q, q)):
            fixed.copy_(on(self.device, rows))

    def check(self, out: torch.Tensor, count: int) -> None:
        """Compare the last rows' attention with float64."""
        assert out.device.index == self.device
        k, v = self.kv.keys_values(0, self.tokens)
        expected, _ = reference.attention(self.kv.queries(0, self.tokens)[-count:], k, v)
        assert reference.error(to_numpy(out), expected) < 1e-2


def test_caches_of_two_devices_take_turns():
    servings = []
    for device in (HERE, THERE):
        with torch.cuda.device(device):
            servings.append(Serving(rows=3, capacity=200))
    seqs: list[list[int]] = [[], []]
    for token in range(1, 30):
        for device, serving in enumerate(servings):
            with torch.cuda.device(device):
                if token in (1, 5, 11):
                    seqs[device].append(serving.insert([*TOKENS, token + 100 * device]))
                serving.decode(seqs[device])
                if token == 17:
                    serving.remove(seqs[device].pop(0))
                    seqs[device].append(serving.fork(seqs[device][0]))
                known = [serving.cache.sequence(seq) for seq in seqs[device]]
                done = [info.num_known_tokens == info.num_computed_tokens for info in known]
                serving.append(
                    [seq for seq, is_done in zip(seqs[device], done, strict=True) if is_done],
                    token,
                )


@pytest.mark.parametrize("device", [HERE, THERE])
def test_steps_without_a_capture(device):
    decoding = Decoding(device)
    for token in range(500, 520):
        decoding.append(token)
        with decoding.cache.plan([decoding.seq]) as plan:
            decoding.cache.write_kv(0, decoding.k, decoding.v, plan)
            out = decoding.cache.attend(0, decoding.q, plan)
            decoding.cache.commit(plan)
        decoding.check(out, 1)
        assert torch.cuda.current_device() == HERE


@pytest.mark.parametrize("device", [HERE, THERE])
def test_a_captured_step(device):
    decoding = Decoding(device)
    cache, out = decoding.cache, torch.zeros_like(decoding.q)
    decoding.append(500)
    plan = cache.plan([decoding.seq])
    with cache.capture(plan) as step:
        cache.write_kv(0, decoding.k, decoding.v, plan)
        cache.attend(0, decoding.q, plan, out=out)
    assert torch.cuda.current_device() == HERE
    for token in range(501, 530):
        step.replay(plan)
        cache.commit(plan)
        torch.cuda.synchronize(device)
        decoding.check(out, 1)
        decoding.append(token)
        plan = cache.plan([decoding.seq])
        assert torch.cuda.current_device() == HERE


def test_reads_forks_and_a_fraction_of_the_memory_elsewhere():
    decoding = Decoding(THERE)
    cache = decoding.cache
    forked = cache.fork(decoding.seq).seq
    cache.append(forked, 7)
    k, _ = cache.read_kv(0, forked, 0, len(TOKENS))
    assert k.device.index == THERE
    assert np.array_equal(to_numpy(k), decoding.kv.keys_values(0, TOKENS)[0])
    small = ChunkCache(1, 2, 64, dtype="float16", device=f"cuda:{THERE}", memory_fraction=0.001)
    assert small.device == f"cuda:{THERE}"


@pytest.mark.parametrize("name", ["q", "out"])
def test_attend_with_a_tensor_of_the_wrong_device(name):
    decoding = Decoding(THERE)
    decoding.append(500)
    plan = decoding.cache.plan([decoding.seq])
    decoding.cache.write_kv(0, decoding.k, decoding.v, plan)
    given = {"q": decoding.q, "out": torch.zeros_like(decoding.q)}
    given[name] = given[name].to(f"cuda:{HERE}")
    with pytest.raises(InvalidConfigError, match=rf"{name}: got .* on cuda:0, .* on cuda:1"):
        decoding.cache.attend(0, given["q"], plan, out=given["out"])


@pytest.mark.parametrize("name", ["k", "v"])
def test_write_kv_with_a_tensor_of_the_wrong_device(name):
    decoding = Decoding(THERE)
    decoding.append(500)
    plan = decoding.cache.plan([decoding.seq])
    given = {"k": decoding.k, "v": decoding.v}
    given[name] = given[name].to(f"cuda:{HERE}")
    with pytest.raises(InvalidConfigError, match=rf"{name}: got .* on cuda:0, .* on cuda:1"):
        decoding.cache.write_kv(0, given["k"], given["v"], plan)


def test_a_stream_of_the_wrong_device():
    decoding = Decoding(THERE)
    decoding.append(500)
    plan = decoding.cache.plan([decoding.seq])
    stream = torch.cuda.Stream(HERE)
    with pytest.raises(InvalidConfigError, match=r"stream: got cuda:0, .* on cuda:1"):
        decoding.cache.write_kv(0, decoding.k, decoding.v, plan, stream=stream)


def test_streams_of_another_device_by_object_and_handle():
    decoding = Decoding(THERE)
    stream = torch.cuda.Stream(THERE)
    for given in (stream, stream.cuda_stream):
        decoding.append(500 + len(decoding.tokens))
        torch.cuda.synchronize(THERE)
        with decoding.cache.plan([decoding.seq]) as plan:
            decoding.cache.write_kv(0, decoding.k, decoding.v, plan, stream=given)
            out = decoding.cache.attend(0, decoding.q, plan, stream=given)
            decoding.cache.commit(plan)
        stream.synchronize()
        decoding.check(out, 1)
        assert torch.cuda.current_device() == HERE


@pytest.mark.parametrize("kind", [lambda x: x, Dlpack])
def test_attention_over_pages_elsewhere(kind):
    place = f"cuda:{THERE}"
    k, v = (torch.randn(4, 16, 2, 64, device=place).half() for _ in range(2))
    q = torch.randn(2, 4, 64, device=place).half()
    plan = attention.plan_from_block_tables([[0, 1], [0, 2]], [20, 29], 16)
    out = attention.run(plan, kind(q), kind(k), kind(v))
    assert out.device.index == THERE
    expected = attention.run(plan, *(x.float().cpu() for x in (q, k, v)))
    assert reference.error(to_numpy(out), expected.numpy()) < 1e-2
    again = attention.run(plan, *(x.to(f"cuda:{HERE}") for x in (q, k, v)))
    assert torch.equal(again.cpu(), out.cpu())


def test_attention_over_pages_of_the_wrong_device():
    k = torch.zeros(1, 16, 1, 64, device=f"cuda:{THERE}").half()
    q = torch.zeros(1, 1, 64, device=f"cuda:{HERE}").half()
    plan = attention.plan_from_block_tables([[0]], [3], 16)
    with pytest.raises(InvalidConfigError, match=r"k_pages: got .* on cuda:1, .* on cuda:0"):
        attention.run(plan, q, k, k)


def test_merge_state_elsewhere():
    o = torch.ones(3, 2, 64, device=f"cuda:{THERE}")
    lse = torch.zeros(3, 2, device=f"cuda:{THERE}")
    merged, _ = attention.merge_state(o, lse, 3 * o, lse)
    assert torch.equal(merged, 2 * o)
    with pytest.raises(InvalidConfigError, match=r"o_b: got .* on cuda:0, .* on cuda:1"):
        attention.merge_state(o, lse, o.to(f"cuda:{HERE}"), lse)


@pytest.mark.parametrize(("kind", "current"), [(Dlpack, HERE), (Dlpack, THERE), (CudaArray, THERE)])
def test_an_array_of_another_library_is_taken_in_place(kind, current):
    tensor = torch.arange(12, device=f"cuda:{THERE}").reshape(3, 4)
    with torch.cuda.device(current):
        taken = tensors.as_tensor("q", kind(tensor))
    assert taken.device.index == THERE
    assert taken.data_ptr() == tensor.data_ptr()
