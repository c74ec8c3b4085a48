"""Where the console script begins: what must be set before torch is loaded, and whether it is.

Owns: that order.  Does not know: commands.
"""

from __future__ import annotations

import os
import sys


def main() -> int:
    """Run the command line.

    OpenMP's threads sleep while they wait for each other, unless OMP_WAIT_POLICY says otherwise.
    By default they spin, and where another process takes a core for a moment each of a step's
    hundreds of products waits for it: measured 2 to 20 times slower, against 5 to 15 % gained on
    an idle machine.  The library reads the variable as it is loaded, so this comes first.
    Commands that need no model never load it, and answer at once.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        from runtime.cli import quick

        if quick.takes(sys.argv[1:]):
            return quick.main()
        if sys.argv[1:2] == ["serve"]:  # started most often, and waited for: nothing else's imports
            from runtime.cli import serve  # imports torch

            return quick.run((serve,))
        from runtime.cli import main as command_line  # imports torch
    except KeyboardInterrupt:
        return 130
    return command_line.main()


if __name__ == "__main__":
    sys.exit(main())
