"""``python -m gradred.launch`` is the ``gradred`` command."""

import sys

from gradred.launch.cli import main

sys.exit(main())
