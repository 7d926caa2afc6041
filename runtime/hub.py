"""Whether the hub of models and data sets can be reached."""

from functools import cache


@cache
def has_hub() -> bool:
    """Whether the hub answers within 5 s. If not, its libraries, which would try for a minute, use their caches."""
    from huggingface_hub import constants, errors, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=5)
    except (errors.HTTPError, OSError):
        constants.HF_HUB_OFFLINE = True  # what the environment variable of this name sets
    return not constants.HF_HUB_OFFLINE
