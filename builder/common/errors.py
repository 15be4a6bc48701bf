"""Every error a user can cause. The command line prints the message and exits 1; a traceback means a bug.

BuilderError
├── SpecError          an option or a models.yaml that is wrong, or contradicts another
├── CheckpointError    a checkpoint that cannot be found, trusted or served for the task
├── ExportError        a graph that could not be made
├── VerificationError  a model whose answers are not the reference's; nothing is published
├── RepositoryError    a repository that cannot be written, or would not load
└── ServeError         a server that cannot start, cannot be reached, or refuses a request
"""


class BuilderError(Exception):
    """Base of all errors: says what was found, what was expected and what to do next, in one or two lines."""


class SpecError(BuilderError):
    pass


class CheckpointError(BuilderError):
    pass


class ExportError(BuilderError):
    pass


class VerificationError(BuilderError):
    pass


class RepositoryError(BuilderError):
    pass


class ServeError(BuilderError):
    pass


def first_line(error: BaseException) -> str:
    """Return a library's message in one line; the kind of its error where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
