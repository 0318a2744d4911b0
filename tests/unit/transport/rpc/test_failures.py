from __future__ import annotations

import inspect

import pytest

from areal_sc import errors
from areal_sc.errors import ArealError, ConfigError, RemoteError, WorkflowError
from areal_sc.transport.rpc.codec import Failure, decode, encode, error_of, failure_of


def raised(error: Exception) -> Exception:
    """The error with a traceback that names this function."""
    try:
        raise error
    except Exception as caught:
        return caught


def over_the_wire(error: Exception) -> ArealError:
    frame = encode(failure_of(raised(error), "id"))
    failure = decode([memoryview(frame)])
    assert isinstance(failure, Failure)
    return error_of(failure, node_id="train/0", method="step")


@pytest.mark.parametrize(
    "cls",
    [
        cls
        for _, cls in inspect.getmembers(errors, inspect.isclass)
        if issubclass(cls, ArealError) and cls is not RemoteError
    ],
)
def test_every_own_error_arrives_as_itself(cls: type[ArealError]) -> None:
    arrived = over_the_wire(cls("expected 3, got 4"))
    assert type(arrived) is cls
    assert str(arrived) == "expected 3, got 4"
    assert arrived.exit_code == cls.exit_code
    assert "raised by step on train/0" in arrived.__notes__[0]
    assert "in raised" in arrived.__notes__[0]


def test_another_error_arrives_as_remote_error_with_its_type_and_traceback() -> None:
    arrived = over_the_wire(KeyError("absent"))
    assert isinstance(arrived, RemoteError)
    assert arrived.error_type == "KeyError"
    assert "in raised" in arrived.remote_traceback
    assert str(arrived) == "step on train/0 raised KeyError: 'absent'"


def test_a_users_subclass_arrives_as_its_nearest_known_class() -> None:
    class MyWorkflowError(WorkflowError):
        pass

    assert type(over_the_wire(MyWorkflowError("no tools"))) is WorkflowError


def test_a_class_that_only_has_the_name_of_a_known_one_is_not_mistaken_for_it() -> None:
    impostor = type("ConfigError", (Exception,), {})
    arrived = over_the_wire(impostor("x"))
    assert isinstance(arrived, RemoteError)
    assert not isinstance(arrived, ConfigError)


def test_a_remote_error_that_is_passed_on_keeps_its_origin() -> None:
    first = over_the_wire(ZeroDivisionError("a/0"))
    second = over_the_wire(first)
    assert isinstance(first, RemoteError)
    assert isinstance(second, RemoteError)
    assert second.error_type == "ZeroDivisionError"
    assert second.remote_traceback == first.remote_traceback


def test_long_and_unencodable_texts_are_sent_within_bounds() -> None:
    arrived = over_the_wire(ValueError("\ud800" + "x" * 1_000_000))
    assert isinstance(arrived, RemoteError)
    assert len(str(arrived)) < 10_000
    assert len(arrived.remote_traceback) <= 16_000
