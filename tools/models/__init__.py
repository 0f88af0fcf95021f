"""Models to test with: headers of real ones without weights, small real ones, and what stands beside them."""
