"""The commands. Each ``main`` reads as a recipe."""

import os
import signal
import sys

# OpenMP's default keeps idle threads spinning, which slows a busy machine down many times. It is
# read when torch is first imported, so it has to be set before.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Ctrl-C during the imports ends the command without a traceback; run_cli catches it from then on.
if os.path.basename(sys.argv[0]).startswith(("-m", "scalerun-")):
    signal.signal(signal.SIGINT, signal.SIG_DFL)
