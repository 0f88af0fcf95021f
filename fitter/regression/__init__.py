from __future__ import annotations

MARKER = "fits_memory"
"""The marker of the pytest plugin, for the plugin and for what the plugin imports late."""
