"""What makes the documentation: pictures, generated pages, and the examples that are run."""
