"""What builds of llama.cpp themselves say that loads take, to compare fitter with."""
