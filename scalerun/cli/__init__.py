"""The commands. Each ``main`` reads as a recipe."""

import os

# OpenMP's default keeps idle threads spinning, which slows a busy machine down many times. It is
# read when torch is first imported, so it has to be set before.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
