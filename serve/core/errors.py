"""Every error a person or a client can meet, with its exit code and HTTP status.

    BrigadeError                       exit  HTTP
    ├── UsageError                        2   400   a flag, variable or body is wrong
    │   └── RequestError                  -   400   one request is wrong; the server goes on
    │       ├── NotFoundError             -   404
    │       ├── AdapterError              -   400   an adapter cannot be used; or 403, 404, 409
    │       ├── OverflowedError           -   500   its numbers were not finite
    │       ├── RequestCancelledError     -   410   an operator ended it
    │       └── OverloadedError           -   429
    ├── ModelError                        3   503   the model folder is missing or broken
    ├── PlanError                         4   503   the model does not split that way
    ├── AddressError                      5   503   a port or address cannot be used
    ├── ClusterError                      6   503   a rank is missing, lost or different
    │   ├── DisagreementError             6   503   ranks have different files or versions
    │   ├── LostRankError                75   503   another rank of a training run is lost
    │   └── UnavailableError              -   503   not ready yet, or draining
    ├── EngineError                       7   503   the engine process broke
    └── GivenUpError                      -   500   a request that ended the engines again and again

The message is one line: what is wrong, where, and how to fix it.
"""


class BrigadeError(Exception):
    """The base of all errors that a person or a client can meet. param names the field of a request
    that is wrong. code names the reason, in OpenAI's words where there are any. An error without
    its own code has its class's."""

    exit_code = 1
    http_status = 500
    type = "server_error"
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(" ".join(message.split()))
        self.param = param
        if code is not None:
            self.code = code


class UsageError(BrigadeError):
    exit_code = 2
    http_status = 400
    type = "invalid_request_error"
    code = "usage"


class RequestError(UsageError):
    """An error of one request. It is reported to the client and never ends a process. The message
    may quote what the client wrote, so it is not logged; code must not quote it, and is logged."""

    code = "invalid_value"


class NotFoundError(RequestError):
    http_status = 404
    code = "not_found"


class AdapterError(RequestError):
    """An adapter named by a client or on the command line cannot be used. status is HTTP's."""

    code = "adapter"

    def __init__(self, message: str, status: int = 400, *, code: str | None = None) -> None:
        super().__init__(message, param="lora_path", code=code)
        self.http_status = status


class RequestCancelledError(RequestError):
    """An operator ended this request. Clients do not repeat a request after this status."""

    http_status = 410
    code = "request_cancelled"

    def __init__(self) -> None:
        super().__init__("The operator of this server cancelled the request.")


class OverflowedError(RequestError):
    """The logits of a sequence were not finite. The status is 500, because the model or adapter is
    to blame."""

    http_status = 500
    type = "server_error"
    code = "numbers_overflowed"

    def __init__(self, sequence: int, adapter: str | None) -> None:
        where = f"the adapter {adapter!r}" if adapter else "no adapter"
        super().__init__(
            f"The numbers of sequence {sequence} ({where}) overflowed, so that no token could be "
            "sampled: use a model in bfloat16 or float32, or an adapter with smaller weights."
        )


class OverloadedError(RequestError):
    http_status = 429
    type = "rate_limit_error"
    code = "overloaded"
    retry_after_seconds = 1


class ModelError(BrigadeError):
    exit_code = 3
    http_status = 503
    code = "model"


class PlanError(BrigadeError):
    exit_code = 4
    http_status = 503
    code = "plan"


class AddressError(BrigadeError):
    exit_code = 5
    http_status = 503
    code = "address"


class ClusterError(BrigadeError):
    exit_code = 6
    http_status = 503
    type = "service_unavailable"
    code = "cluster"


class DisagreementError(ClusterError):
    """Ranks have different files or versions. rows maps the name of each such fact to the ranks'
    values."""

    code = "ranks_differ"

    def __init__(self, rows: dict[str, dict[int, str]]) -> None:
        self.rows = rows
        differences: list[str] = []
        for name, values in rows.items():
            by_rank = [f"rank {rank} has {value}" for rank, value in values.items()]
            differences.append(f"{name}: {', '.join(by_rank)}")
        what = "; ".join(differences)
        super().__init__(
            f"The ranks differ ({what}): install the same versions and copy the same files on "
            "all hosts."
        )


class LostRankError(ClusterError):
    """A training run has lost a rank, and ends. A launcher starts all ranks again."""

    exit_code = 75
    code = "lost_rank"


class UnavailableError(ClusterError):
    code = "unavailable"
    retry_after_seconds = 2


def stopping() -> UnavailableError:
    return UnavailableError("The server is stopping.")


class EngineError(BrigadeError):
    exit_code = 7
    http_status = 503
    code = "engine"


class GivenUpError(BrigadeError):
    """A request that ended the engines too often: 500, so that clients do not repeat it."""

    code = "request_given_up"


_WITH_EXIT_CODE = (
    UsageError,
    ModelError,
    PlanError,
    AddressError,
    ClusterError,
    LostRankError,
    EngineError,
)
_BY_EXIT_CODE: dict[int, type[BrigadeError]] = {error.exit_code: error for error in _WITH_EXIT_CODE}


def from_exit_code(exit_code: int, message: str, code: str | None = None) -> BrigadeError:
    """Returns the error with which another process ended, to pass on its exit code and code."""
    error_class = _BY_EXIT_CODE.get(exit_code, EngineError)
    return error_class(message, code=code)
