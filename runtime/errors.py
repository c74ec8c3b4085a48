"""Errors of the runtime, drawn as a tree.

Owns: what can go wrong around the cache, and whose doing it is.  Does not know: HTTP or exit codes;
the server and the command line translate.

    RuntimeFault
    ├── RequestError          the caller's mistake in one request
    │   ├── InvalidRequest       a field has a wrong value
    │   ├── PromptTooLong        the prompt fits neither the model nor the pool
    │   ├── InvalidLog           a log of requests holds what is no request
    │   ├── ModelNotFound        another model was asked for than is served
    │   ├── SessionNotFound      no such session of the caller's: never was, closed, or expired
    │   └── SessionBusy          the session generates or scores, or was changed meanwhile
    ├── InvalidSetting        the operator's mistake in a setting
    ├── NotExact              a row's bits depend on its batch here, and exactness was required
    ├── ModelFileError        the model's files are missing, damaged or not supported
    │   └── DownloadError        a download failed, or its bytes are wrong
    ├── BlockRefused          the world: K/V that came back is damaged, or another's
    ├── PortTaken             the world: an address to serve on can't be had
    ├── NoAnswer              the world: a server can't be reached, or broke down
    ├── ServerBusy            too many requests wait: come back later
    └── EngineFailure         our bug, or the device's: the engine could not run a step
        ├── CopiesFailed         blocks were not copied: the step can't be computed again
        └── BrokenLogits         the model computed what is no number
"""


class RuntimeFault(Exception):
    """Base of every error that the runtime raises on purpose; `str(error)` says what to do next."""


class RequestError(RuntimeFault):
    """The caller's mistake in one request; other requests are not touched.

    param  the name of the offending field, or None where no single one is to blame
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequest(RequestError):
    """A field of the request has a value that can't be served."""


class InvalidLog(RequestError):
    """A line of a log is no request: it is no JSON, or has no prompt."""


class PromptTooLong(RequestError):
    """The prompt does not fit.

    num_tokens  tokens of the prompt
    max_tokens  tokens that fit, the first generated token included
    """

    def __init__(self, message: str, *, num_tokens: int, max_tokens: int) -> None:
        super().__init__(message, param="prompt")
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens


class ModelNotFound(RequestError):
    """A request names a model that this server does not serve."""


class SessionNotFound(RequestError):
    """The caller has no session of this id: there never was one, it was closed, or it expired."""


class SessionBusy(RequestError):
    """A session can't be used now: it generates or scores, or somebody changed it meanwhile."""


class InvalidSetting(RuntimeFault):
    """A setting, or a set of them, that no engine or server can be built from."""


class NotExact(RuntimeFault):
    """Exactness was required, but on this machine a row's bits depend on its batch."""


class ModelFileError(RuntimeFault):
    """A model's files are missing, damaged, or of a kind that is not supported."""


class DownloadError(ModelFileError):
    """A download failed, or what came is not what was asked for."""


class BlockRefused(RuntimeFault):
    """K/V that comes back from elsewhere is damaged, or not what is wanted; nothing was written."""


class PortTaken(RuntimeFault):
    """An address to serve on can't be had: somebody else has it, or it is not this machine's."""


class NoAnswer(RuntimeFault):
    """A server can't be reached, or answers with an error of its own."""


class ServerBusy(RuntimeFault):
    """More requests wait than the server holds; `retry_after_s` says when to come back."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineFailure(RuntimeFault):
    """A step of the engine failed; the requests that it failed for are ended, the others go on."""


class BrokenLogits(EngineFailure):
    """Logits that a token was to be chosen from are infinite or no numbers."""


class CopiesFailed(EngineFailure):
    """The copies of a step were not all carried out; every request of that step is ended."""
