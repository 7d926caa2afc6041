"""Calls a function of a test file with texts, in a process of its own.

python tests/helpers/call.py MODULE:FUNCTION TEXTS...
"""

import pkgutil
import sys

if __name__ == "__main__":
    pkgutil.resolve_name(sys.argv[1])(*sys.argv[2:])
