"""Models of transformers: built from a folder without reading its weights, and described for exports."""
