"""Entry of the service that `moe-coord chat` starts for itself: it ends when the chat ends.

The number of the parent comes before the arguments of ``moe-coord``. A process of its own: nothing
imports this module.
"""

import sys

from coordinator.__main__ import main
from shm.birth import die_with_parent, parent_is_gone

if __name__ == "__main__":
    parent, *arguments = sys.argv[1:]
    die_with_parent()
    if parent_is_gone(int(parent)):  # before the kernel was told
        sys.exit(0)
    sys.exit(main(arguments))
