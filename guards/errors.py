"""What ends a run in a sentence."""


class RunError(Exception):
    """Ends the run, without a traceback: the message says what happened and what to do."""
