"""Processes, devices, number formats, signals."""
