"""What the Triton kernel is launched with: tables, launches, refusals; graphs and size on a GPU."""

import sys

import numpy as np
import pytest
import torch

pytest.importorskip("triton", minversion="3.3")

from neumann.optim import phases
from neumann.optim.backends.cuda import (
    TritonBackend,
    device_tables,
    layout,
    scalars_kernel,
    update_kernel,
)
from neumann.optim.backends.cuda import (
    stepper as stepper_module,
)
from neumann.optim.phases import Timetable
from tests.support.oracle_runs import Run
from tests.support.triton_runs import (
    STRONG,
    Stepping,
    device,
    group_of,
    make_backend,
    same,
    scalar,
    shared_of,
    take_step,
)


def test_tables_agree_with_the_kernels():
    for name in ("RECORD", "AT_SIZE", "AT_FIRST", "COEFFICIENTS", "AT_KEEP", "AT_FOLLOW"):
        assert getattr(layout, name) == getattr(update_kernel, name).value


def test_reset_table_follows_the_timetable(monkeypatch):
    for interval, growth in ((4, 1.0), (1, 1.3), (10, 2.0), (5, 1.5)):
        timetable = Timetable(0, interval, growth)
        packed, _ = device_tables.pack_resets(timetable)
        times = np.frombuffer(packed, np.int64).tolist()
        expected = [t for t in range(1, 3000) if timetable.next_reset(t) == t]
        assert times[:2] == expected[:2]
        if growth > 1:
            assert [t for t in times if t < 3000] == expected
            assert times[-1] > 2**60  # nothing is left for the interval
    monkeypatch.setattr(phases, "RESET_LIMIT", 5)
    phases._compute_reset_table.cache_clear()
    device_tables.pack_resets.cache_clear()
    packed, interval = device_tables.pack_resets(Timetable(0, 10, 1.5))
    assert np.frombuffer(packed, np.int64).tolist() == [1, 11, 26, 49, 83]
    assert interval == 34
    phases._compute_reset_table.cache_clear()
    device_tables.pack_resets.cache_clear()


# ---------------------------------------------------------------------- launches and tables


class Counting:
    """A kernel that counts its launches, and gives nothing back that could be launched past it."""

    def __init__(self, kernel):
        self.kernel, self.launches = kernel, 0

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            self.launches += grid != (0,)  # a launch of no programs only compiles
            self.kernel[grid](*arguments, **constants)

        return launch


def test_a_step_takes_two_launches_and_one_copy_for_any_number_of_tensors(monkeypatch):
    run = Run([{"sizes": (3,) * 12, "lr": 0.1}, {"sizes": (40,), "lr": 0.2}], options=STRONG)
    stepping = Stepping(run)
    monkeypatch.setattr(stepper_module, "_is_interpreted", lambda kernels: device().type == "cpu")
    kernels = {}
    for module, name in (
        (scalars_kernel, "scalars_kernel"),
        (scalars_kernel, "finish_distance_kernel"),
        (update_kernel, "update_kernel"),
    ):
        kernels[name] = Counting(getattr(module, name))
        monkeypatch.setattr(module, name, kernels[name])
    layouts, sent = [], []
    build, buffer = layout.Layout.__init__, torch.frombuffer
    monkeypatch.setattr(
        layout.Layout, "__init__", lambda self, *a: (layouts.append(1), build(self, *a))[1]
    )
    monkeypatch.setattr(
        torch, "frombuffer", lambda *a, **k: (sent.append(len(a[0])), buffer(*a, **k))[1]
    )
    stepping.advance(0)
    assert (len(layouts), len(sent)) == (1, 3)
    for step in range(1, 4):
        del sent[:]
        stepping.advance(step)
        assert sent in ([], [13 * 8])  # the column of gradients, if any of them lies elsewhere
    del sent[:]
    stepping.step()
    assert sent == []
    assert len(layouts) == 1
    assert {name: kernel.launches for name, kernel in kernels.items()} == {
        "scalars_kernel": 5,
        "update_kernel": 5,
        "finish_distance_kernel": 0,
    }


def test_versions_count_what_was_written():
    run = Run([{"sizes": (3, 5), "lr": 0.1}], options=STRONG)
    stepping = Stepping(run)
    stepping.run.missing = lambda step, g, i: i == 1
    group = stepping.groups[0]
    watched = [*group.weights, *group.iterates, *group.offsets, group.momentum]
    watched += [stepping.clock, stepping.squared]
    before = [tensor._version for tensor in watched]
    stepping.advance(0)
    grown = [tensor._version > old for tensor, old in zip(watched, before, strict=True)]
    assert grown == [True, False, True, True, True, False, True, True, True]


# ---------------------------------------------------------------------- refusals


def test_unavailable_names_what_is_missing(monkeypatch):
    assert TritonBackend.unavailable(sums=1) is None
    monkeypatch.setattr(stepper_module, "_is_interpreted", lambda kernels: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "CUDA" in TritonBackend.unavailable(sums=1)
    with pytest.raises(RuntimeError, match="CUDA"):
        make_backend()
    monkeypatch.delattr(sys.modules["neumann.optim.backends.cuda"], "update_kernel")
    monkeypatch.setitem(sys.modules, "neumann.optim.backends.cuda.update_kernel", None)
    assert "Triton" in TritonBackend.unavailable(sums=1)


def test_bad_arguments_never_reach_the_weights():
    with pytest.raises(ValueError, match="block"):
        make_backend(block=48)
    with pytest.raises(ValueError, match="warps"):
        make_backend(block=512, warps=8)
    with pytest.raises(ValueError, match="rounding"):
        make_backend(rounding="up")
    with pytest.raises(ValueError, match="device"):
        TritonBackend("meta")
    backend, clock = make_backend(), scalar(dtype=torch.int64)
    weight = torch.ones(4, device=device())
    good = {"clock": clock, "distance_squared": scalar()}

    def step(group, **scalars):
        take_step(backend, [group], shared_of(), *{**good, **scalars}.values())

    with pytest.raises(ValueError, match="clock"):
        step(group_of([weight], [None]), clock=scalar())
    with pytest.raises(ValueError, match="distance_squared"):
        step(group_of([weight], [None]), distance_squared=scalar(dtype=torch.float32))
    with pytest.raises(ValueError, match="momentum"):
        step(group_of([weight], [None], last_momentum=scalar(dtype=torch.float32)))
    with pytest.raises(ValueError, match="gradient has shape"):
        step(group_of([weight], [torch.ones(5, device=device())]))
    narrow = weight.to(torch.float8_e4m3fn)
    with pytest.raises(TypeError, match="float8"):
        step(group_of([weight], [weight], iterates=[narrow]))
    with pytest.raises(ValueError, match=r"weight must be a dense tensor on .* on meta"):
        step(group_of([weight.to("meta")], [None]))
    assert int(clock) == 0
    assert bool((weight == 1).all())


# ---------------------------------------------------------------------- on a GPU alone


@pytest.mark.gpu
def test_no_step_waits_for_the_host():
    stepping = Stepping(Run([{"sizes": (5, 40), "lr": 0.1}], options=STRONG))
    batches = [stepping.gradients(step) for step in range(4)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step, batch in enumerate(batches):
            for group, gradients in zip(stepping.groups, batch, strict=True):
                group.gradients, group.options["lr"] = gradients, 0.1 / (1 + step)
            stepping.step()
        stepping.backend.finish_distance(stepping.squared)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert int(stepping.clock) == 4


@pytest.mark.gpu
def test_captured_graph_replays_through_phases_and_learning_rates():
    """Bit for bit beside eager steps, also after an eager step with other gradients between."""
    run = Run([{"sizes": (5, 40), "lr": 0.1}], options=STRONG, warmup=3, interval=2)
    steppings = [Stepping(run), Stepping(run)]
    rates = [scalar(0.1), scalar(0.1)]
    buffers = [[torch.zeros_like(w) for w in s.groups[0].weights] for s in steppings]

    def prepare(which, step):
        stepping = steppings[which]
        rates[which].fill_(0.1 / (1 + step % 4))
        for buffer, gradient in zip(buffers[which], stepping.gradients(step)[0], strict=True):
            buffer.copy_(gradient)
        stepping.groups[0].options["lr"] = rates[which]
        stepping.groups[0].gradients = list(buffers[which])

    def eager(which, step):
        prepare(which, step)
        gradients = steppings[which].groups[0].gradients
        steppings[which].groups[0].gradients = [g.clone() for g in gradients]
        steppings[which].step()

    for step in range(2):
        eager(0, step)
        eager(1, step)
    prepare(1, 2)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        steppings[1].step()
    for step in range(2, 20):
        eager(0, step)
        if step == 9:
            eager(1, step)
        else:
            prepare(1, step)
            graph.replay()
        assert same(steppings[0].tensors(finish=False), steppings[1].tensors(finish=False))
    assert same(steppings[0].tensors(), steppings[1].tensors())


@pytest.mark.gpu
def test_capture_needs_a_step_before():
    stepping = Stepping(Run([{"sizes": (5,), "lr": 0.1}], options=STRONG))
    stepping.groups[0].gradients = stepping.gradients(0)[0]
    graph = torch.cuda.CUDAGraph()

    def capture():
        with torch.cuda.graph(graph):
            stepping.clock.add(0)  # an empty graph would be warned about
            stepping.step()

    with pytest.raises(RuntimeError, match="before the capture"):
        capture()


@pytest.mark.gpu
def test_more_elements_than_32_bits_count():
    size = 2**31 + 3 * 4096 + 5
    if torch.cuda.mem_get_info()[0] < 10 * size:
        pytest.skip("needs 22 GB of free memory")
    places = [0, 2**31 - 1, 2**31, 2**31 + 4096, size - 1]
    weight, gradient, iterate, offset = (
        torch.zeros(size, dtype=torch.bfloat16, device=device()) for _ in range(4)
    )
    gradient[places] = 1.0
    group = group_of([weight], [gradient], iterates=[iterate], offsets=[offset], lr=1.0)
    backend, squared = TritonBackend(device()), scalar()
    take_step(backend, [group], shared_of(Timetable(9, 0, 2.0)), scalar(dtype=torch.int64), squared)
    backend.finish_distance(squared)
    assert float(squared) == len(places)
    assert bool((weight[places] == -1).all())
    assert int(weight.count_nonzero()) == len(places)
