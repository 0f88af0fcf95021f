"""Servers on this machine's loopback: rpc-servers and ``fitter serve``."""
