"""Every error a user can cause. The command line prints the message and exits 1; a traceback means a bug."""


class BuilderError(Exception):
    """Base of all errors: says what was found, what was expected and what to do next, in one or two lines."""


class SpecError(BuilderError):
    """An option or a models.yaml that is wrong, or contradicts another."""


class CheckpointError(BuilderError):
    """A checkpoint that cannot be found, trusted or served for the task."""


class ExportError(BuilderError):
    """A graph that could not be created."""


class VerificationError(BuilderError):
    """A model whose answers are not the reference's; nothing is published."""


class RepositoryError(BuilderError):
    """A repository that cannot be written, or would not load."""


class ServeError(BuilderError):
    """A server that cannot start, cannot be reached, or refuses a request."""


def first_line(error: BaseException) -> str:
    """Return a library's message in one line; the kind of its error where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
