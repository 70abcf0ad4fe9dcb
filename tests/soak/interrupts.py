"""Ctrl-C at every bytecode position of train, eval, evaluating and step, in every CPU backend.

A case is one operation in one situation, and runs it once for an eighth of its positions. Then the
optimizer must be wholly in one mode and still have w, and it must be able to go on: switch, save,
load and step. An interrupted step has not happened, or has happened, or says that it was cut short
and refuses to go on until a checkpoint is loaded.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from neumann import Neumann
from neumann.optim.preconditioners.memory import PREFIX
from tests.soak.program import Broken, Program, check
from tests.soak.same_bits import same_bits
from tests.support.interrupts import count_positions, interrupt_at

BACKENDS: dict[str, dict[str, Any]] = {
    "reference": {"foreach": False},
    "lists": {"foreach": True},
    "numba": {"fused": True},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "forces": {"cubic": 0.01, "repulsive": 0.01},
    "no forces": {"cubic": 0.0, "repulsive": 0.0},
    "diagonal": {"precondition": "diagonal", "cubic": 0.01},
    "skipping": {"skip_nonfinite": True, "weight_decay": 0.1},
    "bfloat16 state": {"state_dtype": torch.bfloat16},
}
PHASES = {"warm-up": 1, "reset": 2, "iterate": 4}  # steps before the one that is interrupted
THOROUGH = ("forces",)  # options that meet every phase
WARMUP = 2
PARTS = 8  # of a situation: part i has the positions i + 1, i + 9, …


def leave_at_once(optimizer: Neumann) -> None:
    with optimizer.evaluating():
        pass


@dataclass(frozen=True)
class Switching:
    """An interrupted change of mode."""

    name: str
    operation: Callable[[Neumann], Any]
    training: bool  # the mode before it
    restores: bool  # whether the mode after an interrupt must be the one before


SWITCHES = (
    Switching("train", Neumann.train, False, False),
    Switching("eval", Neumann.eval, True, False),
    Switching("evaluating", leave_at_once, True, True),
    Switching("evaluating in evaluation mode", leave_at_once, False, True),
)


class Interrupts(Program):
    name = "interrupts"
    counted = ("positions", "switches", "steps", "cut short")
    weight = 6.0

    def count_cases(self) -> int:
        return len(SITUATIONS) * PARTS

    def run(self, case: int, counts: Counter[str]) -> None:
        part, number = divmod(case, len(SITUATIONS))
        kind, backend, options, situation = SITUATIONS[number]
        base = build(backend, options, self.seed)
        if kind == "switch":
            interrupt_switches(base, situation, part, counts)
        else:
            interrupt_steps(base, PHASES[situation], part, counts)


def list_situations() -> Iterator[tuple[str, str, str, Any]]:
    # A switch hardly depends on the backend, so each meets it with one set of options.
    for backend, options in dict.fromkeys(
        [*product(BACKENDS, ["forces"]), *product(["reference"], OPTIONS)]
    ):
        yield from (("switch", backend, options, switching) for switching in SWITCHES)
    for backend, options in product(BACKENDS, OPTIONS):
        phases = PHASES if options in THOROUGH else ("iterate",)
        yield from (("step", backend, options, phase) for phase in phases)


SITUATIONS = list(list_situations())


def build(backend: str, options: str, seed: int) -> Neumann:
    """Two groups and frozen parameters, before the first step."""
    generator = torch.Generator().manual_seed(seed)
    weights = [nn.Parameter(torch.randn(n, generator=generator)) for n in (3, 2, 5)]
    weights[1].requires_grad_(False)
    groups = [{"params": weights[:2]}, {"params": weights[2:], "lr": 0.05}]
    own = {"warmup_steps": WARMUP, "reset_steps": 5, **OPTIONS[options], **BACKENDS[backend]}
    return Neumann(groups, lr=0.1, **own)


def parameters(optimizer: Neumann) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def give_gradients(optimizer: Neumann) -> None:
    for p in parameters(optimizer):
        p.grad = 0.3 * p.detach() + 1 if p.requires_grad else None


def step(optimizer: Neumann, times: int = 1) -> None:
    for _ in range(times):
        give_gradients(optimizer)
        optimizer.step()


def weights_of(optimizer: Neumann) -> list[Tensor]:
    return [p.detach().clone() for p in parameters(optimizer)]


def shown_in_evaluation(optimizer: Neumann) -> list[Tensor]:
    with optimizer.evaluating():
        return weights_of(optimizer)


def try_positions(
    positions: int, part: int, attempt: Callable[[int], None], counts: Counter[str]
) -> None:
    """Try the positions of this part; the error says how many failed, and how the first did."""
    failed = []
    for position in range(1 + part, positions + 1, PARTS):
        counts["positions"] += 1
        try:
            attempt(position)
            check(torch.is_grad_enabled(), "an interrupt left autograd switched off")
        except Exception as error:
            failed.append((position, error))
        finally:
            torch.set_grad_enabled(True)
    if failed:
        position, first = failed[0]
        message = f"{len(failed)} positions fail; {position} of {positions}: {first}"
        raise Broken(message) from first


def interrupt_switches(
    base: Neumann, switching: Switching, part: int, counts: Counter[str]
) -> None:
    step(base, 6)
    displaced, corrected = weights_of(base), shown_in_evaluation(base)
    base.train(switching.training)
    positions = count_positions(switching.operation, copy.deepcopy(base))

    def attempt(position: int) -> None:
        optimizer = copy.deepcopy(base)
        cut = interrupt_at(position, switching.operation, optimizer)
        check(cut, f"{switching.name} swallowed an interrupt")
        modes = {group["training"] for group in optimizer.param_groups}
        check(modes == {optimizer.training}, "groups disagree about the mode")
        expected = displaced if optimizer.training else corrected
        check(same_bits(weights_of(optimizer), expected), "a mixture of w and w − μm")
        if switching.restores:
            check(optimizer.training is switching.training, "another mode than before")
        optimizer.eval()
        check(same_bits(weights_of(optimizer), corrected), "eval() no longer gives w − μm")
        optimizer.train()
        check(same_bits(weights_of(optimizer), displaced), "w is lost")
        counts["switches"] += 1

    try_positions(positions, part, attempt, counts)


def interrupt_steps(base: Neumann, before: int, part: int, counts: Counter[str]) -> None:
    step(base, before)
    start, memory, saved = bits(base), memory_of(base), copy.deepcopy(base.state_dict())
    whole = copy.deepcopy(base)
    step(whole)
    end = bits(whole)
    counted = copy.deepcopy(base)
    give_gradients(counted)
    positions = count_positions(Neumann.step, counted)

    def attempt(position: int) -> None:
        optimizer = copy.deepcopy(base)
        give_gradients(optimizer)
        gradients = [None if p.grad is None else p.grad.clone() for p in parameters(optimizer)]
        check(interrupt_at(position, Neumann.step, optimizer), "step swallowed an interrupt")
        found = [p.grad for p in parameters(optimizer)]
        check(same_bits(found, gradients), "an interrupted step changed gradients")
        counts["steps"] += 1
        if is_cut_short(optimizer):
            counts["cut short"] += 1
            with torch.no_grad():
                for p, w in zip(parameters(optimizer), start["weights"], strict=True):
                    p.copy_(w)
            optimizer.load_state_dict(copy.deepcopy(saved))
        moment = bits(optimizer)
        if same_bits(moment, start):
            if not same_bits(memory_of(optimizer), memory):
                return  # P alone may have taken in the gradient: docs/reference.md
            step(optimizer)
            check(same_bits(bits(optimizer), end), "after an interrupt the step has other bits")
        else:
            check(same_bits(moment, end), "a step that happened in part, and does not say so")

    try_positions(positions, part, attempt, counts)


def is_cut_short(optimizer: Neumann) -> bool:
    """Whether the optimizer says that its last step happened in part; then it refuses to go on."""
    refused = []
    for method in (optimizer.state_dict, optimizer.train, optimizer.eval, optimizer.step):
        try:
            method()
        except RuntimeError as error:
            check("cut short" in str(error), f"{method.__name__} fails: {error}")
            refused.append(method.__name__)
        if not refused:
            return False
    check(len(refused) == 4, f"after a step that was cut short only {refused} refuse")
    return True


def bits(optimizer: Neumann) -> dict[str, Any]:
    """All that a step changes, except what P remembers."""
    return {"weights": weights_of(optimizer), "state": _select(optimizer, memory=False)}


def memory_of(optimizer: Neumann) -> Any:
    return _select(optimizer, memory=True)


def _select(optimizer: Neumann, memory: bool) -> Any:
    state = optimizer.state_dict()["state"]
    return {
        i: {k: v.clone() for k, v in entry.items() if k.startswith(PREFIX) == memory}
        for i, entry in state.items()
    }
