"""Devices: what executes plans."""
