"""Saving and loading runs.

Nothing is imported here: :mod:`scalerun.checkpoint.checkpoint_manager` needs torch's distributed
checkpoints, which take a second to import, and the small parts do not.
"""
