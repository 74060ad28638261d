import time

import pytest

from rayway.storage.failures import is_transient
from rayway.storage.retry import Retry


class Flaky:
    """Fails so many times, then answers."""

    def __init__(self, failures: int, error: Exception) -> None:
        self.left, self.error, self.calls = failures, error, 0

    def __call__(self) -> str:
        self.calls += 1
        if self.left:
            self.left -= 1
            raise self.error
        return "answer"


def test_a_transient_error_is_ridden_out() -> None:
    call = Flaky(4, ConnectionResetError())
    assert Retry(budget_s=5, first_s=0.001).run(call) == "answer"
    assert call.calls == 5


def test_the_budget_ends_it_with_the_last_error() -> None:
    call = Flaky(10**6, TimeoutError("slow"))
    begun = time.monotonic()
    with pytest.raises(TimeoutError, match="slow"):
        Retry(budget_s=0.2, first_s=0.01).run(call)
    assert time.monotonic() - begun < 1
    assert call.calls > 2


@pytest.mark.parametrize("error", [FileNotFoundError(), PermissionError(), ValueError()])
def test_a_final_answer_is_not_asked_for_again(error: Exception) -> None:
    call = Flaky(1, error)
    with pytest.raises(type(error)):
        Retry(budget_s=5).run(call)
    assert call.calls == 1


def test_without_a_budget_there_is_one_try() -> None:
    call = Flaky(1, TimeoutError())
    with pytest.raises(TimeoutError):
        Retry(budget_s=0).run(call)
    assert call.calls == 1


def test_network_errors_of_client_libraries_are_transient() -> None:
    botocore = pytest.importorskip("botocore.exceptions")
    assert is_transient(botocore.EndpointConnectionError(endpoint_url="x"))
    assert is_transient(botocore.ReadTimeoutError(endpoint_url="x"))
    assert not is_transient(botocore.NoCredentialsError())
