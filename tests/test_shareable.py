"""Shareable memory through the public functions: tensors and arrays live there as anywhere else.

Each test runs in a process of its own: the allocator is installed for ever.
"""

from __future__ import annotations

import copy
import gc
import io
import threading
import time

import numpy as np
import pytest
import torch
from torch import nn

import pycoll
from helpers_scripts import keep, run_scripts
from pool import alone

MIB = 1 << 20


def raised(function, *kinds):
    with pytest.raises(kinds) as caught:
        function()
    return str(caught.value)


def numbers(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


# ---- pycoll.empty and empty_array ----

SHAPES = [(), (0,), (1,), (3, 5), (7, 0, 2), (513, 1025), (4 * MIB,)]


def empties():
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64):
            one = pycoll.empty(*shape, dtype=dtype)
            two = pycoll.empty(shape, dtype=dtype)
            for tensor in (one, two):
                assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
                assert tensor.is_contiguous() and pycoll.is_shareable(tensor)
            one.fill_(1)
            two.fill_(0)
            assert bool((one == 1).all()) and bool((two == 0).all())
    assert pycoll.empty(2, dtype=None).dtype == torch.get_default_dtype()
    assert pycoll.empty(torch.Size([2, 3])).shape == (2, 3)
    blocks = pycoll.shared_memory_stats()["blocks"]
    nothing = pycoll.empty_array((3, 0)), pycoll.empty(0)
    assert pycoll.shared_memory_stats()["blocks"] == blocks
    assert all(map(pycoll.is_shareable, nothing))
    for shape in SHAPES:
        for kind in (np.float32, "i1", np.complex128, [("a", "f8"), ("b", "i2")]):
            array = pycoll.empty_array(shape, kind)
            assert (array.shape, array.dtype) == (shape, np.dtype(kind))
            assert array.flags.c_contiguous and array.flags.writeable
            assert pycoll.is_shareable(array)
    assert pycoll.empty_array(5).dtype == np.float64

    raised(lambda: pycoll.empty(-1), RuntimeError)
    raised(lambda: pycoll.empty(2.5), TypeError)
    for wrong in ("float32", np.float32, float):
        assert "must be a torch.dtype" in raised(
            lambda kind=wrong: pycoll.empty(2, dtype=kind), TypeError
        )
    raised(lambda: pycoll.empty_array((3, -1)), ValueError)
    raised(lambda: pycoll.empty_array((3, 2.5)), TypeError)
    large = np.int64(2**40)  # whose product NumPy's integers do not hold
    raised(lambda: pycoll.empty_array((large, large)), ValueError)
    assert "Python objects" in raised(lambda: pycoll.empty_array(3, object), ValueError)


def test_empty():
    alone(empties)


def array_memory():
    before = pycoll.shared_memory_stats()["blocks"]
    array = pycoll.empty_array((4, MIB), np.float32)
    array[:] = np.arange(MIB)
    view = array[2, ::-7].reshape(-1, 1)
    assert pycoll.is_shareable(view)
    positive = array[1]
    expected = view.copy()
    assert not pycoll.is_shareable(expected)
    del array
    gc.collect()
    pycoll.empty_array(4 * MIB, np.float32)[:] = -1  # would land there, were it free
    assert (view == expected).all()
    tensor = torch.from_numpy(positive)
    assert pycoll.is_shareable(tensor)
    del view, positive, tensor
    assert pycoll.shared_memory_stats()["blocks"] == before


def test_an_array_lives_as_long_as_its_views():
    alone(array_memory)


def questions():
    assert pycoll.shared_memory_stats() == dict.fromkeys(pycoll.shared_memory_stats(), 0)
    assert not pycoll.is_shareable(torch.ones(MIB)) and not pycoll.is_shareable(np.ones(MIB))
    # Asking has not made an arena.
    assert pycoll.shared_memory_stats()["size"] == 0
    assert pycoll.is_shareable(torch.ones(0)) and pycoll.is_shareable(np.ones((3, 0)))
    assert not pycoll.is_shareable(torch.ones(3, device="meta"))
    assert not pycoll.is_shareable(torch.eye(3).to_sparse())
    for wrong in ([1.0], 3, None, "tensor"):
        assert "neither a tensor" in raised(lambda w=wrong: pycoll.is_shareable(w), ValueError)
    pycoll.empty(3 * MIB)
    stats = pycoll.shared_memory_stats()
    assert stats["size"] >= 64 * MIB and stats["peak"] >= 12 * MIB and stats["live"] == 0


def test_questions_about_memory():
    alone(questions)


def without_room():
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))
    tensor, array = pycoll.empty(MIB), pycoll.empty_array(MIB)
    with pycoll.shareable():
        scoped = torch.ones(MIB)
    shared = pycoll.share_(numbers(MIB))
    for memory in (tensor, array, scoped, shared):
        memory[:] = 3
        assert not pycoll.is_shareable(memory)
    assert float(shared.sum()) == 3 * MIB


def test_without_an_arena_memory_is_ordinary():
    alone(without_room)


# ---- pycoll.share_ ----


def moves():
    base = numbers(3000, 1000)
    expected = base.clone()
    view, flat, transposed = base[100:200], base.view(-1), base.t()
    parameter = nn.Parameter(base.view(1000, 3000))
    assert pycoll.share_(view) is view
    for tensor in (base, view, flat, transposed, parameter):
        assert pycoll.is_shareable(tensor)
    assert torch.equal(base, expected) and torch.equal(parameter.view(-1), expected.view(-1))
    flat[5] = 42
    assert float(base[0, 5]) == 42 and float(transposed[5, 0]) == 42
    pointer = base.data_ptr()
    pycoll.share_(base)  # again: nothing
    assert base.data_ptr() == pointer
    parameter.sum().backward()
    assert pycoll.share_(parameter.grad) is parameter.grad
    assert bool((parameter.grad == 1).all())
    small = pycoll.share_(torch.tensor(7))
    assert pycoll.is_shareable(small) and int(small) == 7
    assert pycoll.share_(torch.empty(0)).numel() == 0

    # Copy-on-write storages part ways.
    source = numbers(MIB)
    lazy = torch._lazy_clone(source)
    pycoll.share_(lazy)
    lazy.zero_()
    assert torch.equal(source, numbers(MIB)) and not pycoll.is_shareable(source)

    # Saved for the backward pass, and moved before it.
    x = numbers(MIB).requires_grad_()
    y = (x * x).sum()
    pycoll.share_(x)
    y.backward()
    assert torch.equal(x.grad, 2 * x.detach())

    model = nn.Sequential(nn.Linear(700, 700), nn.Linear(700, 3))
    inputs = numbers(5, 700)
    before = model(inputs)
    for each in model.parameters():
        pycoll.share_(each)
    assert torch.equal(model(inputs), before)


def test_share_moves_the_storage_and_all_views():
    alone(moves)


def refusals():
    array = np.ones(MIB)
    exported = torch.ones(MIB)
    exported_array = exported.numpy()
    in_torch_shared_memory = torch.ones(MIB).share_memory_()
    assert "torch's own" in raised(lambda: pycoll.share_(in_torch_shared_memory), ValueError)
    for tensor in (torch.from_numpy(array), exported):
        assert "cannot be moved" in raised(lambda t=tensor: pycoll.share_(t), ValueError)
    assert exported_array.sum() == MIB and exported.numpy() is not None
    meta = torch.ones(3, device="meta")
    assert "on meta" in raised(lambda: pycoll.share_(meta), ValueError)
    assert "sparse" in raised(lambda: pycoll.share_(torch.eye(3).to_sparse()), ValueError)
    assert "empty_array" in raised(lambda: pycoll.share_(array), ValueError)
    raised(lambda: pycoll.share_([1, 2]), pycoll.InvalidArgumentError)


def test_share_refuses_what_cannot_move():
    alone(refusals)


# ---- The scope ----


def scope():
    assert not pycoll.is_shareable(torch.ones(MIB))
    outside = []
    with pycoll.shareable():
        made = [
            torch.zeros(MIB),
            torch.cat([torch.ones(MIB // 2), torch.ones(MIB // 2)]),
            numbers(600, 600) @ numbers(600, 600),
            torch.empty_strided((1024, 1024), (1, 1024)),
            nn.Parameter(torch.ones(MIB)),
            torch.ones(MIB).to(torch.float64),
        ]
        assert not pycoll.is_shareable(torch.ones(5))
        thread = threading.Thread(target=lambda: outside.append(torch.ones(MIB)))
        thread.start()
        thread.join()
        with pycoll.shareable():
            pass
        made.append(torch.ones(MIB))  # the inner scope has not ended the outer one
        with pytest.raises(ZeroDivisionError), pycoll.shareable():
            1 / 0  # noqa: B018
        made.append(torch.ones(MIB))
    assert all(map(pycoll.is_shareable, made))
    assert not pycoll.is_shareable(outside[0])
    assert not pycoll.is_shareable(torch.ones(MIB))

    @pycoll.shareable()
    def make():
        return torch.ones(MIB)

    assert pycoll.is_shareable(make()) and pycoll.is_shareable(make())


def test_the_scope_serves_its_thread():
    alone(scope)


def suspended():
    """A generator that waits inside a scope belongs to the thread that entered it."""

    def inside():
        with pycoll.shareable():
            yield

    def on_a_thread(function):
        thread = threading.Thread(target=function)
        thread.start()
        thread.join()

    mine, others = inside(), inside()
    next(mine)
    on_a_thread(lambda: next(others))
    others.close()
    assert pycoll.is_shareable(torch.ones(MIB))  # another thread's scope has ended, not this one
    found = []
    on_a_thread(lambda: (mine.close(), found.append(torch.ones(MIB))))
    assert not pycoll.is_shareable(found[0]) and not pycoll.is_shareable(torch.ones(MIB))
    with pycoll.shareable():
        assert pycoll.is_shareable(torch.ones(MIB))


def test_any_thread_may_end_a_scope():
    alone(suspended)


def ordinary_life():
    """What tensors go through in a program, values checked against ordinary ones."""
    data = numbers(300, 1200)
    with pycoll.shareable():
        tensor = data.clone()
    assert pycoll.is_shareable(tensor)

    array = tensor.numpy()
    array[0, 0] = 9
    assert float(tensor[0, 0]) == 9
    tensor[0, 0] = data[0, 0]
    assert np.array_equal(array, data.numpy())
    del array

    file = io.BytesIO()
    torch.save({"t": tensor, "view": tensor[5]}, file)
    file.seek(0)
    loaded = torch.load(file)
    assert torch.equal(loaded["t"], data)
    loaded["t"][5, 1] = -1
    assert float(loaded["view"][1]) == -1
    file.seek(0)
    with pycoll.shareable():
        assert torch.equal(torch.load(file)["t"], data)

    assert torch.equal(copy.deepcopy(tensor), data)
    assert torch.equal(copy.deepcopy(nn.Parameter(tensor)), data)

    grown = pycoll.share_(data.clone())
    grown.resize_(900, 1200)
    assert torch.equal(grown[:300], data)
    assert pycoll.is_shareable(grown)
    grown.untyped_storage().resize_(0)
    grown.untyped_storage().resize_(8 * MIB)
    assert pycoll.is_shareable(grown)

    lazy = torch._lazy_clone(tensor)
    lazy.zero_()
    assert torch.equal(tensor, data)

    # An allocation in one scope, torch's own shared memory after it.
    shared = tensor.clone().share_memory_()
    assert shared.is_shared() and torch.equal(shared, data)

    model = nn.Linear(1200, 600)
    control = copy.deepcopy(model)
    with pycoll.shareable():
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            model(tensor).square().mean().backward()
            optimizer.step()
        assert pycoll.is_shareable(model.weight.grad)
        assert all(map(pycoll.is_shareable, optimizer.state[model.weight].values())) is False
        assert pycoll.is_shareable(optimizer.state[model.weight]["exp_avg"])
    optimizer = torch.optim.Adam(control.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        control(data).square().mean().backward()
        optimizer.step()
    assert torch.equal(model.weight, control.weight)

    with torch.profiler.profile(profile_memory=True) as profile, pycoll.shareable():
        torch.ones(3 * MIB).sum()
    assert any(event.self_cpu_memory_usage >= 12 * MIB for event in profile.key_averages())


def test_tensors_in_it_live_as_others():
    alone(ordinary_life)


def churn():
    """Allocate and free for a while: what the kernel has given stays the same."""

    def backed():
        return pycoll.shared_memory_stats()["backed"]

    seen = []
    rng = np.random.default_rng(5)
    for _ in range(60):
        sizes = rng.integers(MIB // 4, 6 * MIB, 12)
        with pycoll.shareable():
            kept = [torch.empty(int(size) // 4) for size in sizes]
        for i, tensor in enumerate(kept):
            tensor[::512] = i  # each page
        assert all(bool((tensor[::512] == i).all()) for i, tensor in enumerate(kept))
        rng.shuffle(kept)
        kept.clear()
        del tensor
        seen.append(backed())
    stats = pycoll.shared_memory_stats()
    assert (stats["live"], stats["blocks"]) == (0, 0)
    assert max(seen[30:]) <= 1.1 * max(seen[:30]) <= 512 * MIB
    with pycoll.shareable():
        large = torch.empty(600 * MIB // 4)
    large[::512] = 1
    peak = backed()
    assert peak >= 600 * MIB
    del large
    assert backed() <= peak - 500 * MIB  # more than the cache keeps goes back at once


def test_memory_stays_flat():
    alone(churn, timeout=60)


def exchange():
    """Threads free what others made, in any order, while the main thread makes more."""
    made, lock = [], threading.Lock()
    stop = threading.Event()
    wrong = []

    def free(seed):
        rng = np.random.default_rng(seed)
        while not stop.is_set() or made:
            with lock:
                value, tensor = made.pop(int(rng.integers(len(made)))) if made else (0, None)
            if tensor is None:
                time.sleep(0.001)
            elif not bool((tensor == value).all()):
                wrong.append(value)

    threads = [threading.Thread(target=free, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    rng = np.random.default_rng(9)
    with pycoll.shareable():
        for value in range(400):
            tensor = torch.full((int(rng.integers(20_000, 400_000)),), float(value))
            with lock:
                made.append((value, tensor))
            del tensor
            while len(made) > 40:
                time.sleep(0.001)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert pycoll.shared_memory_stats()["blocks"] == 0


def test_other_threads_free():
    alone(exchange)


# ---- The whole process ----


def everything():
    from pycoll.shared_memory import serve_whole_process

    serve_whole_process()
    tensors = [torch.ones(MIB), numbers(MIB), torch.zeros(2, MIB // 8)]
    assert all(map(pycoll.is_shareable, tensors))
    assert not pycoll.is_shareable(torch.ones(MIB // 8))
    found = []
    thread = threading.Thread(target=lambda: found.append(torch.ones(MIB)))
    thread.start()
    thread.join()
    assert pycoll.is_shareable(found[0])


def test_the_whole_process():
    alone(everything)


def at_exit(rank, world_size, directory):
    """Leaves tensors everywhere: variables of the script, cycles, threads."""
    tensor = torch.ones(MIB)
    print(pycoll.is_shareable(tensor))

    class Holder:
        pass

    holder = Holder()
    holder.itself, holder.tensor = holder, torch.ones(MIB)
    with pycoll.shareable():
        scoped = torch.ones(3 * MIB)
    arrays = [
        pycoll.empty_array(5),
        pycoll.empty_array(MIB)[::2],
        tensor.numpy(),
        scoped[5:].numpy(),
    ]
    keep(tensor, holder, scoped, pycoll.empty(5), *arrays, torch.nn.Parameter(scoped))

    def hold():
        # No more: a thread that is inside torch when the interpreter ends takes the process down.
        keep_here = torch.ones(MIB)  # noqa: F841
        while True:
            time.sleep(0.01)

    threading.Thread(target=hold, daemon=True).start()
    time.sleep(0.05)


@pytest.mark.parametrize("variable", ["0", "1"])
def test_the_end_of_the_interpreter(variable):
    (result,) = run_scripts(1, at_exit, env={"PYCOLL_SHARED_ALLOCATOR": variable})
    assert (result.exitcode, result.stderr) == (0, ""), result
    assert result.stdout == ("True\n" if variable == "1" else "False\n")
