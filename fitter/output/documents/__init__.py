"""The JSON documents: each declared once, for its writer and for the reference."""
