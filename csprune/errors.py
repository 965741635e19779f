"""The errors a user can cause or mend; everything else is a defect of csprune."""


class CspruneError(Exception):
    """Work that cannot go on: the command line prints the message in one line and exits with 1.

    The message says what happened, where, and what to do about it.
    """

    exit_status = 1


class InputError(CspruneError):
    """Bad usage or bad input: the command line exits with 2.

    Raised before anything is written, so that nothing is lost.
    """

    exit_status = 2
