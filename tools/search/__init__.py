"""Random machines that the search is held to: no card added, and no byte freed, may make a plan worse."""
