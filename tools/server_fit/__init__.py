"""What the real llama-server's own fit measures and decides on virtual devices, in bytes, beside fitter.

``spy.cpp`` is loaded into llama-server before it starts: it writes what the fit asks of llama.cpp, and ends the process
before anything is loaded. ``pairs`` are the models, machines and options; ``compare`` measures the same with fitter.
"""
