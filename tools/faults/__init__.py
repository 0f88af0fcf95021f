"""What goes wrong on purpose: killed workers, and servers that are cut off."""
