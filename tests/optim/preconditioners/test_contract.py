"""What a preconditioner must keep to, and what the user is told where it does not."""

from dataclasses import dataclass

import pytest
import torch

from neumann import Neumann
from neumann.optim.preconditioners import Diagonal, Momentum, Spectral
from tests.support.preconditioned import CLOCK, FORMS, Signs, network, trained, weights


@dataclass(frozen=True)
class Bad(Signs):
    """Returns what the test sets."""

    made: object = None
    found: object = None
    name = "bad"

    def create(self, parameter):
        return {} if self.found is not None else self.made

    def apply(self, gradients, states):
        return self.found(gradients)


@pytest.mark.parametrize(
    ("preconditioner", "message"),
    [
        (Bad(), "create of the preconditioner 'bad' must return a dict of tensors, got None"),
        (Bad(made={"a": 1.0}), r"must return a dict of tensors, got {'a': 1.0}"),
        (Bad(found=lambda g: None), "'bad' must return a list .* 6 of shapes .*, got None"),
        (Bad(found=lambda g: g[1:]), r"6 of shapes \(6, 2, 3, 3\), .*, …, got 5 of shapes \(6,\)"),
        (Bad(found=lambda g: [x.sum() for x in g]), r"got 6 of shapes \(\), \(\)"),
        (Bad(found=lambda g: [None for _ in g]), "got 6 of shapes none, none"),
    ],
)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_error_names_a_preconditioner_that_breaks_the_contract(preconditioner, message, form):
    model = network()
    before = weights(model).clone()
    with pytest.raises(ValueError, match=message):
        trained(1, model=model, precondition=preconditioner, **form)
    assert torch.equal(weights(model), before)


class Forgetful(Signs):
    """Puts a new tensor where it should write to the one there is."""

    def apply(self, gradients, states):
        for g, state in zip(gradients, states, strict=True):
            state["mean"] = 0.9 * state["mean"] + g
        return [state["mean"].sign() for state in states]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_state_that_is_replaced_is_refused(form):
    """It would be what it was in every step."""
    model = network()
    before = weights(model).clone()
    with pytest.raises(ValueError, match=r"'signs' must write to .*, and has replaced 'mean'"):
        trained(1, model=model, precondition=Forgetful(), **form)
    assert torch.equal(weights(model), before)


@pytest.mark.parametrize("bad", ["a", 0.0, -1.0, float("inf"), float("nan"), True, None])
def test_options_of_preconditioners(bad):
    for kind, name in ((Diagonal, "eps"), (Diagonal, "scale"), (Spectral, "scale")):
        with pytest.raises(
            ValueError, match=f"{name} must be a finite number above 0, got {bad!r}"
        ):
            kind(**{name: bad})
    if bad != 0.0:
        for kind in (Diagonal, Momentum):
            with pytest.raises(ValueError, match=rf"decay must be in \[0, 1\), got {bad!r}"):
                kind(decay=bad)


def refused(precondition, message):
    with pytest.raises(ValueError, match=message):
        Neumann(network().parameters(), lr=0.1, precondition=precondition)


class Half:
    """Two parts of four."""

    def create(self, parameter):
        return {}

    def apply(self, gradients, states):
        return list(gradients)


def test_an_object_without_the_methods_is_refused():
    refused(Half(), "or a Preconditioner, got <.*Half object.*>, which has no name, elementwise$")
    refused(Signs, "or a Preconditioner, got <class .*Signs'>$")
    refused("spectrl", "must be None, one of 'diagonal', 'spectral' or a .*, got 'spectrl'$")


@dataclass(frozen=True)
class Named(Signs):
    """By a name that it should not have."""

    name = "spectral"


def test_a_reserved_name_is_refused():
    """The checkpoint would be taken for one of the built-in P."""
    refused(Named(), "must not be named 'diagonal', 'spectral', got 'spectral' of Named()")


def test_a_differentiable_step_equals_a_plain_step():
    with pytest.raises(ValueError, match="does not support a preconditioner"):
        Neumann(
            network().parameters(), lr=0.1, precondition="diagonal", differentiable=True, **CLOCK
        )


class After(Signs):
    """A preconditioner with another one before it."""

    name = "after"

    def __init__(self, before=None):
        object.__setattr__(self, "before", before)


def test_the_preconditioner_before_another_is_checked():
    itself = After()
    object.__setattr__(itself, "before", itself)
    for before in ("momentum", Momentum, After("diagonal"), itself):
        chosen = before if before is itself else After(before)
        with pytest.raises(
            ValueError, match="before of the preconditioner 'after' must be None or"
        ):
            Neumann(network().parameters(), lr=0.1, precondition=chosen)
    trained(1, precondition=After(Momentum()))
