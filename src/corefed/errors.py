"""The one exception a user is meant to see."""


class UserError(Exception):
    """A mistake the user can mend. The command line prints its sentence and exits with code 2.

    The sentence says what happened, where, and what to do; it never carries a traceback.
    """
