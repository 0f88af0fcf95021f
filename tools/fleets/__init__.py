"""Compare plans of fleets with other ways to run several models on one machine."""
